"""Which parts of a whole tensor a rank's slice is made of.

w: f32[6, 4], layout S(0; 2+4), rank 1 of 2        its slice: f32[3, 4]
rows 1 to 2 of w are row 0 of the slice, rows 4 to 6 are its rows 1 and 2

A slice that is cut again, over another mesh axis, has parts of these parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchshard.core.layouts import Shard, parts_of, ranges
from torchshard.core.sharding import Cuts

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim of a part of a tensor."""


class Piece(NamedTuple):
    """A part of a whole tensor that lies in a rank's slice without gaps."""

    box: Box
    """Of the whole tensor."""
    at: tuple[int, ...]
    """Where the piece begins in the slice, along each dim."""

    def of(self, local: Tensor) -> Tensor:
        """The piece of a slice, as a view."""
        for dim, (at, size) in enumerate(zip(self.at, sizes(self.box), strict=True)):
            local = local.narrow(dim, at, size)
        return local


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return tuple((0, extent) for extent in shape)


def sizes(box: Box) -> list[int]:
    """The shape of a part."""
    return [stop - start for start, stop in box]


def pieces(shape: Sequence[int], cuts: Cuts) -> list[Piece]:
    """The pieces of a rank's slice of a tensor of global `shape`; none of them is empty, unless the tensor is."""
    held = [[(0, extent)] for extent in shape]  # of each dim, the ranges of the whole that the slice has, in its order
    for layout, rank, world in cuts:
        if isinstance(layout, Shard):
            own = held[layout.dim]
            parts = parts_of(sum(stop - start for start, stop in own), layout)
            held[layout.dim] = [r for bounds in ranges(parts, rank, world) for r in _within(own, *bounds)]
    places = [list(zip(itertools.accumulate((b - a for a, b in own), initial=0), own, strict=False)) for own in held]
    return [Piece(tuple(r for _, r in dims), tuple(at for at, _ in dims)) for dims in itertools.product(*places)]


def _within(own: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges of the whole that lie between two places of a slice which is made of ranges."""
    at = 0
    for first, last in own:
        begin, end = max(first, first + start - at), min(last, first + stop - at)
        if begin < end:
            yield begin, end
        at += last - first


def overlaps(shape: Sequence[int], cuts: Cuts, box: Box, part: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """What a rank's slice has of a part of the whole: (where it is in the slice, the same as a view of `part`).

    Args:
        box: of the whole tensor.
        part: a tensor of the box's shape.
    """
    for piece in pieces(shape, cuts):
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.box, box, strict=True)]
        if any(first >= last for first, last in common):
            continue
        inside = zip(piece.at, piece.box, common, strict=True)
        own = tuple((at + first - start, at + last - start) for at, (start, _), (first, last) in inside)
        view = part
        for dim, ((first, last), (start, _)) in enumerate(zip(common, box, strict=True)):
            view = view.narrow(dim, first - start, last - first)
        yield own, view


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
