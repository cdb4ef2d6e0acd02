"""Gathers several tensors at once from the ranks' slices, straight into full tensors.

    a: f32[6,4], S(0) over tp          rank 0 posts a[:3] and b[:, :2] together
    b: bf16[2,4], S(1) over tp         every rank copies the posts into its full a and b

One collective per mesh axis moves a whole bucket. Through memory, a rank copies the others' slices from
their posts to their places; other backends send bytes, which each rank then copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

from torch import Tensor

from torchshard.core.layouts import Shard, chunk_bounds, local_extent, parts_of, ranges
from torchshard.core.sharding import Cut, Placement, Sharding, local_shape
from torchshard.distributed.consistency import verify_following_call
from torchshard.distributed.convert import begun
from torchshard.distributed.group import Group
from torchshard.distributed.kernels import Exchange
from torchshard.distributed.memory import share
from torchshard.distributed.packing import Type, nbytes, packed, unpacked
from torchshard.distributed.ranks import Ranks
from torchshard.distributed.wire import Work, begin, finish

_POSTED_BYTES = 1 << 22
"""The slices that a rank posts together through memory: less than a processor's cache."""


class Sliced(NamedTuple):
    """A rank's slice of a tensor."""

    local: Tensor
    sharding: Sharding
    shape: tuple[int, ...]
    """The global shape."""

    @property
    def splits(self) -> list[Placement]:
        """The placements that split it, in order."""
        return [each for each in self.sharding if isinstance(each.layout, Shard)]


def gather_into(ranks: Ranks, slices: Sequence[Sliced], full: Sequence[Tensor], what: str, after: int = 0) -> None:
    """Gathers tensors; all ranks must call it.

    Args:
        full: the memory for the full tensors, of the slices' dtypes.
        what: a description, equal on all ranks.
        after: the number of first placements to leave: `full` then has the slices that these give.
    """
    held = [each.local for each in slices]
    for stage in reversed(range(after, max((len(each.splits) for each in slices), default=0))):
        for name, group in ranks.groups.items():
            moved = dict[int, _Moved]()
            for i, x in enumerate(slices):
                if len(x.splits) > stage and x.splits[stage].axis.name == name:
                    shape = local_shape(x.shape, ranks.cuts(Sharding(x.splits[:stage])))
                    into = full[i] if stage == after else held[i].new_empty(shape)
                    moved[i] = _Moved(held[i], cast(Shard, x.splits[stage].layout), into, _blocks(into, group))
            if moved:
                _gather(group, list(moved.values()), what)
            for i, each in moved.items():
                held[i] = each.full
    for local, x, into in zip(held, slices, full, strict=True):
        if len(x.splits) <= after:
            into.copy_(local)


def _blocks(full: Tensor, group: Group) -> int:
    """Returns the number of blocks of rows in which the slices of a tensor move."""
    return max(full.nbytes // group.size // _POSTED_BYTES, 1) if group.memory is not None else 1


class _Moved(NamedTuple):
    """A tensor that moves along one mesh axis."""

    held: Tensor
    """This rank's slice."""
    layout: Shard
    full: Tensor
    blocks: int
    """The number of blocks of rows in which each rank's slice moves."""

    def type_of(self, rank: int, world: int, block: int) -> Type:
        """Returns the type of a block of a rank's slice."""
        shape = local_shape(self.full.shape, (Cut(self.layout, rank, world),))
        bounds = chunk_bounds(shape[0], self.blocks)
        return (bounds[block + 1] - bounds[block], *shape[1:]), self.full.dtype

    def block(self, number: int) -> Tensor:
        """Returns a block of this rank's slice."""
        bounds = chunk_bounds(len(self.held), self.blocks)
        return self.held[bounds[number] : bounds[number + 1]]

    def copy(self, rank: int, world: int, number: int, block: Tensor) -> None:
        """Copies a block of a rank's slice to its place in the full tensor."""
        dim, full, at = self.layout.dim, self.full, 0
        size = local_extent(full.shape[dim], self.layout, rank, world) if dim == 0 else full.shape[0]
        begin, end = chunk_bounds(size, self.blocks)[number : number + 2]
        for start, stop in ranges(parts_of(full.shape[dim], self.layout), rank, world):
            if dim:
                full[begin:end].narrow(dim, start, stop - start).copy_(block.narrow(dim, at, stop - start))
            elif (first := max(begin, at)) < (last := min(end, at + stop - start)):
                full[start + first - at : start + last - at].copy_(block[first - begin : last - begin])
            at += stop - start


def _gather(group: Group, moved: Sequence[_Moved], what: str) -> None:
    """Gathers tensors along one mesh axis."""
    device, world = moved[0].held.device, group.size
    verify_following_call(group, lambda: what, eager=device)
    if group.memory is not None:
        _through_memory(group, moved, what)
        return
    types = [[x.type_of(rank, world, 0) for x in moved] for rank in range(world)]
    size = max(sum(map(nbytes, of_rank)) for of_rank in types)
    exchange = Exchange("all_gather_single", packed([x.held for x in moved], device, size), lambda received: received)
    for rank, row in enumerate(begun(exchange, group).wait().chunk(world)):
        for x, part in zip(moved, unpacked(row, types[rank]), strict=True):
            x.copy(rank, world, 0, part)


def _through_memory(group: Group, moved: Sequence[_Moved], what: str) -> None:
    """Posts slices, some bytes at a time, and copies all ranks' posts.

    The next ones are posted before the last are copied. So a rank seldom waits, and the posts are in the cache.
    """
    blocks = [(x, block) for x in moved for block in range(x.blocks)]
    sizes = [x.full.nbytes // x.blocks for x, _ in blocks]
    posted = list[Work]()
    for numbers in consecutive(sizes, _POSTED_BYTES * group.size):
        some = blocks[numbers.start : numbers.stop]
        types = [[x.type_of(rank, group.size, block) for x, block in some] for rank in range(group.size)]
        posted.append(
            begin(group, what, share, group.memory, what, [x.block(i) for x, i in some], types, _copy(some, group))
        )
        if len(posted) > 1:
            finish(group, what, posted.pop(0))
    finish(group, what, posted.pop())


def _copy(blocks: Sequence[tuple[_Moved, int]], group: Group) -> Callable[[int, int, Tensor], None]:
    """Returns a function that copies posts of some blocks."""

    def copy(rank: int, number: int, posted: Tensor) -> None:
        x, block = blocks[number]
        x.copy(rank, group.size, block, x.block(block) if rank == group.rank else posted)

    return copy


def consecutive(sizes: Sequence[int], limit: float) -> Iterator[range]:
    """Yields the numbers of consecutive tensors that fit into a number of bytes, at least one at a time."""
    first, total = 0, 0
    for number, size in enumerate(sizes):
        if number > first and total + size > limit:
            yield range(first, number)
            first, total = number, 0
        total += size
    if sizes:
        yield range(first, len(sizes))
