"""The legal conversions between layouts as a table, and the cheapest sequence of them for a value.

The backward of a conversion is again a conversion: it takes the gradient from the dual of the
target layout to the dual of the source layout. So the table lists forwards only, and `dual` names
the row of the backward. Operators, the simulation, the planner and the verifier all derive from
this table, so they can't disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

from torchshard.core.layouts import I, Layout, P, R, Shard, has_blocks, largest_share, parts_of

Kernel = Literal["none", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "pad"]


@dataclass(frozen=True)
class Conversion:
    """One row of the table."""

    name: str
    source: type[Layout]
    target: type[Layout]
    kernel: Kernel
    """The operation that a rank runs."""
    dual: str
    """The name of the conversion that is its backward."""


_I, _R, _P = type(I), type(R), type(P)

TABLE = {
    row.name: row
    for row in (
        Conversion("copy", _I, _R, "none", "reduce"),
        Conversion("reduce", _P, _I, "all_reduce", "copy"),
        Conversion("gather", Shard, _I, "all_gather", "scatter"),
        Conversion("scatter", _I, Shard, "slice", "gather"),
        Conversion("reduce_scatter", _P, Shard, "reduce_scatter", "all_gather"),
        Conversion("all_gather", Shard, _R, "all_gather", "reduce_scatter"),
        Conversion("all_to_all", Shard, Shard, "all_to_all", "all_to_all"),
        Conversion("narrow", _R, Shard, "slice", "pad"),
        Conversion("pad", Shard, _P, "pad", "narrow"),
        Conversion("all_reduce", _P, _R, "all_reduce", "all_reduce"),
    )
}
"""Name -> conversion."""

_BY_LAYOUTS = {(row.source, row.target): row for row in TABLE.values()}


@dataclass(frozen=True)
class ConversionStep:
    """One conversion of one value, from one layout to another."""

    name: str
    source: Layout
    target: Layout


Steps = tuple[ConversionStep, ...]
"""Conversions of one value; each starts from the value's original layout or from the target of an earlier step."""
BESIDE: Mapping[str, tuple[Kernel, Kernel]] = {
    "all_reduce_max": ("all_reduce", "none"),
    "dispatch": ("all_to_all", "all_to_all"),
    "combine": ("all_to_all", "all_to_all"),
}
"""Collectives outside the table, which convert no layout -> kernels that cost the same."""
ROUNDS: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Kernels that communicate -> how often the messages of a ring algorithm go around the ring."""
Price = Callable[[ConversionStep], float]
"""Returns the price of a conversion, forward and backward."""


def plan_conversions(
    source: Layout, required: Iterable[Layout], *, needs_grad: bool, price: Price | None = None
) -> Steps | None:
    """Returns the cheapest conversions that give a value all required layouts; None if impossible.

    A conversion that several layouts need appears once: a partial sum that is required as I and as
    R is reduced once and then copied. Among equally cheap plans, the one with the fewest
    conversions wins.

    Args:
        price: by default, the bytes that ring algorithms send on four ranks, forward and (if the
            value needs a gradient) backward.
    """
    source, required = _without_gradient_layouts(source, required, needs_grad)
    if _is_forbidden(source, required, needs_grad):
        return None
    missing = required - {source}
    if price is None:
        return _fewest_bytes(source, missing, needs_grad)
    return _cheapest(source, missing, needs_grad, price)


def plan_conversion(source: Layout, target: Layout, *, needs_grad: bool = True) -> Steps | None:
    """Returns the cheapest conversions from one layout to another; None if impossible."""
    return plan_conversions(source, [target], needs_grad=needs_grad)


def are_legal(steps: Steps, source: Layout, required: Iterable[Layout], *, needs_grad: bool) -> bool:
    """Returns whether all steps are rows of the table, start from available layouts, and reach all required layouts."""
    source, required = _without_gradient_layouts(source, required, needs_grad)
    available = {source}
    for step in steps:
        row = _BY_LAYOUTS.get((type(step.source), type(step.target)))
        if row is None or row.name != step.name or step.source not in available:
            return False
        if not _converts(row, step.source, step.target, needs_grad=needs_grad):
            return False
        available.add(step.target)
    return required <= available and not _is_forbidden(source, required, needs_grad)


def _without_gradient_layouts(
    source: Layout, required: Iterable[Layout], needs_grad: bool
) -> tuple[Layout, frozenset[Layout]]:
    """Replaces R with I if the value needs no gradient, because the two differ in the gradient only."""
    if needs_grad:
        return source, frozenset(required)
    return (I if source == R else source), frozenset(I if layout == R else layout for layout in required)


def _is_forbidden(source: Layout, required: frozenset[Layout], needs_grad: bool) -> bool:
    """R -> I is illegal even via a Shard that another consumer needs: legality must not depend on other consumers."""
    return needs_grad and source == R and I in required


@lru_cache(maxsize=1 << 14)
def _fewest_bytes(source: Layout, required: frozenset[Layout], needs_grad: bool) -> Steps | None:
    return _cheapest(source, required, needs_grad, lambda step: _rounds(step, needs_grad))


def _cheapest(source: Layout, required: frozenset[Layout], needs_grad: bool, price: Price) -> Steps | None:
    """Dynamic programming over the sets of layouts that the value is available in.

    I and R are candidates even if not required: two steps through one of them may be cheaper than
    one step, or the only way. Sorting by text makes the result independent of set order, which
    differs between the ranks' processes.
    """
    targets: list[Layout] = sorted({*required, I, R}, key=str)
    steps = {start: _steps(start, targets, needs_grad, price) for start in sorted({source, *targets}, key=str)}
    best: dict[frozenset[Layout], tuple[float, Steps]] = {frozenset([source]): (0.0, ())}
    for size in range(1, len(targets) + 1):
        for available, (cost, path) in [(key, value) for key, value in best.items() if len(key) == size]:
            outgoing = [priced for start, priced in steps.items() if start in available]
            for step, step_price in chain.from_iterable(outgoing):
                if step.target in available:
                    continue
                reached, total = available | {step.target}, cost + step_price
                if reached not in best or total < best[reached][0]:
                    best[reached] = (total, (*path, step))
    complete = [(cost, len(path), path) for available, (cost, path) in best.items() if required <= available]
    return min(complete, key=lambda plan: plan[:2])[2] if complete else None


def _steps(
    source: Layout, targets: Iterable[Layout], needs_grad: bool, price: Price
) -> list[tuple[ConversionStep, float]]:
    """Returns the single-row conversions from one layout, with their prices."""
    steps = []
    for target in targets:
        row = _BY_LAYOUTS.get((type(source), type(target)))
        if row is not None and target != source and _converts(row, source, target, needs_grad=needs_grad):
            step = ConversionStep(row.name, source, target)
            steps.append((step, price(step)))
    return steps


def _converts(row: Conversion, source: Layout, target: Layout, *, needs_grad: bool) -> bool:
    """Returns whether a forward conversion between these two layouts may use this row of the table."""
    if row.name == "pad":  # only the backward of narrow, never a forward conversion
        return False
    if any(isinstance(layout, Shard) and layout.repeated for layout in (source, target)):
        # a rank's slice does not determine how often its parts repeat, so such a Shard can't be
        # gathered; a scatter to it has no backward, which would be a gather
        return row.name == "scatter" and not needs_grad and not has_blocks(target)
    # all_to_all exchanges two dims; between two Shards of one dim, the value is gathered and sliced
    # again
    return not (isinstance(source, Shard) and isinstance(target, Shard)) or source.dim != target.dim


def _rounds(step: ConversionStep, needs_grad: bool) -> int:
    """Returns the bytes that a step sends on four ranks, as multiples of one all_to_all."""
    both = kernels(step.name, needs_grad=needs_grad)
    return sum(1 if kernel == "all_to_all" else 4 * ROUNDS.get(kernel, 0) for kernel in both)


def kernels(name: str, *, needs_grad: bool) -> tuple[Kernel, Kernel]:
    """Returns the kernels that a collective runs forward and backward."""
    forward, backward = BESIDE[name] if name in BESIDE else (TABLE[name].kernel, TABLE[TABLE[name].dual].kernel)
    return forward, backward if needs_grad else "none"


def sent_bytes(kernel: str, nbytes: float, source: Layout, target: Layout, shape: Sequence[int], world: int) -> float:
    """Returns the bytes sent by the rank with the largest slice, with a ring algorithm.

    Slices of different sizes are padded to the largest, except by all_to_all.

    Args:
        nbytes: the size of the full value in bytes.
        shape: the global shape of the value.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005).
    """
    if kernel == "all_to_all":
        return nbytes * largest_share(source, shape, world) * (1 - largest_share(target, shape, world))
    if kernel == "all_reduce":
        return 2 * nbytes * (world - 1) / world
    shard = source if isinstance(source, Shard) else target
    return nbytes * ROUNDS.get(kernel, 0) * (world - 1) * largest_share(shard, shape, world)


def flat_parts(size: int, shard: Shard) -> list[int]:
    """Returns a Shard's parts as collectives take them: [count, unit, count, unit, ...].

    A leading 0 means that the parts repeat. Equal slices of a dynamic size give an empty list.
    """
    if shard.parts is None and not isinstance(size, int):
        return []
    if shard.repeated and shard.parts is not None:
        return [0, *(n for part in shard.listed for n in part)]
    return [n for part in parts_of(size, shard) for n in part]


def shard_from(dim: int, flat: Sequence[int]) -> Shard:
    """Returns the Shard for a list from `flat_parts`."""
    repeated = len(flat) % 2 == 1  # pairs, and the leading 0
    return Shard(dim, tuple(zip(flat[repeated::2], flat[repeated + 1 :: 2], strict=True)), repeated)


def source_and_target(name: str, args: Sequence[Any]) -> tuple[Layout, Layout]:
    """Returns a collective call's source and target layouts, from its arguments after the tensor.

    Args:
        args: arguments of an fx node: a dim and its flat parts for each Shard of the row, then any
            others.
    """
    row = TABLE[name]
    if name == "all_to_all":
        return shard_from(args[0], args[1]), shard_from(args[2], args[3])
    layouts: dict[type[Layout], Layout] = {_I: I, _R: R, _P: P}
    if Shard in (row.source, row.target):
        layouts[Shard] = shard_from(args[0], args[1])
    return layouts[row.source], layouts[row.target]


def step_args(source: Layout, target: Layout, shape: Sequence[int]) -> list[int | list[int]]:
    """Returns the arguments of a collective call after the tensor and before the group."""
    shards = [layout for layout in (source, target) if isinstance(layout, Shard)]
    return [argument for shard in shards for argument in (shard.dim, flat_parts(shape[shard.dim], shard))]
