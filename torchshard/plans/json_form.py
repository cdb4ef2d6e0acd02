"""Writes a plan as JSON, and reads it with the type of every field checked: a file may come from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast, get_args

from torchshard.core.conversions import BESIDE, TABLE, ConversionStep, Steps
from torchshard.core.errors import InputError, PlanError, in_short
from torchshard.core.layouts import Layout, Part, Shard, parse_layout
from torchshard.core.notation import Choice
from torchshard.core.types import is_of, texts
from torchshard.plans.data import Collective, Costs, GatheredOps, PlanData, Sent, Stored, Written
from torchshard.plans.machine import Data, Machine

VERSION = 4
"""Of the JSON form."""


def write(plan: PlanData, question: Mapping[str, Any] | None = None) -> str:
    """The plan as text.

    Args:
        question: what it is the answer to, written in one line.
    """
    text = json.dumps(_body(plan), indent=1)
    if not question:
        return text
    line = json.dumps(question, separators=(",", ":"))
    return f'{text.removesuffix("}").rstrip()},\n "question": {line}\n}}'


def _body(plan: PlanData) -> dict[str, Any]:
    choices = {
        name: {
            "choice": c.name,
            "operands": [str(x) for x in c.operands],
            "results": [str(x) for x in c.results],
            "axes": c.axes,
        }
        for name, c in plan.choices.items()
    }
    collectives = [asdict(c) | {"source": str(c.source), "target": str(c.target)} for c in plan.costs.collectives]
    body: dict[str, Any] = {
        "version": VERSION,
        "world_size": plan.world_size,
        "fingerprint": plan.fingerprint,
        "title": plan.title,
        "static": plan.static,
        "recompute": list(plan.recompute),
        "machine": plan.machine.fields,
        "parameters": {name: str(layout) for name, layout in plan.parameters.items()},
        "stored": {name: asdict(stored) for name, stored in plan.stored.items()},
        "choices": choices,
        "conversions": {
            name: [[step.name, str(step.source), str(step.target)] for step in steps]
            for name, steps in plan.conversions.items()
        },
        "costs": asdict(plan.costs) | {"collectives": collectives},
    }
    if plan.label:
        body["label"] = plan.label
    if plan.data:
        body["data"] = plan.data
    if plan.inputs:
        body["inputs"] = {place: str(layout) for place, layout in plan.inputs.items()}
    if plan.batch is not None:
        body["batch"] = _body(plan.batch)
    return body


def read(text: str, where: str) -> dict[str, Any]:
    """The fields of the plan that was written, and of its `batch`; `where` names the text's origin in errors.

    Raises:
        PlanError: the text is no plan, one of another version, or cut short.
    """
    try:
        return _fields(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, InputError) as error:
        raise PlanError(
            "this is no plan that can be read",
            where=where,
            why=in_short(error),
            attempt="a file that Plan.to_json() of this version wrote",
        ) from None


def _fields(body: dict[str, Any]) -> dict[str, Any]:
    if body["version"] != VERSION:
        raise ValueError(f"version {body['version']}, this library reads {VERSION}: plan again")
    choices = {
        name: Choice(is_of(str, c["choice"]), _layouts(c["operands"]), _layouts(c["results"]), _axes(c["axes"]))
        for name, c in is_of(dict, body["choices"]).items()
    }
    parameters = {name: parse_layout(layout) for name, layout in is_of(dict, body["parameters"]).items()}
    stored = {name: _stored(s) for name, s in is_of(dict, body["stored"]).items()}
    for name, layout in parameters.items():
        if name not in stored or (isinstance(layout, Shard) and layout.dim >= len(stored[name].shape)):
            shape = stored[name].shape if name in stored else "unknown"
            raise ValueError(f"{name} has layout {layout}, and shape {shape}")
    for name in stored:
        if name not in parameters:
            raise ValueError(f"{name} has no layout")
    world = is_of(int, body["world_size"])
    if world < 1:
        raise ValueError(f"world_size {world}")
    return {
        "world_size": world,
        "parameters": parameters,
        "choices": choices,
        "conversions": {name: _steps(steps) for name, steps in is_of(dict, body["conversions"]).items()},
        "stored": stored,
        "fingerprint": is_of(str, body["fingerprint"]),
        "title": is_of(str, body.get("title", "")),
        "costs": _costs(body["costs"]),
        "machine": _machine(body["machine"]),
        "static": is_of(bool, body["static"]),
        "recompute": texts(body.get("recompute", [])),
        "data": _data(body.get("data")),
        "label": is_of(str, body.get("label", "")),
        "inputs": {place: parse_layout(layout) for place, layout in is_of(dict, body.get("inputs", {})).items()},
        "batch": _fields(is_of(dict, body["batch"])) if "batch" in body else None,
        "source": Written(is_of(dict, body["question"])) if "question" in body else None,
    }


def _costs(body: object) -> Costs:
    fields = is_of(dict, body)
    return Costs(
        is_of(str, fields["machine"]),
        _numbers(fields["compute"]),
        tuple(map(_collective, is_of(list, fields["collectives"]))),
        _number(fields["gap"]),
        _numbers(fields["memory"]),
        tuple(map(_gathered, is_of(list, fields["whole"]))),
        {int(ranks): _number(seconds) for ranks, seconds in is_of(dict, fields["fewer"]).items()},
        None if fields.get("context") is None else is_of(int, fields["context"]),
        None if fields.get("step") is None else _number(fields["step"]),
    )


def _machine(body: object) -> Machine:
    """Reads a machine; infinite numbers are not written, for JSON has none."""
    fields = is_of(dict, body)
    numbers = {name: _number(value) for name, value in fields.items() if name != "name"}
    return Machine(is_of(str, fields["name"]), **numbers)


def _data(value: object) -> Data | None:
    if value is not None and value not in get_args(Data):
        raise TypeError(f"expected one of {get_args(Data)}, got {value!r:.40}")
    return cast(Data | None, value)


def _number(value: object) -> float:
    if type(value) not in (int, float) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"expected a number, got {value!r:.40}")
    return float(value)


def _numbers(body: object) -> dict[str, float]:
    return {name: _number(value) for name, value in is_of(dict, body).items()}


def _stored(body: object) -> Stored:
    fields = is_of(dict, body)
    shape = tuple(is_of(int, size) for size in is_of(list, fields["shape"]))
    return Stored(shape, is_of(int, fields["itemsize"]), is_of(str, fields["module"]), texts(fields["tied"]))


def _layouts(body: object) -> tuple[Layout, ...]:
    return tuple(map(parse_layout, texts(body)))


def _steps(body: object) -> Steps:
    return tuple(
        ConversionStep(is_of(str, name), parse_layout(is_of(str, source)), parse_layout(is_of(str, target)))
        for name, source, target in is_of(list, body)
    )


def _axes(body: object) -> tuple[tuple[str, tuple[Part, ...]], ...]:
    return tuple(
        (is_of(str, axis), tuple((is_of(int, count), is_of(int, unit)) for count, unit in is_of(list, parts)))
        for axis, parts in is_of(list, body)
    )


def _gathered(body: object) -> GatheredOps:
    fields = is_of(dict, body)
    return GatheredOps(
        op=is_of(str, fields["op"]),
        line=is_of(str, fields["line"]),
        modules=texts(fields["modules"]),
        count=is_of(int, fields["count"]),
        nbytes=_number(fields["nbytes"]),
        weights=_number(fields["weights"]),
        work=_number(fields["work"]),
        why=is_of(str, fields["why"]),
    )


_NOTHING = {"kernel": "none", "nbytes": 0.0, "seconds": 0.0, "times": 1}
"""What a file says that was written before anything was sent again in the backward."""


def _sent(body: object) -> Sent:
    fields = is_of(dict, body)
    times, hidden = is_of(int, fields["times"]), _number(fields.get("hidden", 0.0))
    return Sent(is_of(str, fields["kernel"]), _number(fields["nbytes"]), _number(fields["seconds"]), times, hidden)


def _collective(body: object) -> Collective:
    fields = is_of(dict, body)
    named = {name: is_of(str, fields[name]) for name in ("value", "name", "origin", "module", "line", "type")}
    named["into"] = is_of(str, fields.get("into", named["type"]))
    if named["name"] not in (*TABLE, *BESIDE):
        raise ValueError(f"{named['name']!r} is not a collective")
    return Collective(
        **named,
        source=parse_layout(is_of(str, fields["source"])),
        target=parse_layout(is_of(str, fields["target"])),
        consumers=texts(fields["consumers"]),
        forward=_sent(fields["forward"]),
        backward=_sent(fields["backward"]),
        again=_sent(fields.get("again", _NOTHING)),
    )
