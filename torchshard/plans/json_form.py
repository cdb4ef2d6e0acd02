"""Writes a plan as JSON, and reads it with all types checked: a file may come from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import cast, get_args

from torchshard.core.conversions import BESIDE, TABLE, ConversionStep, Steps
from torchshard.core.errors import InputError, PlanError, in_short
from torchshard.core.layouts import Blocks, Layout, Parts, Shard, parse_layout
from torchshard.core.mesh import Holds, MeshAxis
from torchshard.core.rows import Choice
from torchshard.core.types import is_of, texts
from torchshard.plans.costs import Collective, Costs, GatheredOps, Sent
from torchshard.plans.data import AxisPlan, PlanData, Stored, Written
from torchshard.plans.machine import Machine
from torchshard.plans.optimizers import OPTIMIZERS, OptimizerName

VERSION = 9
"""The version of the JSON form."""


def write(plan: PlanData, question: Mapping[str, object] | None = None) -> str:
    """Returns the plan as text.

    Args:
        question: the question that it answers, written on one line.
    """
    text = json.dumps(_body(plan), indent=1)
    if not question:
        return text
    line = json.dumps(question, separators=(",", ":"))
    return f'{text.removesuffix("}").rstrip()},\n "question": {line}\n}}'


def _body(plan: PlanData) -> dict[str, object]:
    return {
        "version": VERSION,
        "title": plan.title,
        "fingerprint": plan.fingerprint,
        "stored": {name: asdict(stored) for name, stored in plan.stored.items()},
        "axes": [_axis_body(each) for each in plan.axes],
    }


def _axis_body(plan: AxisPlan) -> dict[str, object]:
    choices = {
        name: {
            "choice": c.name,
            "operands": [str(x) for x in c.operands],
            "results": [str(x) for x in c.results],
            "factors": [(factor, str(p) if isinstance(p, Blocks) else p) for factor, p in c.factors],
        }
        for name, c in plan.choices.items()
    }
    collectives = [asdict(c) | {"source": str(c.source), "target": str(c.target)} for c in plan.costs.collectives]
    return {
        "axis": asdict(plan.axis),
        "static": plan.static,
        "recompute": list(plan.recompute),
        "machine": plan.machine.fields,
        "parameters": {name: str(layout) for name, layout in plan.parameters.items()},
        "inputs": {place: str(layout) for place, layout in plan.inputs.items()},
        "choices": choices,
        "conversions": {
            name: [[step.name, str(step.source), str(step.target)] for step in steps]
            for name, steps in plan.conversions.items()
        },
        "costs": asdict(plan.costs) | {"collectives": collectives},
    }


def read(text: str, where: str) -> PlanData:
    """Returns a written plan; `where` names the text's origin in errors.

    Raises:
        PlanError: the text is not a plan, has another version, or is cut short.
    """
    try:
        return _plan(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, InputError) as error:
        raise PlanError(
            "this is no plan that can be read",
            where=where,
            why=in_short(error),
            attempt="a file that Plan.to_json() of this version wrote",
        ) from None


def _plan(body: object) -> PlanData:
    fields = is_of(dict, body)
    if fields["version"] != VERSION:
        raise ValueError(f"version {fields['version']}, this library reads {VERSION}: plan again")
    stored = {name: _stored(s) for name, s in is_of(dict, fields["stored"]).items()}
    axes = tuple(_axis_plan(each, stored) for each in is_of(list, fields["axes"]))
    if not axes:
        raise ValueError("it has no axes")
    source = Written(is_of(dict, fields["question"])) if "question" in fields else None
    return PlanData(axes, stored, is_of(str, fields["fingerprint"]), is_of(str, fields["title"]), source)


def _axis_plan(body: object, stored: Mapping[str, Stored]) -> AxisPlan:
    fields = is_of(dict, body)
    choices = {
        name: Choice(is_of(str, c["choice"]), _layouts(c["operands"]), _layouts(c["results"]), _factors(c["factors"]))
        for name, c in is_of(dict, fields["choices"]).items()
    }
    parameters = {name: parse_layout(layout) for name, layout in is_of(dict, fields["parameters"]).items()}
    for name, layout in parameters.items():
        if name not in stored or (isinstance(layout, Shard) and layout.dim >= len(stored[name].shape)):
            shape = stored[name].shape if name in stored else "unknown"
            raise ValueError(f"{name} has layout {layout}, and shape {shape}")
    for name in stored:
        if name not in parameters:
            raise ValueError(f"{name} has no layout")
    return AxisPlan(
        read_axis(fields["axis"]),
        parameters,
        choices,
        {name: _steps(steps) for name, steps in is_of(dict, fields["conversions"]).items()},
        {place: parse_layout(layout) for place, layout in is_of(dict, fields["inputs"]).items()},
        _costs(fields["costs"]),
        _machine(fields["machine"]),
        is_of(bool, fields["static"]),
        texts(fields["recompute"]),
    )


def read_axis(body: object) -> MeshAxis:
    """Reads a mesh axis from its fields.

    Raises:
        ValueError, TypeError, KeyError: the fields do not describe an axis.
    """
    fields = is_of(dict, body)
    size, holds = is_of(int, fields["size"]), fields["holds"]
    if size < 1 or holds not in get_args(Holds):
        raise ValueError(f"an axis of {size} ranks that hold {holds!r:.40}")
    return MeshAxis(size, is_of(str, fields["name"]), is_of(str, fields["label"]), holds)


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
        None if fields["context"] is None else is_of(int, fields["context"]),
        None if fields["batch"] is None else is_of(int, fields["batch"]),
        None if fields["step"] is None else _number(fields["step"]),
        _optimizer(fields["optimizer"]),
        _number(fields["products"]),
        _numbers(fields["beside"]),
    )


def _optimizer(name: object) -> OptimizerName | None:
    if name is not None and name not in OPTIMIZERS:
        raise ValueError(f"{name!r:.40} is no optimizer")
    return cast(OptimizerName | None, name)


def _machine(body: object) -> Machine:
    """Reads a machine. Infinite numbers are absent, because JSON can't express them."""
    fields = is_of(dict, body)
    numbers = {name: _number(value) for name, value in fields.items() if name not in ("name", "transfers")}
    return Machine.of({**fields, **numbers})


def _number(value: object) -> float:
    # bool is a subclass of int, but `true` is not a number in a plan
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


def _factors(body: object) -> tuple[tuple[str, Parts], ...]:
    return tuple((is_of(str, factor), _parts(parts)) for factor, parts in is_of(list, body))


def _parts(body: object) -> Parts:
    if isinstance(body, str):
        return Blocks.parse(body)
    return tuple((is_of(int, count), is_of(int, unit)) for count, unit in is_of(list, body))


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


def _sent(body: object) -> Sent:
    fields = is_of(dict, body)
    times, hidden = is_of(int, fields["times"]), _number(fields["hidden"])
    return Sent(is_of(str, fields["kernel"]), _number(fields["nbytes"]), _number(fields["seconds"]), times, hidden)


def _collective(body: object) -> Collective:
    fields = is_of(dict, body)
    named = {name: is_of(str, fields[name]) for name in ("value", "name", "origin", "module", "line", "type", "into")}
    if named["name"] not in (*TABLE, *BESIDE):
        raise ValueError(f"{named['name']!r} is not a collective")
    return Collective(
        **named,
        source=parse_layout(is_of(str, fields["source"])),
        target=parse_layout(is_of(str, fields["target"])),
        consumers=texts(fields["consumers"]),
        forward=_sent(fields["forward"]),
        backward=_sent(fields["backward"]),
        again=_sent(fields["again"]),
    )
