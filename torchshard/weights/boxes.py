"""Which parts of a whole tensor a rank's slice is made of.

w: f32[6, 4], layout S(0; 2+4), rank 1 of 2        its slice: f32[3, 4]
rows 1 to 2 of w are row 0 of the slice, rows 4 to 6 are its rows 1 and 2
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
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


def overlaps(
    shape: Sequence[int], layout: Layout, coordinate: Coordinate, box: Box, part: Tensor
) -> Iterator[tuple[Box, Tensor]]:
    """What a rank's slice has of a part of the whole: (where it is in the slice, the same as a view of `part`).

    Args:
        box: of the whole tensor.
        part: a tensor of the box's shape.
    """
    for piece in pieces(shape, layout, coordinate):
        if not shape:
            yield box, part
            continue
        (begin, end), (start, stop) = piece.box[piece.dim], box[piece.dim]
        first, last = max(begin, start), min(end, stop)
        if first < last:
            at = piece.at + first - begin
            yield with_range(box, piece.dim, at, at + last - first), part.narrow(piece.dim, first - start, last - first)


def place_of(shape: Sequence[int], box: Box | None = None) -> Tensor:
    """A part of a row-major tensor as a view without memory, whose strides and offset say where the part lies."""
    place = torch.empty(tuple(shape), device="meta")
    for dim, (start, stop) in enumerate(box or ()):
        place = place.narrow(dim, start, stop - start)
    return place


def runs(place: Tensor, itemsize: int) -> tuple[int, Iterator[int]]:
    """How a part lies in the memory of its tensor: (bytes of each run without gaps, where each run begins, in bytes).

    Args:
        place: as of `place_of`, not empty; the runs are in the order of its dims.
        itemsize: bytes of an element.
    """
    dims = [(size, stride) for size, stride in zip(place.shape, place.stride(), strict=True) if size > 1]
    length = 1
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    walked = [range(0, size * stride * itemsize, stride * itemsize) for size, stride in dims]
    first = int(place.storage_offset()) * itemsize
    return length * itemsize, (first + sum(places) for places in itertools.product(*walked))


def with_range(box: Box, dim: int, start: int, stop: int) -> Box:
    """A part with another range of indices of one dim."""
    return (*box[:dim], (start, stop), *box[dim + 1 :])
