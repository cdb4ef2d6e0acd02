"""A Plan: which layout each parameter has and which choice each op takes. It touches no graph and knows no rank.

Plans print, compare, and go through JSON; the layouts are written as they print (`S(0; 7x8)`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchshard.errors import PlanError
from torchshard.layouts import Layout, parse_layout
from torchshard.notation import Choice

VERSION = 1
"""Of the JSON form."""


@dataclass(frozen=True)
class Plan:
    """One choice per op, one layout per parameter."""

    world_size: int
    """The number of ranks that it was made for."""
    parameters: Mapping[str, Layout]
    """The layout of each parameter and buffer, by its name in the model."""
    choices: Mapping[str, Choice]
    """The choice of each op, by the node's name."""
    comm_bytes: float = field(default=0.0, compare=False)
    """Predicted bytes that each rank sends per step, forward and backward, at the example inputs' sizes."""

    def to_json(self) -> str:
        """The plan as JSON text."""
        choices = {
            name: {"choice": c.name, "operands": [str(x) for x in c.operands], "results": [str(x) for x in c.results]}
            for name, c in self.choices.items()
        }
        parameters = {name: str(layout) for name, layout in self.parameters.items()}
        body = {"version": VERSION, "world_size": self.world_size, "parameters": parameters, "choices": choices}
        return json.dumps(body | {"comm_bytes": self.comm_bytes}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is no plan, or one of another version.
        """
        try:
            body: dict[str, Any] = json.loads(text)
            if body["version"] != VERSION:
                raise ValueError(f"version {body['version']}, this library reads {VERSION}")
            choices = {
                name: Choice(c["choice"], _layouts(c["operands"]), _layouts(c["results"]))
                for name, c in body["choices"].items()
            }
            parameters = {name: parse_layout(layout) for name, layout in body["parameters"].items()}
            return Plan(int(body["world_size"]), parameters, choices, float(body["comm_bytes"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                "this is no plan that can be read",
                where="Plan.from_json",
                why=f"{type(error).__name__}: {error}",
                attempt="a file that Plan.to_json() wrote",
            ) from None

    def __str__(self) -> str:
        """One line per parameter that is split, then what the whole costs."""
        split = {name: layout for name, layout in self.parameters.items() if str(layout) != "I"}
        width = max((len(name) for name in split), default=0)
        lines = [f"plan for {self.world_size} ranks: {len(split)} of {len(self.parameters)} parameters are split"]
        lines += [f"  {name:{width}}  {layout}" for name, layout in split.items()]
        return "\n".join([*lines, f"  {self.comm_bytes / 1024:.1f} KiB per rank and step, forward and backward"])


def _layouts(texts: list[str]) -> tuple[Layout, ...]:
    return tuple(parse_layout(t) for t in texts)


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The plan as plain data that two ranks can compare."""
    return asdict(plan) | {"comm_bytes": 0.0}
