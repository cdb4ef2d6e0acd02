"""Sends each rank the boxes of full tensors that it requests, and nothing else.

    w: f32[8,4], S(0) over tp, two ranks      rank 0 has rows 0 to 3, rank 1 rows 4 to 7
    rank 0 requests w[2:6]                    rank 1 sends it rows 4 and 5

A tensor that several mesh axes split is first gathered along all axes but the first one that splits it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from torchshard.core.mesh import Place
from torchshard.core.sharding import Sharding, local_shape
from torchshard.distributed.buckets import Sliced, gather_into
from torchshard.distributed.group import Group
from torchshard.distributed.owners import exchanged
from torchshard.distributed.ranks import Ranks
from torchshard.weights.boxes import Box, overlaps, place_of, sizes


class Request(NamedTuple):
    """A box of a tensor."""

    name: str
    box: Box


def reslice(
    ranks: Ranks, slices: Mapping[str, Sliced], requests: Sequence[Sequence[Request]], into: Sequence[Tensor], what: str
) -> None:
    """Fills this rank's requests; all ranks must call it.

    Args:
        slices: this rank's slices of the requested tensors, in the same order on all ranks.
        requests: of each rank, by its number.
        into: the memory for this rank's.
        what: a description, equal on all ranks.
    """
    held, places = dict(slices), ranks.mesh.places()
    deeper = {name: each for name, each in slices.items() if len(each.splits) > 1}
    for name, each in deeper.items():
        first = Sharding(each.splits[:1])
        held[name] = Sliced(each.local.new_empty(local_shape(each.shape, ranks.cuts(first))), first, each.shape)
    if deeper:
        gather_into(ranks, list(deeper.values()), [held[name].local for name in deeper], what, after=1)
    own = list(zip(requests[ranks.number], into, strict=True))
    for (name, box), x in own:
        if not held[name].splits:
            x.copy_(_box_of(held[name].local, box))
    for axis, group in ranks.groups.items():
        along = {name: each for name, each in held.items() if each.splits and each.splits[0].axis.name == axis}
        if along:
            of_group = [{**ranks.place, axis: rank} for rank in range(group.size)]
            _exchange(group, of_group, along, [requests[places.index(place)] for place in of_group], own, what)


def _exchange(
    group: Group,
    places: Sequence[Place],
    slices: Mapping[str, Sliced],
    requests: Sequence[Sequence[Request]],
    own: Sequence[tuple[Request, Tensor]],
    what: str,
) -> None:
    """Fills this rank's requests for some tensors, which the ranks of a group have in slices.

    Args:
        places: of the group's ranks.
        requests: of the group's ranks.
        own: this rank's, with their memory.
    """

    def found(rank: int, wanted: Sequence[tuple[Request, Tensor]]) -> Iterator[tuple[Sliced, Box, Tensor]]:
        """Yields (this rank's slice, a box in another rank's slice, the place of its values)."""
        for (name, box), x in wanted:
            if (each := slices.get(name)) is not None:
                for part, place in overlaps(each.shape, each.sharding.cuts(places[rank]), box, x):
                    yield each, part, place

    asked = [[(request, place_of(sizes(request.box))) for request in of_rank] for of_rank in requests]
    sent = [[_box_of(each.local, part) for each, part, _ in found(group.rank, of_rank)] for of_rank in asked]
    mine = [list(found(rank, own)) for rank in range(group.size)]
    types = [[(tuple(sizes(part)), each.local.dtype) for each, part, _ in of_rank] for of_rank in mine]
    device = next(iter(slices.values())).local.device
    for of_rank, parts in zip(mine, exchanged(group, sent, types, device, what, is_eager=True), strict=True):
        for (_, _, place), part in zip(of_rank, parts, strict=True):
            place.copy_(part)


def _box_of(x: Tensor, box: Box) -> Tensor:
    return x[tuple(slice(start, stop) for start, stop in box)]
