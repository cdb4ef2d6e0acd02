"""What one rank does in each kind of collective. Every tensor is made contiguous first; results never alias inputs.

A kernel starts to communicate and says how the result is made of what comes: a `Pending`, to be waited for at once or
later. Pieces of different sizes are padded to the largest, sent, and cut back: every rank knows all sizes from the
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.distributed.groups import Group
from torchshard.errors import DistributedError
from torchshard.layouts import Layout, Shard, join, local_size, parts_of, parts_size, ranges, split


class Pending(NamedTuple):
    """A collective under way."""

    work: Any
    """torch.distributed's Work, or None where nothing is sent."""
    finish: Callable[[], Tensor]
    """What makes the result of what came."""

    def wait(self) -> Tensor:
        """The result."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


class Handle:
    """A collective that goes on while this process computes."""

    def __init__(self, pending: Pending, result: Callable[[], Tensor] | None = None) -> None:
        self._pending, self._result = pending, result or pending.wait
        self._held: Tensor | None = None

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._held is not None or self._pending.work is None or bool(self._pending.work.is_completed())

    def wait(self) -> Tensor:
        """The result, with its gradient; the same tensor each time."""
        if self._held is None:
            self._held = self._result()
        return self._held


def convert(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor:
    """Runs one conversion on this rank."""
    return start(kernel, x, source, target, group).wait()


def start(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    """Starts one conversion on this rank.

    Raises:
        DistributedError: the group is a simulated one.
    """
    if group.simulated:
        raise DistributedError(
            "a graph that was made for simulated ranks can't communicate",
            where=f"rank {group.rank} of {group.size}",
            attempt="run it with torchshard.check, or shard the model in a process group",
        )
    return _KERNELS[kernel](x, source, target, group)


def _none(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    held = x.clone()
    return Pending(None, lambda: held)


def _all_reduce(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    return reducing(x.clone(memory_format=torch.contiguous_format), dist.ReduceOp.SUM, group)


def reducing(held: Tensor, op: Any, group: Group) -> Pending:
    """All-reduce in place of a contiguous tensor."""
    sent = group.size > 1 and held.numel()
    work = dist.all_reduce(held, op=op, group=group.process_group, async_op=True) if sent else None
    return Pending(work, lambda: held)


def reduced(x: Tensor, op: object, group: Group) -> Tensor:
    """All-reduce of a copy."""
    return reducing(x.clone(memory_format=torch.contiguous_format), op, group).wait()


def _slice(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    held = split(x, target, group.rank, group.size).clone(memory_format=torch.contiguous_format)
    return Pending(None, lambda: held)


def _pad(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    assert isinstance(source, Shard)
    parts = parts_of(0, source)
    whole = x.new_zeros([*x.shape[: source.dim], parts_size(parts), *x.shape[source.dim + 1 :]])
    at = 0
    for begin, end in ranges(parts, group.rank, group.size):
        whole.narrow(source.dim, begin, end - begin).copy_(x.narrow(source.dim, at, end - begin))
        at += end - begin
    return Pending(None, lambda: whole)


def _widths(shard: Shard, world: int) -> list[int]:
    return [local_size(parts_of(0, shard), rank, world) for rank in range(world)]


def _padded(x: Tensor, width: int) -> Tensor:
    """dim 0 filled up with zeros to `width`, contiguous."""
    if x.shape[0] == width:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(width - x.shape[0], *x.shape[1:])])


def _all_gather(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    assert isinstance(source, Shard)
    if group.size == 1:
        return _none(x, source, target, group)
    widths = _widths(source, group.size)
    sent = _padded(x.movedim(source.dim, 0), max(widths))
    got = sent.new_empty(group.size, *sent.shape)

    def finish() -> Tensor:
        pieces = [got[r, :n].movedim(0, source.dim) for r, n in enumerate(widths)]
        return join(pieces, source).contiguous()

    flat = got.flatten(0, 1)
    work = dist.all_gather_single(flat, sent, group=group.process_group, async_op=True) if sent.numel() else None
    return Pending(work, finish)


def _reduce_scatter(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    assert isinstance(target, Shard)
    if group.size == 1:
        return _none(x, source, target, group)
    pieces = [split(x, target, r, group.size).movedim(target.dim, 0) for r in range(group.size)]
    width, own = max(p.shape[0] for p in pieces), pieces[group.rank].shape[0]
    sent = torch.cat([_padded(p, width) for p in pieces])
    got = sent.new_empty(width, *sent.shape[1:])
    work = dist.reduce_scatter_single(got, sent, group=group.process_group, async_op=True) if sent.numel() else None
    return Pending(work, lambda: got[:own].movedim(0, target.dim).contiguous())


def _all_to_all(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    assert isinstance(source, Shard) and isinstance(target, Shard)
    if group.size == 1:
        return _none(x, source, target, group)
    sent = [split(x, target, r, group.size).contiguous() for r in range(group.size)]
    shapes = [_with_size(sent[group.rank].shape, source.dim, n) for n in _widths(source, group.size)]
    lengths = [torch.Size(s).numel() for s in shapes]
    got, flat = x.new_empty(sum(lengths)), torch.cat([p.flatten() for p in sent])

    def finish() -> Tensor:
        return join([p.view(s) for p, s in zip(got.split(lengths), shapes, strict=True)], source).contiguous()

    own = [p.numel() for p in sent]
    return Pending(dist.all_to_all_single(got, flat, lengths, own, group=group.process_group, async_op=True), finish)


def scatter_pieces(x: Tensor, src: int, dim: int, size: int, group: Group) -> Tensor:
    """This rank's slice along `dim`, of `size` elements in all, of rank `src`'s tensor; the others' is not read."""
    if group.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    widths = _widths(Shard(dim, ((size, 1),)), group.size)
    rest = [n for i, n in enumerate(x.shape) if i != dim]
    pieces = None
    if group.rank == src:
        whole = (split(x, Shard(dim), r, group.size).movedim(dim, 0) for r in range(group.size))
        pieces = [_padded(piece, max(widths)) for piece in whole]
    got = x.new_empty(max(widths), *rest)
    if got.numel():
        dist.scatter(got, pieces, group_src=src, group=group.process_group)
    return got[: widths[group.rank]].movedim(0, dim).contiguous()


def gather_pieces(x: Tensor, dst: int, dim: int, size: int, group: Group) -> Tensor:
    """All ranks' slices along `dim` joined on rank `dst`; elsewhere nothing along it."""
    if group.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    widths = _widths(Shard(dim, ((size, 1),)), group.size)
    sent = _padded(x.movedim(dim, 0), max(widths))
    got = [torch.empty_like(sent) for _ in widths] if group.rank == dst else None
    if sent.numel():
        dist.gather(sent, got, group_dst=dst, group=group.process_group)
    if got is None:
        return x.new_empty(_with_size(x.shape, dim, 0))
    return join([g[:n].movedim(0, dim) for g, n in zip(got, widths, strict=True)], Shard(dim)).contiguous()


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


_KERNELS = {
    "none": _none,
    "all_reduce": _all_reduce,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
