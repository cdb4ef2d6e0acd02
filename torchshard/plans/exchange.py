"""Plans in other libraries' formats (Hugging Face's tp_plan, DTensor's parallelize plan), and diffs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchshard.core.columns import counted
from torchshard.core.errors import InputError, PlanError
from torchshard.core.layouts import INPUT_DIMS, I, Shard
from torchshard.core.paths import star_differences, star_numbers
from torchshard.core.units import size_text, time_text
from torchshard.plans.data import PlanData
from torchshard.plans.table import held_otherwise, mesh_text

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

STYLES: dict[tuple[str, int], tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    ("Linear", 0): ("colwise", ("", "copy"), ("", "gather", "all_gather")),
    ("Linear", 1): ("rowwise", ("", "scatter"), ("reduce", "all_reduce")),
    ("Embedding", 0): ("embedding_rowwise", ("",), ("reduce", "all_reduce")),
    ("Embedding", 1): ("embedding_colwise", ("",), ("gather", "all_gather")),
}
"""(class of module, split dim of its weight) -> style, and collectives allowed before and after it."""
_VARIANTS = {("colwise", "gather"): "colwise_gather_output", ("colwise", "all_gather"): "colwise_gather_output",
             ("rowwise", "scatter"): "rowwise_split_input"}  # fmt: skip


def styles(plan: PlanData) -> dict[str, str]:
    """Returns Hugging Face's style of each module with split weights.

    Raises:
        PlanError: these styles can't express the plan; the error names everything that they can't.
    """
    found: dict[str, str] = {}
    unsaid: list[str] = []
    before, after = _around(plan)
    for name, layout in plan.parameters.items():
        path, _, leaf = name.rpartition(".")
        if layout == I or leaf == "bias":
            continue
        stored = plan.stored.get(name)
        kind = stored.module if stored is not None else ""
        style = STYLES.get((kind, layout.dim)) if isinstance(layout, Shard) and leaf == "weight" else None
        ends = ("".join(sorted(before.pop(path, set()))), "".join(sorted(after.pop(path, set()))))
        if stored is not None and stored.tied:
            unsaid.append(f"{name}, which is {stored.tied[0]} too")
        elif style is None or not isinstance(layout, Shard) or layout.parts is not None:
            whose = f" of a {kind}" if kind not in ("Linear", "Embedding") else ""
            unsaid.append(f"{name} as {plan.held_text(name)}{whose}")
        elif ends[0] not in style[1] or ends[1] not in style[2]:
            unsaid.append(f"{path}, {style[0]} with {ends[0] or 'nothing'} before and {ends[1] or 'nothing'} after it")
        else:
            found[path] = next((v for (s, c), v in _VARIANTS.items() if s == style[0] and c in ends), style[0])
    rest = (*before.items(), *after.items())
    unsaid += [f"a {' and '.join(sorted(names))} at {path or 'the model'}" for path, names in rest if names - {"copy"}]
    unsaid += [f"a {c.name} inside {c.value}" for c in plan.costs.collectives if c.is_inside and c.calls]
    if unsaid:
        shown = "; ".join(unsaid[:4]) + (f"; and {len(unsaid) - 4} more" if len(unsaid) > 4 else "")
        raise PlanError(
            f"{counted(len(unsaid), 'thing')} of the plan can't be said in these words",
            where=unsaid[0],
            why=shown,
            attempt="Plan.to_json(), or pin these modules to 'replicate' or to another style and plan again",
        )
    return found


def _around(plan: PlanData) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Returns module -> the collectives before it, and module -> the collectives after it."""
    before: dict[str, set[str]] = {}
    after: dict[str, set[str]] = {}
    for c in plan.costs.collectives:
        if not c.is_inside and c.calls:
            (after if c.is_after else before).setdefault(c.place, set()).add(c.name)
    return before, after


def to_hf(plan: PlanData) -> dict[str, str]:
    """Returns the plan as a `tp_plan` of transformers: styles by module glob, a key for equal
    layers."""
    found = styles(plan)
    globs: dict[str, set[str | None]] = {}
    for name in plan.stored or plan.parameters:
        path = name.rpartition(".")[0]
        globs.setdefault(star_numbers(path), set()).add(found.get(path))
    return {(star_numbers(p) if len(globs[star_numbers(p)]) == 1 else p): style for p, style in found.items()}


def to_dtensor(plan: PlanData) -> dict[str, ParallelStyle]:
    """Returns the plan as a `parallelize_plan` of `torch.distributed.tensor`'s `parallelize_module`."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    whole = Replicate()
    made = {
        "colwise": lambda: ColwiseParallel(),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=whole),
        "rowwise": lambda: RowwiseParallel(),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=whole),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=whole),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=whole),
    }
    return {path: made[style]() for path, style in styles(plan).items()}


# --- two plans -------------------------------------------------------------------------------------------------------


def diff(a: PlanData, b: PlanData) -> str:
    """Returns the differences between two plans, and their costs.

    It lists the parameters that `b` shards differently from `a` (equal layers on one line); then,
    over all mesh axes, collectives by kind, bytes, time and memory.

    Raises:
        InputError: one of them is not a plan.
    """
    for plan in (a, b):
        if not isinstance(plan, PlanData):
            raise InputError(
                f"a {type(plan).__name__} is no plan",
                where="diff",
                why="two plans are compared",
                attempt="ts.Plan.load(path) for the plan in a file; model.plan for that of a sharded model",
            )
    differences = held_otherwise([a, b])
    lines = []
    for names, (held, becomes) in differences:
        many = f" ×{len(names)}" if len(names) > 1 else ""
        lines.append(f"  {star_differences(*names)}{many}: {held} -> {becomes}")
    if a.fingerprint and b.fingerprint and a.fingerprint != b.fingerprint:
        lines.insert(0, "  they are plans of different models")
    if a.static != b.static:
        lines.append(f"  {'the second' if b.static else 'the first'} is for inputs of exactly one size")
    before, after = (sum((each.costs.kinds for each in plan.axes), Counter[str]()) for plan in (a, b))
    lines += [f"  {k}: {before[k]} -> {after[k]}" for k in sorted(before | after) if before[k] != after[k]]
    figures = zip(_figures(a), _figures(b), strict=True)
    lines += [f"  {what}: {x} -> {y}" for (what, x), (_, y) in figures if x != y]
    choices = sum(a.choices.get(name) != b.choices.get(name) for name in a.choices.keys() | b.choices.keys())
    if choices and not lines:
        lines.append(f"  {choices} ops run differently, for the same bytes and time")
    head = "parameters are alike"
    if differences:
        kinds = "1 kind of parameters is" if len(differences) == 1 else f"{len(differences)} kinds of parameters are"
        head = f"{kinds} sharded differently"
    return "\n".join([head, *lines])


def _figures(plan: PlanData) -> Iterator[tuple[str, str]]:
    """Yields a plan's purpose and its costs over all mesh axes: (name, text)."""
    yield "for", plan.title
    yield "machine", plan.costs.machine
    yield (
        "the ranks divide",
        f"the {INPUT_DIMS[plan.last.axis.dim]} ({plan.last.data})" if plan.last.data else "the weights",
    )
    yield "ranks", mesh_text(plan)
    yield "parameters on a rank", size_text(plan.parameter_bytes()[1])
    yield "sent by a rank per step", size_text(sum(each.costs.nbytes for each in plan.axes))
    yield "time per step", time_text(sum(plan.step_seconds.values()))
    yield "memory of a step", size_text(plan.step_memory["peak"]) if "peak" in plan.step_memory else "not estimated"
