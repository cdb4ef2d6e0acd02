"""Writes a plan as JSON, and reads it with the type of every field checked: a file may come from anywhere."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from torchshard.core.conversions import ConversionStep, Steps
from torchshard.core.errors import InputError, PlanError
from torchshard.core.layouts import Layout, Part, Shard, parse_layout
from torchshard.core.notation import Choice
from torchshard.plans.data import Collective, Costs, GatheredOps, PlanData, Sent, Stored
from torchshard.plans.machine import Machine

VERSION = 3
"""Of the JSON form."""


def write(plan: PlanData) -> str:
    """The plan as text."""
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
    body = {
        "version": VERSION,
        "world_size": plan.world_size,
        "fingerprint": plan.fingerprint,
        "static": plan.static,
        "machine": {name: value for name, value in asdict(plan.machine).items() if value != getattr(Machine, name)},
        "parameters": {name: str(layout) for name, layout in plan.parameters.items()},
        "stored": {name: asdict(stored) for name, stored in plan.stored.items()},
        "choices": choices,
        "conversions": {
            name: [[step.name, str(step.source), str(step.target)] for step in steps]
            for name, steps in plan.conversions.items()
        },
        "costs": asdict(plan.costs) | {"collectives": collectives},
    }
    return json.dumps(body, indent=1)


def read(text: str, where: str) -> dict[str, Any]:
    """The fields of the plan that was written; `where` names the text's origin in errors.

    Raises:
        PlanError: the text is no plan, one of another version, or cut short.
    """
    try:
        return _fields(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, InputError) as error:
        what, _, _ = str(error).partition("\n")
        raise PlanError(
            "this is no plan that can be read",
            where=where,
            why=f"{type(error).__name__}: {what}",
            attempt="a file that Plan.to_json() wrote",
        ) from None


def _fields(body: Any) -> dict[str, Any]:
    if body["version"] != VERSION:
        raise ValueError(f"version {body['version']}, this library reads {VERSION}")
    choices = {
        name: Choice(_is(str, c["choice"]), _layouts(c["operands"]), _layouts(c["results"]), _axes(c["axes"]))
        for name, c in _is(dict, body["choices"]).items()
    }
    parameters = {name: parse_layout(layout) for name, layout in _is(dict, body["parameters"]).items()}
    stored = {name: _stored(s) for name, s in _is(dict, body["stored"]).items()}
    for name, layout in parameters.items():
        if name not in stored or (isinstance(layout, Shard) and layout.dim >= len(stored[name].shape)):
            shape = stored[name].shape if name in stored else "unknown"
            raise ValueError(f"{name} has layout {layout}, and shape {shape}")
    said = body["costs"]
    costs = Costs(
        _is(str, said["machine"]),
        _numbers(said["compute"]),
        tuple(map(_collective, said["collectives"])),
        _number(said["gap"]),
        _numbers(said["memory"]),
        tuple(map(_whole, said.get("whole", []))),
        {int(ranks): _number(seconds) for ranks, seconds in _is(dict, said.get("fewer", {})).items()},
    )
    world = _is(int, body["world_size"])
    if world < 1:
        raise ValueError(f"world_size {world}")
    return {
        "world_size": world,
        "parameters": parameters,
        "choices": choices,
        "conversions": {name: _steps(steps) for name, steps in _is(dict, body["conversions"]).items()},
        "stored": stored,
        "fingerprint": _is(str, body["fingerprint"]),
        "costs": costs,
        "machine": _machine(body.get("machine", {})),
        "static": _is(bool, body["static"]),
    }


def _machine(said: Any) -> Machine:
    """Reads a machine; fields with the default's value are not written, for JSON has no infinity."""
    numbers = {name: _number(value) for name, value in _is(dict, said).items() if name != "name"}
    return Machine(_is(str, said.get("name", Machine.name)), **numbers)


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{value!r:.40} is no number")
    return float(value)


def _numbers(said: Any) -> dict[str, float]:
    return {name: _number(value) for name, value in _is(dict, said).items()}


def _stored(said: Any) -> Stored:
    shape = tuple(_is(int, size) for size in _is(list, said["shape"]))
    tied = tuple(_is(str, name) for name in _is(list, said["tied"]))
    return Stored(shape, _is(int, said["itemsize"]), _is(str, said["module"]), tied)


def _layouts(texts: list[str]) -> tuple[Layout, ...]:
    return tuple(parse_layout(t) for t in _is(list, texts))


def _steps(said: Any) -> Steps:
    return tuple(
        ConversionStep(_is(str, name), parse_layout(_is(str, source)), parse_layout(_is(str, target)))
        for name, source, target in _is(list, said)
    )


def _axes(said: Any) -> tuple[tuple[str, tuple[Part, ...]], ...]:
    return tuple(
        (_is(str, axis), tuple((_is(int, count), _is(int, unit)) for count, unit in _is(list, parts)))
        for axis, parts in _is(list, said)
    )


def _whole(said: Any) -> GatheredOps:
    texts: dict[str, Any] = {name: _is(str, said[name]) for name in ("op", "line", "why")}
    numbers: dict[str, Any] = {name: _number(said[name]) for name in ("nbytes", "weights", "work")}
    modules = tuple(_is(str, path) for path in _is(list, said["modules"]))
    return GatheredOps(**texts, **numbers, modules=modules, count=_is(int, said["count"]))


def _collective(said: Any) -> Collective:
    ends = {end: parse_layout(said[end]) for end in ("source", "target")}
    sent = {
        way: Sent(_is(str, s["kernel"]), _number(s["nbytes"]), _number(s["seconds"]), _is(int, s.get("times", 1)))
        for way, s in ((way, said[way]) for way in ("forward", "backward"))
    }
    texts = {name: _is(str, said[name]) for name in ("value", "name", "module", "origin", "line", "type")}
    return Collective(**{**texts, **ends, **sent}, consumers=tuple(_is(str, name) for name in said["consumers"]))
