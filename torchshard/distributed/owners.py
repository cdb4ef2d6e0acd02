"""Brings tensors that ranks hold as slices together, each on one rank, and deals them out again.

    w: f32[6,4], S(0) over tp     rank 0 has rows 0 to 2, rank 1 rows 3 to 5
    collected, owned by rank 1    rank 0 has nothing, rank 1 has f32[6,4]
    dealt                         as before

All tensors move together: one all-to-all per mesh axis, of bytes, because dtypes may differ. A tensor
that two axes split moves along the last one first. Ranks along an axis that replicates a tensor each
have a copy, so each replica has an owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchshard.core.layouts import Shard, join, split
from torchshard.core.mesh import Place
from torchshard.core.sharding import Cut, Sharding, local_shape
from torchshard.distributed.consistency import verify_following_call
from torchshard.distributed.convert import begun
from torchshard.distributed.group import Group
from torchshard.distributed.kernels import Exchange
from torchshard.distributed.packing import Type, nbytes, packed, unpacked
from torchshard.distributed.ranks import Ranks


class Owned(NamedTuple):
    """A tensor in slices, with the rank that holds it in full for a while."""

    sharding: Sharding
    shape: tuple[int, ...]
    """The global shape."""
    dtype: torch.dtype
    owner: Place
    """The owner's place on the axes of the sharding."""

    def has_reached(self, place: Place, stage: int = -1) -> bool:
        """Returns whether a rank holds a part of it before it moves along a placement; by default at the end."""
        return all(place[axis.name] == self.owner[axis.name] for axis, _ in self.sharding[stage + 1 :])

    def part(self, place: Place, stage: int, rank: int) -> Type:
        """Returns the type of the part that a rank of a placement's axis holds before it moves along that."""
        cuts = Sharding(self.sharding[:stage]).cuts(place)
        axis, layout = self.sharding[stage]
        return local_shape(self.shape, (*cuts, Cut(layout, rank, axis.size))), self.dtype


class _Move(NamedTuple):
    """The tensors that move along one placement, over one group."""

    stage: int
    group: Group
    of_owner: list[list[int]]
    """Rank of the group -> the numbers of the tensors that move to it, or from it."""


def _moves(ranks: Ranks, owned: Sequence[Owned]) -> Iterator[_Move]:
    for stage in reversed(range(max((len(each.sharding) for each in owned), default=0))):
        for name, group in ranks.groups.items():
            of_owner: list[list[int]] = [[] for _ in range(group.size)]
            for number, each in enumerate(owned):
                along = each.sharding[stage].axis.name if stage < len(each.sharding) else None
                if along == name and each.has_reached(ranks.place, stage):
                    of_owner[each.owner[name]].append(number)
            if any(of_owner):
                yield _Move(stage, group, of_owner)


def collected(ranks: Ranks, owned: Sequence[Owned], slices: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the full tensors of which this rank is the owner, and None for the others; a collective call."""
    held: list[Tensor | None] = list(slices)
    for stage, group, of_owner in _moves(ranks, owned):
        own = of_owner[group.rank]
        sent = [[cast(Tensor, held[i]) for i in numbers] for numbers in of_owner]
        types = [[owned[i].part(ranks.place, stage, rank) for i in own] for rank in range(group.size)]
        moved, device = sum(map(len, of_owner)), slices[0].device
        received = exchanged(group, sent, types, device, f"{moved} tensors to their owners")
        for numbers in of_owner:
            for i in numbers:
                held[i] = None
        for number, i in enumerate(own):
            layout = cast(Shard, owned[i].sharding[stage].layout)
            held[i] = join([parts[number] for parts in received], layout).contiguous()
    return [x if each.has_reached(ranks.place) else None for x, each in zip(held, owned, strict=True)]


def dealt(ranks: Ranks, owned: Sequence[Owned], full: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    """Returns this rank's slices of tensors that their owners have in full; a collective call.

    Args:
        full: the tensors of which this rank is the owner, and None for the others.
        device: the device of all of them.
    """
    held = list(full)
    for stage, group, of_owner in reversed([*_moves(ranks, owned)]):
        sent = [
            [split(cast(Tensor, held[i]), owned[i].sharding[stage].layout, rank, group.size)
             for i in of_owner[group.rank]] for rank in range(group.size)
        ]  # fmt: skip
        types = [[owned[i].part(ranks.place, stage, group.rank) for i in numbers] for numbers in of_owner]
        moved = sum(map(len, of_owner))
        received = exchanged(group, sent, types, device, f"{moved} tensors from their owners")
        for rank, (numbers, parts) in enumerate(zip(of_owner, received, strict=True)):
            for i, part in zip(numbers, parts, strict=True):
                held[i] = part.clone() if rank == group.rank else part  # a view would keep the full tensor alive
    return cast(list[Tensor], held)


def exchanged(
    group: Group,
    sent: Sequence[Sequence[Tensor]],
    types: Sequence[Sequence[Type]],
    device: torch.device,
    what: str,
    *,
    is_eager: bool = False,
) -> list[list[Tensor]]:
    """Returns the tensors from each rank of a group; its own are those in `sent`.

    Args:
        sent: the tensors for each rank.
        types: the types of the tensors from each rank.
        is_eager: whether this is an unverified user call.
    """
    verify_following_call(group, lambda: what, eager=device if is_eager else None)
    if group.size == 1:
        return [list(sent[0])]
    others = [tensors if rank != group.rank else () for rank, tensors in enumerate(sent)]
    go = [sum(x.nbytes for x in tensors) for tensors in others]
    come = [sum(map(nbytes, each)) if rank != group.rank else 0 for rank, each in enumerate(types)]
    data = packed([x for tensors in others for x in tensors], device)
    exchange = Exchange("all_to_all_single", data, lambda received: received, (come, go))
    received = begun(exchange, group).wait().split(come)
    return [
        list(sent[rank]) if rank == group.rank else unpacked(part, each)
        for rank, (part, each) in enumerate(zip(received, types, strict=True))
    ]
