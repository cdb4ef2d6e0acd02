"""Why each collective of a plan is there, and what the best plan without it would cost.

The problem that the plan answers is asked again with the collective forbidden, in all layers that are alike; or with a
module left to the search that the user had pinned.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

from torchshard.core.conversions import ConversionStep
from torchshard.core.errors import PlanError
from torchshard.ir.graph import whole_choice
from torchshard.planner.problem import Alternative, PlanningProblem
from torchshard.plans.data import Collective
from torchshard.plans.machine import size_text
from torchshard.plans.plan import Plan
from torchshard.plans.table import changed, layered, starred

MAX_ALTERNATIVES = 12
"""Kinds of collectives for which an alternative is looked for; each takes as long as planning."""
TOLD = 0.01
"""What changes a step's time, or a rank's bytes, by less than this part of it is not told of."""

REASONS = {
    "copy": "each rank uses it for its own part, so its gradient is the sum of theirs",
    "reduce": "each rank has an addend of it, and the sum is wanted",
    "gather": "each rank has a slice of it, and the whole is wanted",
    "scatter": "each rank needs a slice of it alone, and its gradient is gathered",
    "all_gather": "each rank has a slice and needs the whole for its own part",
    "reduce_scatter": "each rank has an addend of it, and needs a slice of the sum",
    "all_to_all": "it is split along one dim and wanted split along another",
    "narrow": "each rank needs a slice of it alone",
    "all_reduce": "each rank has an addend of it and needs the sum for its own part",
    "all_reduce_max": "the largest of each row lies on some rank",
}


def kinds_of(plan: Plan) -> list[list[Collective]]:
    """The collectives of a plan that send something, those of layers that are alike together; dearest first."""
    groups: dict[object, list[Collective]] = {}
    for c in plan.costs.collectives:
        if c.calls:
            names = tuple(_starred(name) for name in (c.value, *c.consumers))
            key = (layered(c.place), names, c.name, c.source, c.target, c.type)
            groups.setdefault(key, []).append(c)
    return sorted(groups.values(), key=lambda alike: -sum(c.seconds for c in alike))


def _starred(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def told(plan: Plan, problem: PlanningProblem | None) -> Iterator[str]:
    """Each kind of collective in a few lines: what, where, why, what it costs, and the next best."""
    kinds = kinds_of(plan)
    for i, alike in enumerate(kinds):
        first, count = alike[0], len(alike)
        where = starred(*(c.place for c in alike)) or "the model"
        takers = ", ".join(first.consumers[:3]) + (", ..." if len(first.consumers) > 3 else "")
        ways = [f"{sent.kernel.replace('_', '-')} {way}" for way, sent in
                (("forward", first.forward), ("backward", first.backward)) if sent.nbytes]  # fmt: skip
        yield (
            f"{first.name}{f' ×{count}' if count > 1 else ''} {'after' if first.is_after else 'before'} {where}: "
            f"{first.source} -> {first.target} of {first.type}, for {takers}    {os.path.basename(first.line)}"
        )
        yield f"  why: {REASONS.get(first.name, 'see the table of conversions')}"
        yield (
            f"  costs: {', '.join(ways)}; {size_text(sum(c.nbytes for c in alike))} and "
            f"{1e3 * sum(c.seconds for c in alike):.3g} ms per step"
        )
        if problem is not None and i < MAX_ALTERNATIVES:
            yield f"  next best: {_alternative(plan, problem, alike)}"


def _alternative(plan: Plan, problem: PlanningProblem, alike: list[Collective]) -> str:
    if alike[0].is_inside:
        names = {c.value for c in alike}
        whole = {n: [whole_choice(n)] for n in problem.graph.nodes if n.name in names}
        constraints = dataclasses.replace(problem.constraints, options={**problem.constraints.options, **whole})
    else:
        links = {c.value: ConversionStep(c.name, c.source, c.target) for c in alike}
        vetoed = frozenset((n, links[n.name]) for n in problem.graph.nodes if n.name in links)
        constraints = dataclasses.replace(problem.constraints, vetoed=problem.constraints.vetoed | vetoed)
    try:
        return _compared(plan, problem.solve(constraints))
    except PlanError:
        return "nothing else is legal"


def _compared(plan: Plan, other: Alternative) -> str:
    """What another plan would change, and by how much it is slower."""
    parts = [f"{starred(*names)} {a} -> {b}" for names, a, b in changed(plan, other.parameters)]
    kinds, others = plan.costs.kinds, other.costs.kinds
    parts += [f"{others[k] - kinds[k]:+d} {k}" for k in sorted(kinds | others) if others[k] != kinds[k]]
    _, held = plan.parameter_bytes()
    _, holds = dataclasses.replace(plan, parameters=other.parameters).parameter_bytes()
    if abs(holds - held) > TOLD * held:
        parts.insert(0, f"{size_text(abs(holds - held))} {'more' if holds > held else 'fewer'} on a rank")
    shown = ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
    return f"{1e3 * (other.costs.seconds - plan.costs.seconds):+.3g} ms ({shown or 'elsewhere, as often'})"


def expensive_pins(plan: Plan, problem: PlanningProblem) -> Iterator[str]:
    """The pins without which the plan would be faster by more than a little, and by how much."""
    for key in dict.fromkeys(pin.key for pin in problem.constraints.pins.values()):
        pins = {node: pin for node, pin in problem.constraints.pins.items() if pin.key != key}
        try:
            other = problem.solve(dataclasses.replace(problem.constraints, pins=pins))
        except PlanError:
            continue
        if plan.costs.seconds - other.costs.seconds > TOLD * plan.costs.seconds:
            yield f"the plan's key {key!r} makes a step slower; without it: {_compared(plan, other)}"
