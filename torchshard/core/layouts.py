"""Layouts: how a tensor is distributed over the ranks of a group, and how its gradient is.

    layout      each rank holds            its gradient on each rank           printed
    Invariant   the whole value            the whole gradient, equal on all    I
    Replicate   the whole value            a partial sum of the gradient       R
    Shard(dim)  its slice along dim        its slice of the gradient           S(1)
    Partial     a partial sum              the whole gradient                  P

A layout includes the gradient because two values that are equal forward (I and R) need different
collectives backward. I and S are their own duals, R and P are each other's: `dual(layout)` is the
layout of the gradient.

The sharded dim is a concatenation of *parts*. A part is `count` units of `unit` elements. Its units
are dealt to the ranks by `torch.chunk`'s rule, and each rank gets a piece of every part. The plain
case is one part of units of one element. `S(2; 768+768+768)` is a fused QKV weight. `S(0; 7x8)` is
seven heads of eight, split as four and three across two ranks. The last ranks may be empty.

A dim of dynamic size has three forms. In `S(1; *4)` the parts repeat until the dim is full: any
number of four heads, as in `view(length, batch * heads, width)`. In `S(1)` the size is a multiple
of the number of ranks, and the slices are equal. In `S(0; *length)` blocks of `length` elements
repeat, and each is split into equal slices, as in `view(batch * length, width)` of a split length.

Example: a dim of 7 over 2 ranks is 4 and 3; over 4 ranks 2, 2, 2, 1; a dim of 2 over 4 ranks is 1,
1, 0, 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    import sympy

Size: TypeAlias = "int | sympy.Expr"
"""The size of a dim: an int, or a sympy expression if the dim is dynamic."""
BATCH, SEQUENCE = 0, 1
"""The dims of a call's tensors that ranks may split."""
INPUT_DIMS = {BATCH: "batch", SEQUENCE: "sequence"}
"""Their names."""
Part = tuple[int, int]
"""(count, unit): `count` units of `unit` elements each, dealt to the ranks unit by unit."""
EQUAL: tuple[Part, ...] = ()
"""The parts of a dim or factor of dynamic size, a multiple of the rank count: equal slices."""


@dataclass(frozen=True)
class Blocks:
    """The parts of a dim of blocks of one dynamic size, a multiple of the rank count: equal slices of each."""

    size: str
    """A dynamic size as text, which tells blocks apart: 'length', '2*s1'."""
    unit: int = 1
    """The elements of a block for each of its units: 4 in blocks of `length * 4`."""

    def __str__(self) -> str:
        return self.size if self.unit == 1 else f"{self.size} x {self.unit}"

    @staticmethod
    def parse(text: str) -> Blocks:
        """Parses the text that `str` returns.

        Raises:
            ValueError: the text does not describe blocks.
        """
        size, _, unit = text.partition(" x ")
        if not re.fullmatch(r"[\w*+-]*[a-zA-Z][\w*+-]*", size) or (unit and not unit.isdigit()):
            raise ValueError(f"invalid blocks {text!r}: expected length, or length x 4")
        return Blocks(size, int(unit or 1))


Parts = tuple[Part, ...] | Blocks
"""The parts that a dim or a factor is a concatenation of."""


def is_dynamic(parts: Parts) -> bool:
    """Returns whether these are parts of a dynamic size, of which each rank gets an equal share."""
    return parts == EQUAL or isinstance(parts, Blocks)


@dataclass(frozen=True)
class Invariant:
    """Every rank has the full value and the full gradient."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True)
class Replicate:
    """Every rank has the full value and a partial sum of its gradient."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank has a partial sum of the value, and the full gradient."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Shard:
    """Every rank has a slice of the value along one dim, and the same slice of the gradient."""

    dim: int
    """The sharded dim of the tensor, counted from 0 (never negative)."""
    parts: Parts | None = None
    """The parts that the dim is a concatenation of; None for one part of units of one element."""
    repeated: bool = False
    """Whether the parts repeat until the dim is full; its size is then dynamic."""

    def __str__(self) -> str:
        return f"S({self.dim}; {self.parts_text})" if self.parts else f"S({self.dim})"

    @property
    def is_equal(self) -> bool:
        """Whether, of a dim of dynamic size, all ranks have equal slices."""
        return not self.repeated or isinstance(self.parts, Blocks)

    @property
    def listed(self) -> tuple[Part, ...]:
        """The parts; () for the plain case. Blocks have none: no conversion has such a layout."""
        assert not isinstance(self.parts, Blocks), self
        return self.parts or ()

    @property
    def parts_text(self) -> str:
        """The parts as text: '768+768+768', '7x8', '*4', '*length'; '' for the plain case."""
        if isinstance(self.parts, Blocks):
            return f"*{self.parts}"
        parts = "+".join(str(count) if unit == 1 else f"{count}x{unit}" for count, unit in self.parts or ())
        return "*" * self.repeated + parts


Layout = Invariant | Replicate | Partial | Shard
I, R, P = Invariant(), Replicate(), Partial()  # noqa: E741 - the field's names
S = Shard

_DUALS: dict[Layout, Layout] = {R: P, P: R}


def dual(layout: Layout) -> Layout:
    """Returns the layout of the gradient of a value with this layout."""
    return _DUALS.get(layout, layout)


def is_whole(layout: Layout) -> bool:
    """Returns whether every rank has the full value (I or R)."""
    return isinstance(layout, (Invariant, Replicate))


def has_blocks(layout: Layout) -> bool:
    """Returns whether each rank has slices of blocks of dynamic size."""
    return isinstance(layout, Shard) and isinstance(layout.parts, Blocks)


def parse_layout(text: str) -> Layout:
    """Parses a layout from the text that `str(layout)` prints.

    Raises:
        ValueError: the text is not a layout.
    """
    named: dict[str, Layout] = {"I": I, "R": R, "P": P}
    if text in named:
        return named[text]
    match = re.fullmatch(r"S\((\d+)(?:; (\*?)(\d+(?:x\d+)?(?:\+\d+(?:x\d+)?)*))?\)", text)
    blocks = None if match else re.fullmatch(r"S\((\d+); \*(.+)\)", text)
    if blocks:
        return Shard(int(blocks[1]), Blocks.parse(blocks[2]), repeated=True)
    if not match:
        raise ValueError(f"invalid layout {text!r}: expected I, R, P, S(1), S(2; 768+768+768), S(0; 7x8) or S(1; *4)")
    if match[3] is None:
        return Shard(int(match[1]))
    pairs = [part.partition("x") for part in match[3].split("+")]
    return Shard(int(match[1]), tuple((int(count), int(unit or 1)) for count, _, unit in pairs), bool(match[2]))


def chunk_bounds(count: int, world: int) -> list[int]:
    """Returns the world + 1 bounds of `torch.chunk`'s pieces of `count` units: 7 over 3 is [0, 3, 6, 7].

    A dynamic count is a multiple of `world`.
    """
    if not isinstance(count, int):
        return [rank * (count // world) for rank in range(world + 1)]
    # torch.chunk rounds up: 7 over 3 ranks is 3, 3, 1, not 3, 2, 2
    step = -(-count // world)
    return [min(rank * step, count) for rank in range(world + 1)]


def parts_of(size: int, shard: Shard) -> tuple[Part, ...]:
    """Returns the parts of a dim of `size` elements under this Shard, with repetitions spelled out."""
    assert not isinstance(shard.parts, Blocks), shard
    if not shard.parts:
        return ((size, 1),)
    if not shard.repeated:
        return shard.parts
    return shard.parts * (size // parts_size(shard.parts)) or ((0, 1),)


def parts_size(parts: Sequence[Part]) -> int:
    """Returns the total number of elements of the parts."""
    return sum(count * unit for count, unit in parts)


def ranges(parts: Sequence[Part], rank: int, world: int) -> list[tuple[int, int]]:
    """Returns the (start, stop) of `rank`'s slice of each part, in elements of the global dim."""
    slices, offset = [], 0
    for count, unit in parts:
        bounds = chunk_bounds(count, world)
        slices.append((offset + bounds[rank] * unit, offset + bounds[rank + 1] * unit))
        offset += count * unit
    return slices


def local_size(parts: Sequence[Part], rank: int, world: int) -> int:
    """Returns the number of elements of the dim on `rank`."""
    return sum(stop - start for start, stop in ranges(parts, rank, world))


def local_extent(size: Size, shard: Shard, rank: int, world: int) -> Size:
    """Returns the number of elements of a sharded dim on `rank`.

    If the parts repeat or the slices are equal, `size` may be anything that supports `//` and `*`:
    an expression, or an fx.Proxy of a size.
    """
    if isinstance(shard.parts, Blocks) or (shard.parts is None and not isinstance(size, int)):
        return size // world
    if not shard.repeated or shard.parts is None:
        return local_size(parts_of(size, shard), rank, world)
    return size // parts_size(shard.parts) * local_size(shard.parts, rank, world)


def largest_share(layout: Layout, shape: Sequence[int], world: int) -> float:
    """Returns rank 0's fraction of a value, the largest: `torch.chunk` fills the first ranks."""
    if not isinstance(layout, Shard) or not shape[layout.dim]:
        return 1.0
    return local_extent(shape[layout.dim], layout, 0, world) / shape[layout.dim]


def local_shape(shape: Sequence[int], layout: Layout, rank: int, world: int) -> tuple[int, ...]:
    """Returns the local shape on `rank` of a tensor of global `shape`."""
    if not isinstance(layout, Shard):
        return tuple(shape)
    local = list(shape)
    local[layout.dim] = local_extent(shape[layout.dim], layout, rank, world)
    return tuple(local)


def whole_shape(shape: Sequence[int], layout: Layout) -> list[int]:
    """Returns the global shape of a tensor from a rank's local shape; a Shard must spell out its parts."""
    whole = list(shape)
    if isinstance(layout, Shard):
        assert not layout.repeated and layout.parts != EQUAL, layout
        whole[layout.dim] = parts_size(parts_of(0, layout))
    return whole


def with_parts(source: Layout, target: Layout, shape: Sequence[int], world: int) -> tuple[Layout, Layout]:
    """Returns the layouts of a conversion with the parts of equal slices spelled out.

    Args:
        shape: the local shape of the tensor before the conversion.
    """
    if isinstance(source, Shard) and source.parts == EQUAL:
        source = Shard(source.dim, ((shape[source.dim] * world, 1),))
    if isinstance(target, Shard) and target.parts == EQUAL:
        target = Shard(target.dim, ((whole_shape(shape, source)[target.dim], 1),))
    return source, target


def _smallest_unit(count: int, unit: int, world: int) -> int:
    """Returns the smallest unit that deals the same elements to the same ranks."""
    if count % world == 0:
        return 1
    size, bounds = count * unit, [b * unit for b in chunk_bounds(count, world)]
    divisors = (u for u in range(1, unit + 1) if unit % u == 0)
    return next(u for u in divisors if [b * u for b in chunk_bounds(size // u, world)] == bounds)


def canonical(dim: int, parts: Sequence[Part], world: int, *, repeated: bool = False) -> Shard:
    """Returns the canonical Shard for these parts at this world size, with the smallest units.

    Shards that give every rank the same elements get the same spelling, so layouts can be compared
    by equality. The exception is a part with fewer units than ranks: two spellings of it may
    differ, at the cost of an unnecessary conversion.

    >>> str(canonical(0, [(4, 8)], 2)), str(canonical(0, [(7, 8)], 2))
    ('S(0)', 'S(0; 7x8)')
    """
    units = [(count, unit, _smallest_unit(count, unit, world)) for count, unit in parts if count * unit]
    small = tuple((count * unit // u, u) for count, unit, u in units)
    if repeated:
        return Shard(dim, small, repeated=True)
    plain = all(u == 1 for _, u in small) and len(small) <= 1
    return Shard(dim, None if plain or world == 1 else small)


def split(tensor: Tensor, layout: Layout, rank: int, world: int) -> Tensor:
    """Returns `rank`'s piece of a full tensor: `join([split(x, l, r, w) for r in range(w)], l)` is x.

    Under Partial, rank 0 gets the full value and the others zeros. The result is a view if
    possible.
    """
    if isinstance(layout, Partial):
        return tensor if rank == 0 else torch.zeros_like(tensor)
    if not isinstance(layout, Shard):
        return tensor
    slices = ranges(parts_of(tensor.shape[layout.dim], layout), rank, world)
    pieces = [tensor.narrow(layout.dim, start, stop - start) for start, stop in slices]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim)


def join(pieces: Sequence[Tensor], layout: Layout) -> Tensor:
    """Returns the full tensor from all ranks' pieces, in rank order."""
    if isinstance(layout, Partial):
        return torch.stack(list(pieces)).sum(0, dtype=pieces[0].dtype) if len(pieces) > 1 else pieces[0]
    if not isinstance(layout, Shard):
        return pieces[0]
    dim, world = layout.dim, len(pieces)
    if not layout.parts or (len(layout.listed) == 1 and not layout.repeated):
        return torch.cat(list(pieces), dim)
    parts = parts_of(sum(piece.shape[dim] for piece in pieces), layout)
    # each rank has a piece of every part, so the parts are joined one after the other, not the
    # ranks
    widths = [[stop - start for start, stop in ranges(parts, rank, world)] for rank in range(world)]
    columns = [piece.split(width, dim) for piece, width in zip(pieces, widths, strict=True)]
    return torch.cat([column[part] for part in range(len(parts)) for column in columns], dim)


_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def dtype_text(dtype: torch.dtype) -> str:
    """Returns a dtype as text: 'f32'."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def type_text(dtype: torch.dtype, shape: Sequence[object]) -> str:
    """Returns a tensor's type as text, 'f32[2,8,16]'; see `core.sharding.split_text` for shardings."""
    return f"{dtype_text(dtype)}[{','.join(map(str, shape))}]"
