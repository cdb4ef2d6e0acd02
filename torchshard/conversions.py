"""Legal conversions between layouts, as data: from, to, what moves forward, and the conversion that is its gradient.

Each conversion's backward is again a conversion, of the gradient: from the dual of its target to the dual of its
source. So the table needs only forwards, and `dual` says which row is the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchshard.layouts import I, Layout, P, R, Shard, is_whole, parts_of


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

Step = tuple[str, Layout]
"""(name of the conversion, layout after it)."""


def route(source: Layout, target: Layout, *, needs_grad: bool = True) -> list[Step] | None:
    """The conversions that lead from one layout to another, or None where none do.

    For a value that needs no gradient I and R are the same thing.
    """
    if source == target or (not needs_grad and is_whole(source) and is_whole(target)):
        return []
    if not needs_grad and source == R:
        source = I
    if isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim:
        return [("gather", I), ("scatter", target)]
    if source == P and target == R:
        both: list[Step] = [("reduce", I), ("copy", R)]  # the sum may be wanted as I too; alone, the two are fused
        return both if needs_grad else both[:1]
    row = _BY_ENDS.get((type(source), type(target)))
    return None if row is None or row.name == "pad" else [(row.name, target)]


def wire_bytes(kernel: str, nbytes: float, world: int) -> float:
    """Bytes that each rank sends for a value of `nbytes` (whole), by a ring.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
    """
    share = (world - 1) / world
    return nbytes * {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share / world,
    }.get(kernel, 0.0)


def step_bytes(name: str, nbytes: float, world: int, *, needs_grad: bool) -> float:
    """Bytes per rank of one conversion, forward and (where a gradient flows) backward."""
    row = TABLE[name]
    forward = wire_bytes(row.kernel, nbytes, world)
    return forward + (wire_bytes(TABLE[row.dual].kernel, nbytes, world) if needs_grad else 0.0)


def flat_parts(size: int, shard: Shard) -> list[int]:
    """A Shard's parts as the collectives take them: [count, unit, count, unit, ...]."""
    return [n for part in parts_of(size, shard) for n in part]


def shard_from(dim: int, flat: Sequence[int]) -> Shard:
    """The Shard that `flat_parts` spelled."""
    return Shard(dim, tuple(zip(flat[::2], flat[1::2], strict=True)))


def ends(name: str, args: Sequence[Any]) -> tuple[Layout, Layout]:
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
