"""Legal conversions between layouts, as data: from, to, what moves forward, and the conversion that is its gradient.

Each conversion's backward is again a conversion, of the gradient: from the dual of its target to the dual of its
source. So the table needs only forwards, and `dual` says which row is the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torchshard.core.layouts import I, Layout, P, R, Shard, largest_share, parts_of


@dataclass(frozen=True)
class Conversion:
    """One row of the table."""

    name: str
    source: type[Layout]
    target: type[Layout]
    kernel: str
    """What a rank does: 'none', 'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'slice', 'pad'."""
    dual: str
    """The conversion that its backward is."""


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
"""name -> conversion."""

_BY_ENDS = {(row.source, row.target): row for row in TABLE.values()}


@dataclass(frozen=True)
class ConversionStep:
    """One conversion of a value."""

    name: str
    source: Layout
    target: Layout


Steps = tuple[ConversionStep, ...]
"""Conversions of one value, each from the layout that it has at first or from one that an earlier step gave."""
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How many times a ring sends the whole value, less each rank's own part."""


Price = Callable[["ConversionStep"], float]
"""What a conversion costs, forward and backward."""


def plan_conversions(
    source: Layout, required: Iterable[Layout], world: int, *, needs_grad: bool, price: Price | None = None
) -> Steps | None:
    """The cheapest conversions that give a value all required layouts, or None where it can't have them.

    A conversion that several layouts need is there once: of a partial sum required as I and as R, the sum is taken once
    and then copied. Of equally cheap ones the fewest.

    Args:
        price: without it, the bytes that rings send, forward and (where a gradient flows) backward.
    """
    source, required = _needed(source, required, needs_grad)
    if _is_forbidden(source, required, needs_grad):
        return None
    missing = required - {source}
    if price is None:
        return _sending_least(source, missing, world, needs_grad)
    return _cheapest(source, missing, needs_grad, price)


def plan_conversion(source: Layout, target: Layout, *, needs_grad: bool = True) -> Steps | None:
    """The conversions from one layout to one other, or None where there are none."""
    return plan_conversions(source, [target], 2, needs_grad=needs_grad)


def are_legal(steps: Steps, source: Layout, required: Iterable[Layout], *, needs_grad: bool) -> bool:
    """Whether steps are rows of the table, each begins from a layout that the value has, and all required ones come."""
    source, required = _needed(source, required, needs_grad)
    available = {source}
    for step in steps:
        row = _BY_ENDS.get((type(step.source), type(step.target)))
        known = row is not None and row.name == step.name and step.source in available
        if not known or not _converts(TABLE[step.name], step.source, step.target, needs_grad=needs_grad):
            return False
        available.add(step.target)
    return required <= available and not _is_forbidden(source, required, needs_grad)


def _needed(source: Layout, required: Iterable[Layout], needs_grad: bool) -> tuple[Layout, frozenset[Layout]]:
    """The same with I for R where no gradient flows: forward they are one."""
    if needs_grad:
        return source, frozenset(required)
    return (I if source == R else source), frozenset(I if layout == R else layout for layout in required)


def _is_forbidden(source: Layout, required: frozenset[Layout], needs_grad: bool) -> bool:
    """R -> I is illegal even via a Shard that another consumer needs, else legality would depend on other consumers."""
    return needs_grad and source == R and I in required


@lru_cache(maxsize=1 << 14)
def _sending_least(source: Layout, required: frozenset[Layout], world: int, needs_grad: bool) -> Steps | None:
    return _cheapest(source, required, needs_grad, lambda step: _rounds(step, world, needs_grad))


def _cheapest(source: Layout, required: frozenset[Layout], needs_grad: bool, price: Price) -> Steps | None:
    """By dynamic programming over the sets of layouts that the value has already; I and R may lie on the way."""
    order: list[Layout] = sorted({*required, I, R}, key=str)
    steps = {start: _steps(start, order, needs_grad, price) for start in sorted({source, *order}, key=str)}
    best: dict[frozenset[Layout], tuple[float, Steps]] = {frozenset([source]): (0.0, ())}
    for size in range(1, len(order) + 1):
        for available, (cost, taken) in [(h, c) for h, c in best.items() if len(h) == size]:
            for step, seconds in (step for start, found in steps.items() if start in available for step in found):
                if step.target in available:
                    continue
                key, total = available | {step.target}, cost + seconds
                if key not in best or total < best[key][0]:
                    best[key] = (total, (*taken, step))
    found = [(cost, len(taken), taken) for available, (cost, taken) in best.items() if required <= available]
    return min(found, key=lambda f: f[:2])[2] if found else None


def _steps(
    source: Layout, targets: Iterable[Layout], needs_grad: bool, price: Price
) -> list[tuple[ConversionStep, float]]:
    """The conversions of one layout that are one row of the table, with their prices."""
    found = []
    for target in targets:
        row = _BY_ENDS.get((type(source), type(target)))
        if row is not None and target != source and _converts(row, source, target, needs_grad=needs_grad):
            step = ConversionStep(row.name, source, target)
            found.append((step, price(step)))
    return found


def _converts(row: Conversion, source: Layout, target: Layout, *, needs_grad: bool) -> bool:
    """Whether the row's kernel does it; between two splits of one dim the whole is gathered in between.

    What is split in repeated parts stays so, for a rank's slice does not say how often they are repeated.
    """
    if row.name == "pad":
        return False
    if any(isinstance(x, Shard) and x.repeated for x in (source, target)):
        return row.name == "scatter" and not needs_grad
    return not (isinstance(source, Shard) and isinstance(target, Shard)) or source.dim != target.dim


def _rounds(step: ConversionStep, world: int, needs_grad: bool) -> int:
    both = kernels(step.name, needs_grad=needs_grad)
    return sum(1 if kernel == "all_to_all" else _ROUNDS.get(kernel, 0) * world for kernel in both)


def kernels(name: str, *, needs_grad: bool) -> tuple[str, str]:
    """What the ranks do for a collective, forward and backward; `all_reduce_max` has no gradient."""
    if name not in TABLE:
        return "all_reduce", "none"
    row = TABLE[name]
    return row.kernel, TABLE[row.dual].kernel if needs_grad else "none"


def sent_bytes(kernel: str, nbytes: float, source: Layout, target: Layout, shape: Sequence[int], world: int) -> float:
    """Bytes that the rank with the largest slice sends for a value of `nbytes` (whole) and `shape`, by a ring.

    Where slices differ they are sent padded to the largest, but for all_to_all.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
    """
    if kernel == "all_to_all":
        return nbytes * largest_share(source, shape, world) * (1 - largest_share(target, shape, world))
    if kernel == "all_reduce":
        return 2 * nbytes * (world - 1) / world
    shard = source if isinstance(source, Shard) else target
    return nbytes * _ROUNDS.get(kernel, 0) * (world - 1) * largest_share(shard, shape, world)


def flat_parts(size: int, shard: Shard) -> list[int]:
    """A Shard's parts as the collectives take them: [count, unit, count, unit, ...]; after a 0 those that repeat."""
    if shard.repeated and shard.parts is not None:
        return [0, *(n for part in shard.parts for n in part)]
    return [n for part in parts_of(size, shard) for n in part]


def shard_from(dim: int, flat: Sequence[int]) -> Shard:
    """The Shard that `flat_parts` spelled."""
    repeated = len(flat) % 2 == 1
    return Shard(dim, tuple(zip(flat[repeated::2], flat[repeated + 1 :: 2], strict=True)), repeated)


def source_and_target(name: str, args: Sequence[Any]) -> tuple[Layout, Layout]:
    """The layouts that a collective call converts between, from its arguments after the tensor."""
    row = TABLE[name]
    if name == "all_to_all":
        return shard_from(args[0], args[1]), shard_from(args[2], args[3])
    fixed: dict[Any, Layout] = {_I: I, _R: R, _P: P}
    shard: Any = shard_from(args[0], args[1]) if Shard in (row.source, row.target) else None
    return fixed.get(row.source, shard), fixed.get(row.target, shard)


def step_args(name: str, source: Layout, target: Layout, shape: Sequence[int]) -> list[Any]:
    """The arguments of a collective call after the tensor and before the group."""
    shards = [x for x in (source, target) if isinstance(x, Shard)]
    return [a for s in shards for a in (s.dim, flat_parts(shape[s.dim], s))]
