"""How one tensor lies over the ranks of a group, and how its gradient does.

    layout      each rank holds            its gradient on each rank           printed
    Invariant   the whole value            the whole gradient, equal on all    I
    Replicate   the whole value            an addend of the gradient           R
    Shard(dim)  its slice along dim        its slice of the gradient           S(1)
    Partial     an addend of the value     the whole gradient                  P

I and S are their own duals, R and P each other's: `dual(layout)` is the layout of the gradient.

A dim of a Shard is a concatenation of *parts*, each `count` units of `unit` elements; each part deals its units to
the ranks by `torch.chunk`'s rule, and a rank holds its piece of every part. One part of units of one element is the
plain case. `S(2; 768+768+768)` is a fused QKV weight, `S(0; 7x8)` seven heads of eight, which two ranks hold as four
heads and three. The last ranks may hold nothing. Where the dim's size is dynamic its parts come again and again until
it is full: `S(1; *4)` is any number of four heads, as in `view(length, batch * heads, width)`.

Example: a dim of 7 over 2 ranks is 4 and 3; over 4 ranks 2, 2, 2, 1; a dim of 2 over 4 ranks is 1, 1, 0, 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Part = tuple[int, int]
"""(count, unit): `count` units of `unit` elements each, dealt to the ranks unit by unit."""


@dataclass(frozen=True)
class Invariant:
    """The whole value on every rank, and the whole gradient too."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True)
class Replicate:
    """The whole value on every rank; each rank's gradient is an addend of the whole."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """An addend on every rank; the value is their sum; every rank holds the whole gradient."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Shard:
    """A slice along one dim on every rank, and the same slice of the gradient."""

    dim: int
    """The split dim of the tensor, counted from 0 (never negative)."""
    parts: tuple[Part, ...] | None = None
    """What the dim is a concatenation of, or None: one part of units of one element."""
    repeated: bool = False
    """Whether the parts come again and again until the dim is full."""

    def __str__(self) -> str:
        if self.parts is None:
            return f"S({self.dim})"
        times = "*" if self.repeated else ""
        return f"S({self.dim}; {times}{'+'.join(str(c) if u == 1 else f'{c}x{u}' for c, u in self.parts)})"


Layout = Invariant | Replicate | Partial | Shard
I, R, P = Invariant(), Replicate(), Partial()  # noqa: E741 - the field's names
S = Shard

_DUALS: dict[Layout, Layout] = {R: P, P: R}


def dual(layout: Layout) -> Layout:
    """The layout of the gradient of a value with this layout."""
    return _DUALS.get(layout, layout)


def is_whole(layout: Layout) -> bool:
    """Whether every rank holds the whole value (I or R)."""
    return isinstance(layout, (Invariant, Replicate))


def parse_layout(text: str) -> Layout:
    """The layout that prints as `text`; raises ValueError where none does."""
    named: dict[str, Layout] = {"I": I, "R": R, "P": P}
    if text in named:
        return named[text]
    found = re.fullmatch(r"S\((\d+)(?:; (\*?)(\d+(?:x\d+)?(?:\+\d+(?:x\d+)?)*))?\)", text)
    if not found:
        raise ValueError(f"{text!r} is no layout: I, R, P, S(1), S(2; 768+768+768), S(0; 7x8) or S(1; *4)")
    if found[3] is None:
        return Shard(int(found[1]))
    pairs = [segment.partition("x") for segment in found[3].split("+")]
    return Shard(int(found[1]), tuple((int(count), int(unit or 1)) for count, _, unit in pairs), bool(found[2]))


def chunk_bounds(count: int, world: int) -> list[int]:
    """The world + 1 bounds of `torch.chunk`'s pieces of `count` things: 7 over 3 is [0, 3, 6, 7]."""
    step = -(-count // world)
    return [min(rank * step, count) for rank in range(world + 1)]


def parts_of(size: int, shard: Shard) -> tuple[Part, ...]:
    """The parts of a dim of `size` elements under this Shard, spelled out."""
    if shard.parts is None:
        return ((size, 1),)
    return shard.parts * (size // parts_size(shard.parts)) or ((0, 1),) if shard.repeated else shard.parts


def parts_size(parts: Sequence[Part]) -> int:
    """How many elements the parts hold together."""
    return sum(count * unit for count, unit in parts)


def ranges(parts: Sequence[Part], rank: int, world: int) -> list[tuple[int, int]]:
    """The (start, stop) that `rank` holds of each part, in elements of the whole dim."""
    held, offset = [], 0
    for count, unit in parts:
        bounds = chunk_bounds(count, world)
        held.append((offset + bounds[rank] * unit, offset + bounds[rank + 1] * unit))
        offset += count * unit
    return held


def local_size(parts: Sequence[Part], rank: int, world: int) -> int:
    """How many elements of the dim `rank` holds."""
    return sum(stop - start for start, stop in ranges(parts, rank, world))


def local_extent(size: Any, shard: Shard, rank: int, world: int) -> Any:
    """How many elements `rank` holds of a split dim; where parts repeat, its size may be an expression, or a node."""
    if not shard.repeated or shard.parts is None:
        return local_size(parts_of(size, shard), rank, world)
    return size // parts_size(shard.parts) * local_size(shard.parts, rank, world)


def largest_share(layout: Layout, shape: Sequence[int], world: int) -> float:
    """The part of a value of this shape that the first rank holds, which holds the most."""
    if not isinstance(layout, Shard) or not shape[layout.dim]:
        return 1.0
    return local_extent(shape[layout.dim], layout, 0, world) / shape[layout.dim]


def local_shape(shape: Sequence[int], layout: Layout, rank: int, world: int) -> tuple[int, ...]:
    """The shape of what `rank` holds of a tensor of global `shape`."""
    if not isinstance(layout, Shard):
        return tuple(shape)
    held = list(shape)
    held[layout.dim] = local_extent(shape[layout.dim], layout, rank, world)
    return tuple(held)


def whole_shape(shape: Sequence[int], layout: Layout) -> list[int]:
    """The global shape of what a rank holds in this layout; a Shard says its parts, none of which repeats."""
    whole = list(shape)
    if isinstance(layout, Shard):
        assert not layout.repeated, layout
        whole[layout.dim] = parts_size(parts_of(0, layout))
    return whole


def _coarsest_unit(count: int, unit: int, world: int) -> int:
    """The smallest unit that deals the same elements to the same ranks."""
    if count % world == 0:
        return 1
    size, bounds = count * unit, [b * unit for b in chunk_bounds(count, world)]
    small = (u for u in range(1, unit + 1) if unit % u == 0)
    return next(u for u in small if [b * u for b in chunk_bounds(size // u, world)] == bounds)


def canonical(dim: int, parts: Sequence[Part], world: int, *, repeated: bool = False) -> Shard:
    """The one spelling of a Shard at this world size: smallest units, no needless parts.

    >>> str(canonical(0, [(4, 8)], 2)), str(canonical(0, [(7, 8)], 2))
    ('S(0)', 'S(0; 7x8)')
    """
    units = [(count, unit, _coarsest_unit(count, unit, world)) for count, unit in parts if count * unit]
    small = tuple((count * unit // u, u) for count, unit, u in units)
    if repeated:
        return Shard(dim, small, repeated=True)
    plain = all(u == 1 for _, u in small) and len(small) <= 1
    return Shard(dim, None if plain or world == 1 else small)


def split(tensor: Tensor, layout: Layout, rank: int, world: int) -> Tensor:
    """What `rank` holds of a whole tensor: `join([split(x, l, r, w) for r in range(w)], l)` is x.

    A Partial puts the whole on rank 0 and zeros elsewhere. The result is a view where it can be one.
    """
    if isinstance(layout, Partial):
        return tensor if rank == 0 else torch.zeros_like(tensor)
    if not isinstance(layout, Shard):
        return tensor
    held = ranges(parts_of(tensor.shape[layout.dim], layout), rank, world)
    pieces = [tensor.narrow(layout.dim, start, stop - start) for start, stop in held]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim)


def join(pieces: Sequence[Tensor], layout: Layout, size: int | None = None) -> Tensor:
    """The whole tensor from what each rank holds, in the order of the ranks.

    `size` is the global size of a Shard's dim; without it the sum of the pieces' sizes.
    """
    if isinstance(layout, Partial):
        return torch.stack(list(pieces)).sum(0, dtype=pieces[0].dtype) if len(pieces) > 1 else pieces[0]
    if not isinstance(layout, Shard):
        return pieces[0]
    dim, world = layout.dim, len(pieces)
    if layout.parts is None or (len(layout.parts) == 1 and not layout.repeated):
        return torch.cat(list(pieces), dim)
    parts = parts_of(sum(piece.shape[dim] for piece in pieces), layout)
    widths = [[stop - start for start, stop in ranges(parts, rank, world)] for rank in range(world)]
    columns = [piece.split(width, dim) for piece, width in zip(pieces, widths, strict=True)]
    return torch.cat([column[part] for part in range(len(parts)) for column in columns], dim)


_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """'f32' for torch.float32."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def type_text(dtype: torch.dtype, shape: Sequence[object]) -> str:
    """'f32[2,8,16]' for a tensor of this dtype and shape."""
    return f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"
