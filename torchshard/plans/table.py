"""A plan as a table, a row per module: parameters' layouts, collectives before and after it, and costs.

module          parameters                      before  after   bytes     sent      time
layers.* ×12                                                                        1.2 us
  mlp.up        weight[64@tp,16], bias[64@tp]   copy            24.0 KiB  12.0 KiB  120 us
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx

from torchshard.core.columns import columns, counted, paragraph
from torchshard.core.layouts import INPUT_DIMS, I
from torchshard.core.mesh import ranks_text
from torchshard.core.paths import number_ranges, star_differences, star_numbers
from torchshard.core.units import size_text, time_text
from torchshard.plans.costs import Collective, Costs
from torchshard.plans.data import AxisPlan, PlanData

ABSENT = "–"
"""Shown for a parameter that a model does not have."""
HEADER = ("module", "parameters", "before", "after", "bytes", "sent", "time", "whole")
LEGEND = (
    "before, after: the collectives at the module; bytes: of its parameters on a rank; sent: by a rank in a step{over}"
    "; time: of forward and backward, with these collectives; of all modules that the line stands for"
)


@dataclass
class ModuleRow:
    """One module, or several equal ones."""

    paths: list[str]
    parameters: list[str] = field(default_factory=list)
    """'weight[64@tp,16]'"""
    before: list[Collective] = field(default_factory=list)
    after: list[Collective] = field(default_factory=list)
    nbytes: float = 0.0
    """Bytes of its parameters and buffers on a rank."""
    seconds: float = 0.0
    """Seconds of its computation."""
    whole: list[str] = field(default_factory=list)
    """Its expensive ops that run replicated or on gathered values."""

    @property
    def looks(self) -> tuple[object, ...]:
        """A key that is equal for modules that may share a row."""
        moved = [[(c.name, c.nbytes) for c in side] for side in (self.before, self.after)]
        costs = self.nbytes, f"{self.seconds:.2e}"
        return star_numbers(self.paths[0]), tuple(self.parameters), repr(moved), costs, tuple(self.whole)

    @property
    def name(self) -> str:
        """Its path, with a star where the paths of modules in the row differ."""
        return star_differences(*self.paths)

    def cells(self) -> tuple[str, ...]:
        """Returns its texts in the order of HEADER, without the module; costs are sums over its
        modules."""
        sent, count = self.before + self.after, len(self.paths)
        seconds = count * (self.seconds + sum(c.seconds for c in sent))
        sides = (", ".join(dict.fromkeys(c.name for c in side)) for side in (self.before, self.after))
        return (
            ", ".join(self.parameters),
            *sides,
            size_text(count * self.nbytes) if self.parameters else "",
            size_text(count * sum(c.nbytes for c in sent)) if sent else "",
            time_text(seconds) if seconds else "",
            ", ".join(self.whole),
        )


def module_rows(plan: PlanData) -> list[ModuleRow]:
    """Returns a row per module that has parameters, ops or collectives; equal ones share a row."""
    rows: dict[str, ModuleRow] = {}

    def row(path: str) -> ModuleRow:
        return rows.setdefault(path, ModuleRow([path]))

    for name in plan.stored or plan.parameters:
        path, _, leaf = name.rpartition(".")
        row(path).parameters.append(leaf + plan.held_text(name))
        row(path).nbytes += plan.stored[name].nbytes(plan.cuts(name)) if plan.stored else 0
    for path, seconds in plan.costs.compute.items():
        row(path).seconds += seconds
    for c in plan.costs.collectives:
        (row(c.place).after if c.is_after else row(c.place).before).append(c)
    for kind in plan.costs.whole:
        for path in kind.modules:
            row(path).whole.append(kind.op.removesuffix(".default"))
    merged: dict[tuple[object, ...], ModuleRow] = {}
    for found in rows.values():
        known = merged.setdefault(found.looks, found)
        if known is not found:
            known.paths += found.paths
    return list(merged.values())


def table(plan: PlanData) -> str:
    """Returns the whole table with a summary above it."""
    rows = [HEADER, *_tree(module_rows(plan))]
    shown = [i for i in range(len(HEADER)) if any(cells[i] for cells in rows[1:])]
    lines = [*map(paragraph, summary(plan)), "", *columns([[cells[i] for i in shown] for cells in rows])]
    over = f", over {plan.last.axis.label}" if plan.across else ""
    return "\n".join([*lines, paragraph(LEGEND.format(over=over))])


def _tree(rows: Sequence[ModuleRow]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of rows as a tree; a number belongs to the name before it: 'layers.*'."""
    tree = nx.DiGraph()
    tree.add_node(ROOT)
    for row in rows:
        steps = re.split(r"\.(?![*\d])", row.name) if row.name else []
        paths = [ROOT, *(tuple(steps[: i + 1]) for i in range(len(steps)))]
        nx.add_path(tree, paths)
        tree.nodes[paths[-1]].setdefault("rows", []).append(row)
    yield from _below(tree, ROOT, "", 0, 1)


def _below(tree: nx.DiGraph, at: tuple[str, ...], label: str, depth: int, count: int) -> Iterator[tuple[str, ...]]:
    """Yields the cells of a module and its submodules; `count` is how many the row above represents.

    Layers that differ may share a name: 'layers.*' for the even ones, and for the odd ones.
    """
    rows: list[ModuleRow] = tree.nodes[at].get("rows", [])
    inner = list(tree.successors(at))
    if not rows and len(inner) == 1:  # a.b.c in one line
        yield from _below(tree, inner[0], ".".join(filter(None, (label, inner[0][-1]))), depth, count)
        return
    for row in rows:
        many = f" ×{len(row.paths)}" if len(row.paths) != count else ""
        yield (f"{'  ' * depth}{label or '(the model)'}{many}", *row.cells())
    if not rows and at != ROOT:
        yield ("  " * depth + label, *[""] * (len(HEADER) - 1))
    if len(rows) == 1:
        count = len(rows[0].paths)
    depth += at != ROOT
    for each in inner:
        yield from _below(tree, each, each[-1], depth, count)


ROOT: tuple[str, ...] = ()
"""The model's path."""


def summary(plan: PlanData) -> list[str]:
    """Returns the plan's purpose and its costs, in a few lines."""
    costs = plan.costs
    split = sum(any(each.parameters.get(name, I) != I for each in plan.axes) for name in plan.parameters)
    whole, held = plan.parameter_bytes()
    lines = [
        f"plan for {mesh_text(plan)}: {split} of {len(plan.parameters)} parameters and buffers are split, "
        f"{size_text(held)} of {size_text(whole)} on each rank"
    ]
    if costs.collectives or not plan.across:
        lines.append(f"  {_sent_text(costs)}")
    lines += [*(f"  {batch_text(each)}" for each in plan.across), *_of_step(plan)]
    if costs.context is not None:
        lines.append(f"  the longest context that fits has {costs.context:,} tokens")
    if costs.batch is not None:
        lines.append(f"  the largest batch of this length that fits has {counted(costs.batch, 'sequence')}")
    if plan.recompute:
        lines.append(
            f"  backward computes {counted(len(plan.recompute), 'module')} again, in place of keeping their values: "
            f"{', '.join(number_ranges(plan.recompute))}"
        )
    if costs.gap > 1e-3 * costs.seconds:
        lines.append(f"  another plan may be better, by {time_text(costs.gap)} at most")
    return lines


def mesh_text(plan: PlanData) -> str:
    """Returns the ranks along each axis of a plan, outermost first: '2 × 4 ranks (dp × tp)'."""
    return ranks_text([each.axis for each in plan.axes])


def batch_text(plan: AxisPlan) -> str:
    """Returns a line on the collectives over an axis that splits the batch."""
    parts = f"{plan.world_size} parts of the {INPUT_DIMS[plan.axis.dim]} ({plan.data})"
    return f"over {plan.axis.label or 'another axis'}, {parts}: {_sent_text(plan.costs)}"


def calls_text(ahead: int, back: int) -> str:
    """Returns '1 collective forward and 2 backward'."""
    return f"{counted(ahead, 'collective')} forward and {back} backward"


def _sent_text(costs: Costs) -> str:
    sent = time_text(sum(c.seconds for c in costs.collectives))
    return f"{calls_text(*costs.calls)} send {size_text(costs.nbytes)} per rank and step, in {sent}"


def _of_step(plan: PlanData) -> list[str]:
    """Returns lines on the time of a step, how far it is to be trusted, and the memory."""
    trains, parts, error = plan.costs.optimizer is not None, plan.step_seconds, plan.machine.error
    total, step = sum(parts.values()), "step" if trains else "call"
    trust = "compared with no measured one" if error == math.inf else f"measured ones differ by {error:.0%} on average"
    lines = [f"  a {step} takes {time_text(total)} on {plan.costs.machine or 'an unnamed machine'} ({trust})"]
    shares = (f"{seconds / total:.0%} for {cause}" for cause, seconds in parts.items() if seconds > 0.005 * total)
    hidden = f"; {time_text(plan.hidden_seconds)} of collectives are hidden" if plan.costs.step is not None else ""
    lines.append(f"    {', '.join(shares) or 'nothing to compute'}{hidden}")
    if 1 in plan.costs.fewer:
        lines.append(f"  one rank alone: {time_text(plan.costs.fewer[1])}{_faster_with_fewer(plan.costs, total)}")
    if "peak" in plan.step_memory:
        updated = f", with {plan.optimizer.text}" if trains else ""
        lines.append(f"  it takes {size_text(plan.step_memory['peak'])} on the rank that holds the most{updated}")
    return lines


def _faster_with_fewer(costs: Costs, total: float) -> str:
    """Returns a warning if a step takes less time on fewer ranks."""
    ranks = min(costs.fewer, key=lambda n: costs.fewer[n])
    if costs.fewer[ranks] >= total:
        return ""
    many = f" ({ranks} ranks: {time_text(costs.fewer[ranks])})" if ranks > 1 else ""
    return f"; fewer ranks are faster where the model fits them{many}"


def held_otherwise(plans: Sequence[PlanData]) -> list[tuple[list[str], tuple[str, ...]]]:
    """Returns the parameters that plans shard differently: (equal layers' names, sharding per plan)."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in dict.fromkeys(name for plan in plans for name in plan.parameters):
        held = tuple(plan.held_text(name) if name in plan.parameters else ABSENT for plan in plans)
        if len({*held}) > 1:
            found.setdefault((star_numbers(name), held), []).append(name)
    return [(names, held) for (_, held), names in found.items()]
