"""Runs one rank's part of each conversion: its sent and received data, and its computation.

A kernel returns the result, or an `Exchange`: the data to send, and a function from received data
to the result. An exchange runs through torch.distributed (`start`), or through the functional
collectives that compilers know (`functional`).

Backends send contiguous memory in pieces of equal size. Therefore a kernel makes its tensor
contiguous, pads uneven slices to the largest, and cuts the received ones; every rank knows all
sizes from the layout. A result never shares memory with the input, because autograd and the user
may change either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import DistributedError
from torchshard.core.layouts import (
    I,
    Layout,
    Shard,
    join,
    local_size,
    parts_of,
    ranges,
    split,
    type_text,
    whole_shape,
    with_parts,
)
from torchshard.distributed.consistency import announces, note_unverified, verify_following_call
from torchshard.distributed.group import Group
from torchshard.distributed.memory import Call, ReduceKind, call_of, op_text
from torchshard.distributed.wire import Pending, collective, note


def convert(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group, of: str = "") -> Tensor:
    """Runs one conversion on this rank and waits."""
    return start(kernel, x, source, target, group, of).wait()


def gathered(x: Tensor, shard: Shard, shape: Sequence[int], group: Group) -> Tensor:
    """Gathers the full tensor of global `shape` from all ranks' slices."""
    return convert("all_gather", x, Shard(shard.dim, parts_of(shape[shard.dim], shard)), I, group)


def refuse_simulated(group: Group) -> None:
    """Checks that a group has processes.

    Raises:
        DistributedError: the group is simulated.
    """
    if group.simulated:
        raise DistributedError(
            "a graph that was made for simulated ranks can't communicate",
            where=f"rank {group.rank} of {group.size}",
            attempt="run it with torchshard.check, or shard the model in a process group",
        )


def start(
    kernel: str, x: Tensor, source: Layout, target: Layout, group: Group, of: str = "", *, eager: bool = False
) -> Pending:
    """Starts one conversion on this rank.

    Args:
        of: the call site of the forward conversion, if this is a gradient.
        eager: whether this is the gradient of an eager call.

    Raises:
        DistributedError: the group is simulated, or the ranks' calls differ.
    """
    refuse_simulated(group)
    source, target = with_parts(source, target, x.shape, group.size)
    if not announces(group):
        device = x.device if eager else None
        verify_following_call(group, lambda: _signature(kernel, x.dtype, x.shape, source, target), of, eager=device)
    made = KERNELS[kernel](x, source, target, group)
    if isinstance(made, Tensor):
        return Pending(lambda: made)
    if group.memory is not None:
        note(group, _announced(kernel, x.dtype, x.shape, source, target))
    return begun(made, group)


def own_part(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor | Exchange:
    """Runs a conversion's kernel: returns the result, or an exchange that computes it."""
    source, target = with_parts(source, target, x.shape, group.size)
    return KERNELS[kernel](x, source, target, group)


def functional(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group) -> tuple[Tensor, Result]:
    """Starts one conversion through PyTorch's functional collectives, without verification.

    Returns:
        the tensor for `wait_tensor`, and the function from its result to the conversion's result.
    """
    in_place = "all_reduce_" if kernel == "all_reduce" else kernel  # the functional collective copies its input
    made = own_part(in_place, x, source, target, group)
    if isinstance(made, Tensor):
        return made, lambda received: received
    # `_c10d_functional`: compilers know these operators, which have no public namespace (PyTorch 2.13.0).
    op = getattr(torch.ops._c10d_functional, _FUNCTIONAL[made.collective])
    sent, dtype, name = made.sent, made.sent.dtype, _group_name(group)
    if made.collective == "all_reduce":
        return op(sent, "sum", name), made.result
    if made.collective == "reduce_scatter_single":
        return op(sent, "sum", group.size, name), made.result
    more = (group.size,) if made.lengths is None else made.lengths
    return op(as_sent(sent), *more, name), lambda received: made.result(_of_dtype(received, dtype))


def functional_max(x: Tensor, group: Group) -> Tensor:
    """Starts the elementwise maximum over the ranks through PyTorch's functional collectives."""
    if group.size == 1:
        return copied(x)
    # `_c10d_functional`: an operator, so a compiler's graph can have it (PyTorch 2.13.0).
    result: Tensor = torch.ops._c10d_functional.all_reduce(dense(x), "max", _group_name(group))
    return result


def _group_name(group: Group) -> str:
    return group.name if group.process_group is None else group.process_group.group_name


def _of_dtype(received: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns received data in its own dtype instead of the one of `as_sent`."""
    return received if received.dtype is dtype else received.view(dtype)


def _signature(kernel: str, dtype: torch.dtype, shape: torch.Size, source: Layout, target: Layout) -> str:
    """Returns a conversion's text with the global shape, which is equal on all ranks."""
    what = {"none": "no communication", "slice": "own slice", "pad": "zeros around"}.get(kernel, kernel)
    return f"{what}, {source} -> {target}, of {type_text(dtype, whole_shape(shape, source))}"


@lru_cache(maxsize=4096)
def _announced(kernel: str, dtype: torch.dtype, shape: torch.Size, source: Layout, target: Layout) -> Call:
    return call_of(_signature(kernel, dtype, shape, source, target))


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


_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single",
}
"""A torch.distributed function -> its functional operator."""


def begun(exchange: Exchange, group: Group) -> Pending:
    """Starts a collective of torch.distributed."""
    sent, received = exchange.sent, exchange.received(group.size)
    result, fn = partial(exchange.result, received), getattr(dist, exchange.collective)
    if exchange.collective == "all_reduce":
        return Pending.of(result, group, fn, sent)
    if exchange.collective == "reduce_scatter_single":
        return Pending.of(result, group, fn, received, sent)
    return Pending.of(result, group, fn, as_sent(received), as_sent(sent), *(exchange.lengths or ()))


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
    ((count, _), *_) = shard.parts or ((0, 1),)
    if isinstance(count, torch.SymInt):  # a SymInt has no hash; a dynamic size is in equal slices
        return Slices((count // world,) * world, count // world, even=True)
    return _static_slices(shard, world)


@lru_cache(maxsize=4096)
def _static_slices(shard: Shard, world: int) -> Slices:
    widths = tuple(local_size(parts_of(0, shard), rank, world) for rank in range(world))
    return Slices(widths, max(widths), len(set(widths)) == 1 and (shard.parts is None or len(shard.parts) == 1))


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
