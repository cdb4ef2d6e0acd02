"""Which parts of a whole tensor a rank's slice is made of.

w: f32[6, 4], layout S(0; 2+4), rank 1 of 2        its slice: f32[3, 4]
rows 1 to 2 of w are row 0 of the slice, rows 4 to 6 are its rows 1 and 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from torchshard.core.layouts import Layout, Shard, parts_of, ranges
from torchshard.core.mesh import Coordinate

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim of a part of a tensor."""


class Piece(NamedTuple):
    """A part of a whole tensor that lies in a rank's slice without gaps."""

    box: Box
    """Of the whole tensor."""
    dim: int
    """The dim in which the slice may have several pieces; 0 of a whole tensor."""
    at: int
    """Where the piece begins in the slice along that dim."""

    def of(self, local: Tensor) -> Tensor:
        """The piece of a slice, as a view."""
        if not self.box:
            return local
        start, stop = self.box[self.dim]
        return local.narrow(self.dim, self.at, stop - start)


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return tuple((0, extent) for extent in shape)


def sizes(box: Box) -> list[int]:
    """The shape of a part."""
    return [stop - start for start, stop in box]


def pieces(shape: Sequence[int], layout: Layout, coordinate: Coordinate) -> list[Piece]:
    """The pieces of a rank's slice of a tensor of global `shape`; none of them is empty, unless the tensor is."""
    whole = whole_box(shape)
    if not isinstance(layout, Shard):
        return [Piece(whole, 0, 0)]
    dim, at, found = layout.dim, 0, list[Piece]()
    for start, stop in ranges(parts_of(shape[dim], layout), coordinate.rank, coordinate.axis.size):
        if start < stop:
            found.append(Piece(with_range(whole, dim, start, stop), dim, at))
        at += stop - start
    return found


def runs(shape: Sequence[int], box: Box, itemsize: int) -> tuple[int, Iterator[int]]:
    """How a part lies in row-major memory: (bytes of each run without gaps, where each run begins, in bytes).

    Args:
        box: a part that is not empty.
        itemsize: bytes of an element.
    """
    inner = len(box)
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(box))]
    walked = [range(a * s, b * s, s) for (a, b), s in zip(box, strides, strict=True)][: max(inner - 1, 0)]
    first = box[inner - 1][0] * strides[inner - 1] if inner else 0
    length = math.prod(sizes(box)) * itemsize // math.prod(map(len, walked))
    return length, (first + sum(places) for places in itertools.product(*walked))


def halves(box: Box) -> tuple[int, int, int, int]:
    """(dim, start, middle, stop): where a part is cut in two, at the first dim that has more than one index."""
    dim, (start, stop) = next((d, (a, b)) for d, (a, b) in enumerate(box) if b - a > 1)
    return dim, start, (start + stop) // 2, stop


def with_range(box: Box, dim: int, start: int, stop: int) -> Box:
    """A part with another range of indices of one dim."""
    return (*box[:dim], (start, stop), *box[dim + 1 :])
