"""A plan as a table, a row per module: its parameters' layouts, the collectives before and after it, what it costs.

module                    parameters                layout           before  after   per rank   sent      ms
model.layers.*.mlp.up     12 × weight f32[64,16]    S(0)             copy            2.0 KiB    1.0 KiB   0.01
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchshard.core.layouts import I, Layout
from torchshard.core.mesh import ranks_text
from torchshard.core.paths import star_differences, star_last_number, star_numbers
from torchshard.core.words import Cut
from torchshard.plans.data import Collective, Costs, PlanData
from torchshard.plans.machine import ms_text, size_text

HEADER = ("module", "parameters", "before", "after", "bytes per rank", "sent", "ms", "whole")


@dataclass
class ModuleRow:
    """One module, or several that are alike."""

    paths: list[str]
    parameters: list[str] = field(default_factory=list)
    """'weight S(0)'"""
    before: list[Collective] = field(default_factory=list)
    after: list[Collective] = field(default_factory=list)
    nbytes: float = 0.0
    """Bytes of its parameters and buffers on a rank."""
    seconds: float = 0.0
    """Of its computation."""
    whole: list[str] = field(default_factory=list)
    """Its expensive ops that run whole, or have values gathered."""

    @property
    def looks(self) -> tuple[object, ...]:
        """Equal for modules that may share a row."""
        moved = [[(c.name, c.nbytes) for c in side] for side in (self.before, self.after)]
        costs = self.nbytes, f"{self.seconds:.2e}"
        return star_numbers(self.paths[0]), tuple(self.parameters), repr(moved), costs, tuple(self.whole)

    def cells(self) -> tuple[str, ...]:
        """Its texts, in the order of HEADER; the costs are of all modules that the row represents."""
        sent, count = self.before + self.after, len(self.paths)
        seconds = count * (self.seconds + sum(c.seconds for c in sent))
        sides = (", ".join(dict.fromkeys(c.name for c in side)) for side in (self.before, self.after))
        name = star_differences(*self.paths)
        return (
            f"{name} ×{count}" if count > 1 else name or "(the model)",
            ", ".join(self.parameters),
            *sides,
            size_text(count * self.nbytes) if self.parameters else "",
            size_text(count * sum(c.nbytes for c in sent)) if sent else "",
            ms_text(seconds) if seconds else "",
            ", ".join(self.whole),
        )


def module_rows(plan: PlanData) -> list[ModuleRow]:
    """A row per module that has parameters, computes or communicates, in the model's order; equal ones share a row."""
    rows: dict[str, ModuleRow] = {}

    def row(path: str) -> ModuleRow:
        return rows.setdefault(path, ModuleRow([path]))

    for name in plan.stored or plan.parameters:
        path, _, leaf = name.rpartition(".")
        layout = plan.parameters.get(name, I)
        row(path).parameters.append(f"{leaf} {layout}")
        row(path).nbytes += plan.stored[name].nbytes((Cut(layout, 0, plan.world_size),)) if plan.stored else 0
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
    """The whole table with a summary above it."""
    rows = [HEADER, *(row.cells() for row in module_rows(plan))]
    shown = [i for i in range(len(HEADER)) if any(cells[i] for cells in rows[1:])]
    return "\n".join([*summary(plan), "", *columns([[cells[i] for i in shown] for cells in rows])])


def summary(plan: PlanData) -> list[str]:
    """What the plan is for and what it costs, in a few lines."""
    costs = plan.costs
    split = sum(any(each.parameters.get(name, I) != I for each in plan.over_all) for name in plan.parameters)
    whole, held = plan.parameter_bytes()
    lines = [
        f"plan for {mesh_text(plan)}: {split} of {len(plan.parameters)} parameters and buffers are split, "
        f"{size_text(held)} of {size_text(whole)} on each rank"
    ]
    ahead, back = costs.calls
    lines.append(
        f"  {ahead} collectives forward and {back} backward send {size_text(costs.nbytes)} per rank and step; "
        f"{ms_text(costs.seconds)} ms on {costs.machine or 'an unnamed machine'}, "
        f"{ms_text(sum(c.seconds for c in costs.collectives))} of them in collectives"
    )
    if costs.step is not None:
        lines += _of_batch(plan)
    if 1 in costs.fewer:
        lines.append(f"  one rank alone: {ms_text(costs.fewer[1])} ms{_faster_with_fewer(costs)}")
    if "peak" in costs.memory and costs.step is None:
        step = "training step" if costs.memory.get("gradients") else "call"
        lines.append(f"  a {step} takes {size_text(costs.memory['peak'])} on the rank that holds the most")
    if costs.context is not None:
        lines.append(f"  the longest context that fits has {costs.context:,} tokens")
    if plan.recompute:
        stars = ", ".join(dict.fromkeys(map(star_last_number, plan.recompute)))
        lines.append(
            f"  backward computes {len(plan.recompute)} modules again, in place of keeping their values: {stars}"
        )
    if costs.gap > 1e-3 * costs.seconds:
        lines.append(f"  another plan within the same budget may be better, by {1e3 * costs.gap:.3g} ms at most")
    return lines


def mesh_text(plan: PlanData) -> str:
    """How many ranks the plan and those of further axes are for, outermost first: '2 × 4 ranks (dp × tp)'."""
    return ranks_text([each.axis for each in (*plan.over_batch, plan)])


def batch_text(plan: PlanData) -> str:
    """What the ranks send over an axis that divides the batch."""
    ahead, back = plan.costs.calls
    return (
        f"over {plan.label or 'another axis'}, {plan.world_size} parts of the batch ({plan.data}): {ahead} collectives "
        f"forward and {back} backward send {size_text(plan.costs.nbytes)} per rank and step; "
        f"{ms_text(sum(c.seconds for c in plan.costs.collectives))} ms"
    )


def _of_batch(plan: PlanData) -> list[str]:
    """What dividing the batch over other axes costs beside the rest."""
    lines = [f"  {batch_text(each)}" for each in plan.over_batch]
    parts, hidden = plan.step_seconds, plan.hidden_seconds
    total = sum(parts.values())
    most = max(parts, key=lambda name: parts[name])
    lines.append(
        f"  a step takes {ms_text(total)} ms, {parts[most] / total if total else 0:.0%} of them {most}; it hides "
        f"{ms_text(hidden)} ms of what is sent over the batch's"
    )
    if "peak" in plan.step_memory:
        lines.append(f"  it takes {size_text(plan.step_memory['peak'])} on the rank that holds the most")
    return lines


def _faster_with_fewer(costs: Costs) -> str:
    """A warning if a step takes less time on fewer ranks."""
    ranks = min(costs.fewer, key=lambda n: costs.fewer[n])
    if costs.fewer[ranks] >= costs.seconds:
        return ""
    many = f" ({ranks} ranks: {ms_text(costs.fewer[ranks])} ms)" if ranks > 1 else ""
    return f"; fewer ranks are faster where the model fits them{many}"


def columns(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Rows of cells, aligned."""
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    return ("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows)


def changed(a: PlanData, parameters: Mapping[str, Layout]) -> list[tuple[list[str], Layout, Layout]]:
    """The parameters with another layout than in a plan, equal layers together: (names, layout there, layout here)."""
    found: dict[tuple[str, Layout, Layout], list[str]] = {}
    for name in dict.fromkeys([*a.parameters, *parameters]):
        ends = a.parameters.get(name, I), parameters.get(name, I)
        if ends[0] != ends[1]:
            found.setdefault((star_numbers(name), *ends), []).append(name)
    return [(names, there, here) for (_, there, here), names in found.items()]
