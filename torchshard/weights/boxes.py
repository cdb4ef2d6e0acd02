"""Boxes: the rectangular regions of a full tensor that make up a rank's slice.

w: f32[6, 4], layout S(0; 2+4), rank 1 of 2        its slice: f32[3, 4]
w[1:2] is row 0 of the slice, w[4:6] is its rows 1 and 2

A sharding over a second mesh axis cuts these boxes again.
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
"""The (start, stop) of a region of a tensor along each dim."""


class Piece(NamedTuple):
    """A box of a full tensor that is also one box in a rank's slice."""

    box: Box
    """The box in the full tensor."""
    at: tuple[int, ...]
    """The index in the slice at which the piece begins, along each dim."""

    def of(self, local: Tensor) -> Tensor:
        """Returns a view of the piece in a rank's slice."""
        for dim, (at, size) in enumerate(zip(self.at, sizes(self.box), strict=True)):
            local = local.narrow(dim, at, size)
        return local


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box that covers a full tensor."""
    return tuple((0, extent) for extent in shape)


def sizes(box: Box) -> list[int]:
    """Returns the shape of a box."""
    return [stop - start for start, stop in box]


def pieces(shape: Sequence[int], cuts: Cuts) -> list[Piece]:
    """Returns the pieces of a rank's slice of a tensor of global `shape`.

    They are empty only if the tensor is.
    """
    held = [[(0, extent)] for extent in shape]  # per dim, the slice's global ranges, in its order
    for layout, rank, world in cuts:
        if isinstance(layout, Shard):
            own = held[layout.dim]
            parts = parts_of(sum(stop - start for start, stop in own), layout)
            held[layout.dim] = [r for bounds in ranges(parts, rank, world) for r in _within(own, *bounds)]
    places = [list(zip(itertools.accumulate((b - a for a, b in own), initial=0), own, strict=False)) for own in held]
    return [Piece(tuple(r for _, r in dims), tuple(at for at, _ in dims)) for dims in itertools.product(*places)]


def _within(own: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields the global ranges of the elements `start` to `stop` of a slice made of the ranges `own`."""
    at = 0
    for first, last in own:
        begin, end = max(first, first + start - at), min(last, first + stop - at)
        if begin < end:
            yield begin, end
        at += last - first


def overlaps(shape: Sequence[int], cuts: Cuts, box: Box, part: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Intersects a rank's slice with a box: yields (box in the slice, view of its values in `part`).

    Args:
        shape: the global shape.
        box: a box of the full tensor.
        part: the values in the box.
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
    """Returns a meta tensor with the shape, strides and storage offset of a box of a row-major tensor."""
    place = torch.empty(tuple(shape), device="meta")
    for dim, (start, stop) in enumerate(box or ()):
        place = place.narrow(dim, start, stop - start)
    return place


def runs(place: Tensor, itemsize: int) -> tuple[int, Iterator[int]]:
    """Returns the contiguous runs of a box in its tensor's memory: (bytes per run, offset of each in bytes).

    Args:
        place: a view from `place_of`, not empty; the runs are in the order of its dims.
        itemsize: bytes per element.
    """
    dims = [(size, stride) for size, stride in zip(place.shape, place.stride(), strict=True) if size > 1]
    length = 1
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    walked = [range(0, size * stride * itemsize, stride * itemsize) for size, stride in dims]
    first = int(place.storage_offset()) * itemsize
    return length * itemsize, (first + sum(places) for places in itertools.product(*walked))


def with_range(box: Box, dim: int, start: int, stop: int) -> Box:
    """Returns the box with a different range along one dim."""
    return (*box[:dim], (start, stop), *box[dim + 1 :])
