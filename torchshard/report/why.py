"""Explains the reason for each collective of a plan, and the cost of the best plan without it.

To find that plan, the planning problem is solved again with the collective forbidden in all equal
layers, or without one of the user's pins.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from torchshard.core.conversions import ConversionStep
from torchshard.core.errors import PlanError
from torchshard.core.paths import star_differences, star_node, star_numbers
from torchshard.core.units import size_text, time_text
from torchshard.ir.graph import op_name, whole_choice
from torchshard.planner.problem import Alternative, PlanningProblem
from torchshard.plans.costs import Collective
from torchshard.plans.data import AxisPlan
from torchshard.plans.plan import Plan
from torchshard.plans.table import held_otherwise

MAX_ALTERNATIVES = 12
"""The number of kinds of collectives with a search for an alternative, because a search takes as long
as planning."""
MOST_USERS = 3
"""The number of modules and ops named as users of a collective."""
MOST_CHANGES = 4
"""The number of changes that are named for a different plan."""
TOLD = 0.01
"""Smaller relative changes of a step's time or of a rank's bytes are not reported."""
WAYS = "forward", "again in the backward", "backward"
"""The passes of a step in which a collective sends."""

REASONS: Mapping[str, str] = {
    "copy": "each rank uses it for its own part, so its gradient is the sum of theirs",
    "reduce": "each rank has a partial sum of it, and the sum is required",
    "gather": "each rank has a slice of it, and the whole is required",
    "scatter": "each rank needs a slice of it alone, and its gradient is gathered",
    "all_gather": "each rank has a slice and needs the whole for its own part",
    "reduce_scatter": "each rank has a partial sum of it, and needs a slice of the sum",
    "all_to_all": "it is split along one dim and required split along another",
    "narrow": "each rank needs a slice of it alone",
    "pad": "each rank has a slice, and a partial sum with zeros elsewhere is required",
    "all_reduce": "each rank has a partial sum of it and needs the sum for its own part",
    "all_reduce_max": "the largest of each row may be on any rank",
    "dispatch": "each row goes to the rank that has its expert",
    "combine": "each row comes back to the rank that has its token",
}


def kinds_of(plan: AxisPlan) -> list[list[Collective]]:
    """A plan's collectives that send data, grouped by equal layers; the most expensive first."""
    groups: dict[object, list[Collective]] = {}
    for c in plan.costs.collectives:
        if c.nbytes:
            names = tuple(star_node(name) for name in (c.value, *c.consumers))
            key = (star_numbers(c.place), names, c.name, c.source, c.target, c.type)
            groups.setdefault(key, []).append(c)
    return sorted(groups.values(), key=lambda alike: -sum(c.seconds for c in alike))


def told(plan: Plan, number: int, problem: PlanningProblem | None) -> Iterator[str]:
    """Each kind of collective over an axis in a few lines: place, reason, costs, a step without it.

    Args:
        number: the axis, by its place in `plan.in_order`. Steps are compared for the first only.
        problem: the one that the axis' plan solves, if it is known.
    """
    kinds = kinds_of(plan.in_order[number])
    nodes = {} if problem is None else {node.name: node for node in problem.graph.nodes}
    for i, alike in enumerate(kinds):
        first, count = alike[0], len(alike)
        where = star_differences(*(c.place for c in alike)) or "the model"
        ways = [f"{sent.message} {way}" for way, sent in zip(WAYS, first.sent, strict=True) if sent.nbytes]
        place = "within" if first.is_inside else "after" if first.is_after else "before"
        move = f"of {first.type}" if first.is_inside else f"{first.type} -> {first.into}"
        yield f"{first.name}{f' ×{count}' if count > 1 else ''} {place} {where}, for {_users(alike, nodes)}"
        yield f"  {move}{f', {os.path.basename(first.line)}' if first.line else ''}"
        yield f"  why: {REASONS[first.name]}"
        yield (
            f"  costs: {', '.join(ways)}; {size_text(sum(c.nbytes for c in alike))} and "
            f"{time_text(sum(c.seconds for c in alike))} per step"
        )
        if problem is not None and number == 0 and i < MAX_ALTERNATIVES:
            yield f"  without it: {_alternative(plan, problem, alike)}"


def _users(kind: Sequence[Collective], nodes: Mapping[str, fx.Node]) -> str:
    """The users of collectives in equal layers: modules, ops within them, or the results."""
    texts = (_user(name, nodes.get(name), starred=len(kind) > 1) for name in kind[0].consumers)
    users = [*dict.fromkeys(texts)]
    return ", ".join(users[:MOST_USERS]) + (", ..." if len(users) > MOST_USERS else "")


def _user(name: str, node: fx.Node | None, *, starred: bool) -> str:
    if node is None:
        return star_node(name) if starred else name
    if node.op == "output":
        return "the results"
    module = str(node.meta.get("module", ""))
    shown = star_numbers(module) if starred else module
    return shown if module and node.name == module.replace(".", "_") else f"{op_name(node)} in {shown or 'the model'}"


def _alternative(plan: Plan, problem: PlanningProblem, alike: list[Collective]) -> str:
    if alike[0].is_inside:
        names, options = {c.value for c in alike}, problem.constraints.options
        whole = {n: whole_choice(n) for n in problem.graph.nodes if n.name in names}
        if any(choice not in options.get(n, [choice]) for n, choice in whole.items()):
            return "nothing else is legal"
        only = {n: [choice] for n, choice in whole.items()}
        constraints = dataclasses.replace(problem.constraints, options={**options, **only})
    else:
        steps = {c.value: ConversionStep(c.name, c.source, c.target) for c in alike}
        vetoed = frozenset((n, steps[n.name]) for n in problem.graph.nodes if n.name in steps)
        constraints = dataclasses.replace(problem.constraints, vetoed=problem.constraints.vetoed | vetoed)
    try:
        return _compared(plan, problem.solve(constraints))
    except PlanError:
        return "nothing else is legal"


def _compared(plan: Plan, other: Alternative) -> str:
    """The extra time of another plan, and the changes that it would make."""
    slower = other.costs.seconds - plan.costs.seconds
    parts = [f"a step takes {time_text(abs(slower))} {'more' if slower >= 0 else 'less'}"]
    _, held = plan.parameter_bytes()
    otherwise = plan.with_last(parameters={name: other.parameters[name] for name in plan.parameters})
    _, holds = otherwise.parameter_bytes()
    if abs(holds - held) > TOLD * held:
        parts.append(f"weights on a rank {size_text(abs(holds - held))} {'more' if holds > held else 'less'}")
    moved = [
        f"{star_differences(*names)} is {after}, not {before}"
        for names, (before, after) in held_otherwise([plan, otherwise])
    ]
    kinds, others = plan.costs.kinds, other.costs.kinds
    changes = {kind: others[kind] - kinds[kind] for kind in sorted(kinds | others)}
    moved += [f"{abs(by)} {kind} {'more' if by > 0 else 'less'}" for kind, by in changes.items() if by]
    moved = moved or ["it communicates elsewhere, as often"]
    return "; ".join([*parts, *moved[:MOST_CHANGES], *["..."] * (len(moved) > MOST_CHANGES)])


def expensive_pins(plan: Plan, problem: PlanningProblem) -> Iterator[str]:
    """The pins that make a step slower, and the time that each costs."""
    for key in dict.fromkeys(pin.key for pin in problem.constraints.pins.values()):
        pins = {node: pin for node, pin in problem.constraints.pins.items() if pin.key != key}
        try:
            other = problem.solve(dataclasses.replace(problem.constraints, pins=pins))
        except PlanError:
            continue
        if plan.costs.seconds - other.costs.seconds > TOLD * plan.costs.seconds:
            yield f"the plan's key {key!r} makes a step slower; without it: {_compared(plan, other)}"
