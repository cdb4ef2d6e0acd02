"""What one rank does in each kind of collective. Every tensor is made contiguous first; results never alias inputs.

A kernel starts to communicate and says how the result is made of what comes: a `Pending`, to be waited for at once or
later. Pieces of different sizes are padded to the largest, sent, and cut back: every rank knows all sizes from the
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import DistributedError
from torchshard.core.layouts import Layout, Shard, join, local_size, parts_of, ranges, split, type_text, whole_shape
from torchshard.distributed.consistency import verify_following_call
from torchshard.distributed.group import Group
from torchshard.distributed.wire import Pending, collective


def convert(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group, of: str = "") -> Tensor:
    """Runs one conversion on this rank."""
    return start(kernel, x, source, target, group, of).wait()


def start(
    kernel: str, x: Tensor, source: Layout, target: Layout, group: Group, of: str = "", *, eager: bool = False
) -> Pending:
    """Starts one conversion on this rank.

    Args:
        of: where the conversion was made whose gradient this is.
        eager: whether it is the gradient of an eager call.

    Raises:
        DistributedError: the group is a simulated one, or the ranks' calls differ.
    """
    if group.simulated:
        raise DistributedError(
            "a graph that was made for simulated ranks can't communicate",
            where=f"rank {group.rank} of {group.size}",
            attempt="run it with torchshard.check, or shard the model in a process group",
        )
    verify_following_call(group, lambda: _said(kernel, x, source, target), of, eager=eager)
    return _KERNELS[kernel](x, source, target, group)


def _said(kernel: str, x: Tensor, source: Layout, target: Layout) -> str:
    """A conversion as it is the same on all ranks: with the global shape."""
    what = {"none": "no communication", "slice": "own slice", "pad": "zeros around"}.get(kernel, kernel)
    return f"{what}, {source} -> {target}, of {type_text(x.dtype, whole_shape(x.shape, source))}"


def copied(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def _none(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    held = x.clone()
    return Pending(lambda: held)


def _all_reduce(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    return reducing(copied(x), dist.ReduceOp.SUM, group)


def reducing(held: Tensor, op: Any, group: Group) -> Pending:
    """All-reduce in place of a contiguous tensor."""
    if group.size == 1 or not held.numel():
        return Pending(lambda: held)
    if held.dtype in _SUMMED_AS:
        summed = held.to(_SUMMED_AS[held.dtype])
        return Pending.of(lambda: held.copy_(summed), group, dist.all_reduce, summed, op=op)
    return Pending.of(lambda: held, group, dist.all_reduce, held, op=op)


_SUMMED_AS = {
    torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32, torch.float8_e5m2fnuz: torch.float32,
}  # fmt: skip
"""Dtypes that backends can't reduce -> those that they are reduced in."""
_SENT_AS = {
    torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.uint8
    ),
}  # fmt: skip
"""Dtypes that backends can't send -> those of as many bytes that they are sent as; nobody computes with them."""


def summable(x: Tensor) -> Tensor:
    """In a dtype that backends reduce."""
    return x.to(_SUMMED_AS.get(x.dtype, x.dtype))


def as_sent(x: Tensor) -> Tensor:
    """The same memory, of a dtype that backends send."""
    return x.view(_SENT_AS[x.dtype]) if x.dtype in _SENT_AS else x


def reduced(x: Tensor, op: object, group: Group) -> Tensor:
    """All-reduce of a copy."""
    verify_following_call(group, lambda: f"all_reduce, {op_name(op)}, of {type_text(x.dtype, x.shape)}")
    return reducing(copied(x), op, group).wait()


def op_name(op: object) -> str:
    """'SUM' for torch.distributed's ReduceOp.SUM."""
    return str(op).rpartition(".")[2]


def _slice(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    held = copied(split(x, target, group.rank, group.size))
    return Pending(lambda: held)


def _pad(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    assert isinstance(source, Shard)
    parts = parts_of(0, source)
    whole = x.new_zeros(whole_shape(x.shape, source))
    at = 0
    for begin, end in ranges(parts, group.rank, group.size):
        whole.narrow(source.dim, begin, end - begin).copy_(x.narrow(source.dim, at, end - begin))
        at += end - begin
    return Pending(lambda: whole)


class Slices(NamedTuple):
    """How many elements of a dim each rank holds."""

    widths: tuple[int, ...]
    width: int
    """The largest of them."""
    even: bool
    """Whether they are alike, and one after the other the whole."""


@lru_cache(maxsize=4096)
def _slices(shard: Shard, world: int) -> Slices:
    widths = tuple(local_size(parts_of(0, shard), rank, world) for rank in range(world))
    return Slices(widths, max(widths), len(set(widths)) == 1 and (shard.parts is None or len(shard.parts) == 1))


def dense(x: Tensor) -> Tensor:
    """Contiguous, with no sign or conjugation left to do: a backend reads the memory as it is."""
    return x.resolve_conj().resolve_neg().contiguous()


def _filled(x: Tensor, dim: int, width: int) -> Tensor:
    """A dim filled up with zeros to `width`."""
    missing = width - x.shape[dim]
    return torch.cat([x, x.new_zeros(_with_size(x.shape, dim, missing))], dim) if missing else x


def _all_gather(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    """Slices are sent as they lie in memory: joining them copies rows, where gathering along dim 0 would transpose."""
    assert isinstance(source, Shard)
    if group.size == 1:
        return _none(x, source, target, group)
    slices, dim = _slices(source, group.size), source.dim
    sent = dense(_filled(x, dim, slices.width))
    got = sent.new_empty(group.size, *sent.shape)

    def joined() -> Tensor:
        if slices.even and dim == 0:
            return got.flatten(0, 1)
        return join([got[r].narrow(dim, 0, n) for r, n in enumerate(slices.widths)], source).contiguous()

    if not sent.numel():
        return Pending(joined)
    return Pending.of(joined, group, dist.all_gather_single, as_sent(got.flatten(0, 1)), as_sent(sent))


def _reduce_scatter(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    assert isinstance(target, Shard)
    if group.size == 1:
        return _none(x, source, target, group)
    if x.dtype in _SUMMED_AS:
        pending = _reduce_scatter(x.to(_SUMMED_AS[x.dtype]), source, target, group)
        return pending._replace(result=lambda: pending.result().to(x.dtype))
    slices, dim = _slices(target, group.size), target.dim
    x = x.resolve_conj().resolve_neg()
    if slices.even and dim == 0:
        sent = x.contiguous().unflatten(0, (group.size, slices.width))
    else:
        sent = torch.stack([_filled(split(x, target, r, group.size), dim, slices.width) for r in range(group.size)])
    got = torch.empty_like(sent[0])

    def own() -> Tensor:
        return got.narrow(dim, 0, slices.widths[group.rank]).contiguous()

    if not sent.numel():
        return Pending(own)
    return Pending.of(own, group, dist.reduce_scatter_single, got, sent.flatten(0, 1))


def _all_to_all(x: Tensor, source: Layout, target: Layout, group: Group) -> Pending:
    assert isinstance(source, Shard) and isinstance(target, Shard)
    if group.size == 1 or source.dim == target.dim:
        return _none(x, source, target, group)
    sent = [split(x, target, r, group.size).contiguous() for r in range(group.size)]
    shapes = [_with_size(sent[group.rank].shape, source.dim, n) for n in _slices(source, group.size).widths]
    lengths = [torch.Size(s).numel() for s in shapes]
    got, flat = x.new_empty(sum(lengths)), torch.cat([p.flatten() for p in sent])

    def joined() -> Tensor:
        return join([p.view(s) for p, s in zip(got.split(lengths), shapes, strict=True)], source).contiguous()

    own = [p.numel() for p in sent]
    return Pending.of(joined, group, dist.all_to_all_single, as_sent(got), as_sent(flat), lengths, own)


def scatter_pieces(x: Tensor, src: int, dim: int, size: int, group: Group) -> Tensor:
    """This rank's slice along `dim`, of `size` elements in all, of rank `src`'s tensor; the others' is not read."""
    if x.is_complex():
        return torch.view_as_complex(scatter_pieces(torch.view_as_real(dense(x)), src, dim, size, group))
    if group.size == 1:
        return copied(x)
    widths, width, _ = _slices(Shard(dim, ((size, 1),)), group.size)
    pieces = None
    if group.rank == src:
        pieces = [dense(_filled(split(x, Shard(dim), r, group.size), dim, width)) for r in range(group.size)]
    got = x.new_empty(_with_size(x.shape, dim, width))
    if got.numel():
        sent = None if pieces is None else [as_sent(piece) for piece in pieces]
        collective(group, dist.scatter, as_sent(got), sent, group_src=src)
    return got.narrow(dim, 0, widths[group.rank]).contiguous()


def gather_pieces(x: Tensor, dst: int, dim: int, size: int, group: Group) -> Tensor:
    """All ranks' slices along `dim` joined on rank `dst`; elsewhere nothing along it."""
    if x.is_complex():
        return torch.view_as_complex(gather_pieces(torch.view_as_real(dense(x)), dst, dim, size, group))
    if group.size == 1:
        return copied(x)
    widths, width, _ = _slices(Shard(dim, ((size, 1),)), group.size)
    sent = dense(_filled(x, dim, width))
    got = [torch.empty_like(sent) for _ in widths] if group.rank == dst else None
    if sent.numel():
        collective(group, dist.gather, as_sent(sent), None if got is None else list(map(as_sent, got)), group_dst=dst)
    if got is None:
        return x.new_empty(_with_size(x.shape, dim, 0))
    return join([g.narrow(dim, 0, n) for g, n in zip(got, widths, strict=True)], Shard(dim)).contiguous()


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
