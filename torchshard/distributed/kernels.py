"""Runs one rank's part of each conversion: its sent and received data, and its computation.

A kernel returns the result, or an `Exchange`: the data to send, and a function from received data
to the result. `distributed.convert` runs kernels and their exchanges.

Backends send contiguous memory in pieces of equal size. Therefore a kernel makes its tensor
contiguous, pads uneven slices to the largest, and cuts the received ones; every rank knows all
sizes from the layout. A result never shares memory with the input, because autograd and the user
may change either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.layouts import I, Layout, Shard, join, local_size, parts_of, ranges, split, type_text, whole_shape
from torchshard.distributed.consistency import note_unverified, verify_following_call
from torchshard.distributed.group import Group
from torchshard.distributed.memory import ReduceKind, op_text
from torchshard.distributed.wire import Pending, collective


def copied(x: Tensor) -> Tensor:
    """Returns a contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


Result = Callable[[Tensor], Tensor]
"""Computes a conversion's result from received data."""


class Exchange(NamedTuple):
    """A collective of torch.distributed that a kernel needs."""

    collective: str
    """The name of the torch.distributed function."""
    sent: Tensor
    """The tensor to send; an all-reduce overwrites it with the received one."""
    result: Result
    lengths: tuple[list[int], list[int]] | None = None
    """For an all-to-all: the numbers of elements received from each rank, and sent to each."""

    def received(self, ranks: int) -> Tensor:
        """Returns the memory for received data."""
        if self.collective == "all_reduce":
            return self.sent
        first, *rest = self.sent.shape
        if self.collective == "reduce_scatter_single":
            return self.sent.new_empty(first // ranks, *rest)
        return self.sent.new_empty(first * ranks if self.lengths is None else sum(self.lengths[0]), *rest)


def _none(x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor:
    return x.clone()


def _all_reduce(x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor | Exchange:
    return _all_reduce_in_place(copied(x), source, target, group)


def _all_reduce_in_place(x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor | Exchange:
    x = dense(x)
    if group.size == 1 or not x.numel():
        return x
    return Exchange("all_reduce", summable(x), lambda received: received.to(x.dtype))


def reducing(x: Tensor, op: ReduceKind, group: Group) -> Pending:
    """All-reduces a contiguous tensor in place."""
    if group.size == 1 or not x.numel():
        return Pending(lambda: x)
    if x.dtype is torch.uint64 and op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        # signed integers order like unsigned ones if the sign bit is flipped before and after
        ordered = x.view(torch.int64) ^ _SIGN_BIT
        return Pending.of(lambda: x.copy_((ordered ^ _SIGN_BIT).view(x.dtype)), group, dist.all_reduce, ordered, op=op)
    if x.dtype in _SUMMED_AS:
        summed = x.to(_SUMMED_AS[x.dtype])
        return Pending.of(lambda: x.copy_(summed), group, dist.all_reduce, summed, op=op)
    return Pending.of(lambda: x, group, dist.all_reduce, x, op=op)


_SIGN_BIT = -(2**63)
_SUMMED_AS = {
    torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32, torch.float8_e5m2fnuz: torch.float32,
}  # fmt: skip
"""Dtype that backends can't reduce -> the dtype in which it is summed."""
_SENT_AS = {
    torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.uint8
    ),
}  # fmt: skip
"""Dtype that backends can't send -> a dtype of equal size for the same bits, without arithmetic."""


def summable(x: Tensor) -> Tensor:
    """Converts a tensor to a dtype that backends reduce."""
    return x.to(_SUMMED_AS.get(x.dtype, x.dtype))


def as_sent(x: Tensor) -> Tensor:
    """Views a tensor as a dtype that backends send."""
    return x.view(_SENT_AS[x.dtype]) if x.dtype in _SENT_AS else x


def reduced(x: Tensor, op: ReduceKind, group: Group, *, eager: str = "") -> Tensor:
    """All-reduces a copy.

    Args:
        eager: a description for a collective of an unverified user call. The ranks compare it now
            or, if they don't verify each call, at their next verification.
    """

    def describe() -> str:
        text = f"all_reduce, {op_text(op)}, of {type_text(x.dtype, x.shape)}"
        return f"{text}, {eager}" if eager else text

    if not verify_following_call(group, describe, eager=x.device if eager else None) and eager:
        note_unverified(group, eager)
    return reducing(copied(x), op, group).wait()


def _slice(x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor:
    return copied(split(x, target, group.rank, group.size))


def _pad(x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor:
    assert isinstance(source, Shard)
    parts = parts_of(0, source)
    whole = x.new_zeros(whole_shape(x.shape, source))
    at = 0
    for begin, end in ranges(parts, group.rank, group.size):
        whole.narrow(source.dim, begin, end - begin).copy_(x.narrow(source.dim, at, end - begin))
        at += end - begin
    return whole


class Slices(NamedTuple):
    """The number of elements of a dim on each rank."""

    widths: tuple[int, ...]
    width: int
    """The largest of them."""
    even: bool
    """Whether all are equal and concatenate to the full tensor."""


def _slices(shard: Shard, world: int) -> Slices:
    ((count, _), *_) = shard.listed or ((0, 1),)
    if isinstance(count, torch.SymInt):  # a SymInt has no hash; a dynamic size is in equal slices
        return Slices((count // world,) * world, count // world, even=True)
    return _static_slices(shard, world)


@lru_cache(maxsize=4096)
def _static_slices(shard: Shard, world: int) -> Slices:
    widths = tuple(local_size(parts_of(0, shard), rank, world) for rank in range(world))
    return Slices(widths, max(widths), len(set(widths)) == 1 and (shard.parts is None or len(shard.listed) == 1))


def dense(x: Tensor) -> Tensor:
    """Returns a contiguous tensor without lazy sign or conjugation: backends read raw memory."""
    return x.resolve_conj().resolve_neg().contiguous()


def _padded(x: Tensor, dim: int, width: int) -> Tensor:
    """Returns a tensor with zeros appended along `dim` up to `width`."""
    missing = width - x.shape[dim]
    return torch.cat([x, x.new_zeros(_with_size(x.shape, dim, missing))], dim) if missing else x


def _all_gather(x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor | Exchange:
    """Gathers the slices one after the other, and joins them along `dim` afterwards.

    A gather along dim 0 would transpose each slice before and the result after; a join copies rows.
    """
    assert isinstance(source, Shard)
    if group.size == 1:
        return _slice(x, source, I, group)
    slices, dim = _slices(source, group.size), source.dim
    sent = dense(_padded(x, dim, slices.width))

    def joined(received: Tensor) -> Tensor:
        if slices.even and dim == 0:
            return received
        pieces = received.unflatten(0, (group.size, sent.shape[0]))
        return join([pieces[r].narrow(dim, 0, n) for r, n in enumerate(slices.widths)], source).contiguous()

    if not sent.numel():
        return joined(sent.new_empty(group.size * sent.shape[0], *sent.shape[1:]))
    return Exchange("all_gather_single", sent, joined)


def _reduce_scatter(x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor | Exchange:
    assert isinstance(target, Shard)
    if group.size == 1:
        return _slice(x, source, I, group)
    slices, dim, dtype = _slices(target, group.size), target.dim, x.dtype
    x = summable(x.resolve_conj().resolve_neg())
    if slices.even and dim == 0:
        sent = x.contiguous()
    elif dim == 0 and len(set(slices.widths)) == 1:
        parts = parts_of(x.shape[dim], target)
        bounds = [found for rank in range(group.size) for found in ranges(parts, rank, group.size)]
        sent = torch.cat([x[start:stop] for start, stop in bounds])
    else:
        pieces = [_padded(split(x, target, r, group.size), dim, slices.width) for r in range(group.size)]
        sent = torch.stack(pieces).flatten(0, 1)

    def own(received: Tensor) -> Tensor:
        return received.narrow(dim, 0, slices.widths[group.rank]).contiguous().to(dtype)

    if not sent.numel():
        return own(sent.new_empty(sent.shape[0] // group.size, *sent.shape[1:]))
    return Exchange("reduce_scatter_single", sent, own)


def _all_to_all(x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor | Exchange:
    assert isinstance(source, Shard) and isinstance(target, Shard)
    if group.size == 1 or source.dim == target.dim:
        return _slice(x, source, I, group)
    sent = [split(x, target, r, group.size).contiguous() for r in range(group.size)]
    shapes = [_with_size(sent[group.rank].shape, source.dim, n) for n in _slices(source, group.size).widths]
    lengths = [math.prod(shape) for shape in shapes]

    def joined(received: Tensor) -> Tensor:
        pieces = zip(received.split(lengths), shapes, strict=True)
        return join([piece.view(shape) for piece, shape in pieces], source).contiguous()

    flat = torch.cat([piece.flatten() for piece in sent])
    sent_lengths = [math.prod(piece.shape) for piece in sent]  # torch.compile does not accept numel() of a dynamic size
    return Exchange("all_to_all_single", flat, joined, (lengths, sent_lengths))


def scatter_pieces(x: Tensor, src: int, dim: int, size: int, group: Group) -> Tensor:
    """Returns this rank's slice of rank `src`'s tensor along `dim`, which has global size `size`.

    On other ranks, `x` determines only shape and dtype.
    """
    if x.is_complex():
        return torch.view_as_complex(scatter_pieces(torch.view_as_real(dense(x)), src, dim, size, group))
    if group.size == 1:
        return copied(x)
    widths, width, _ = _slices(Shard(dim, ((size, 1),)), group.size)
    pieces = None
    if group.rank == src:
        pieces = [dense(_padded(split(x, Shard(dim), r, group.size), dim, width)) for r in range(group.size)]
    received = x.new_empty(_with_size(x.shape, dim, width))
    if received.numel():
        sent = None if pieces is None else [as_sent(piece) for piece in pieces]
        collective(group, dist.scatter, as_sent(received), sent, group_src=src)
    return received.narrow(dim, 0, widths[group.rank]).contiguous()


def gather_pieces(x: Tensor, dst: int, dim: int, size: int, group: Group) -> Tensor:
    """Returns all ranks' slices joined along `dim` on rank `dst`, an empty tensor elsewhere."""
    if x.is_complex():
        return torch.view_as_complex(gather_pieces(torch.view_as_real(dense(x)), dst, dim, size, group))
    if group.size == 1:
        return copied(x)
    widths, width, _ = _slices(Shard(dim, ((size, 1),)), group.size)
    sent = dense(_padded(x, dim, width))
    received = [torch.empty_like(sent) for _ in widths] if group.rank == dst else None
    if sent.numel():
        buffers = None if received is None else [as_sent(buffer) for buffer in received]
        collective(group, dist.gather, as_sent(sent), buffers, group_dst=dst)
    if received is None:
        return x.new_empty(_with_size(x.shape, dim, 0))
    slices = [padded.narrow(dim, 0, width) for padded, width in zip(received, widths, strict=True)]
    return join(slices, Shard(dim)).contiguous()


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


KERNELS: dict[str, Callable[[Tensor, Layout, Layout, Group], Tensor | Exchange]] = {
    "none": _none,
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_in_place,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
