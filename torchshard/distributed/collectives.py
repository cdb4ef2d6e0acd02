"""The conversions by hand, on this process's model-parallel group; outside any group all of them give their input.

    y = copy(x)                 # I -> R   forward nothing,        backward all-reduce
    y = reduce(x)               # P -> I   forward all-reduce,     backward nothing
    y = gather(x, dim)          # S -> I   forward all-gather,     backward keep own slice
    y = scatter(x, dim)         # I -> S   forward keep own slice, backward all-gather

A dim that does not divide by the group is split by `torch.chunk`'s rule. The calls that begin from a Shard ask the
ranks for its global size, in one small message; pass `size=` where it is known. With `async_op=True` a call gives a
`Handle`, whose `wait()` gives the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.distributed.groups import MODEL, Group, communication_device, is_initialized, lookup
from torchshard.distributed.kernels import Handle, Pending, reducing
from torchshard.distributed.ops import begin
from torchshard.errors import InputError
from torchshard.layouts import local_size

_ops = torch.ops.torchshard


def copy(x: Tensor, *, async_op: bool = False) -> Any:
    """I -> R: the same value; the gradients of all ranks are summed.

    Source: Megatron's `copy_to_tensor_model_parallel_region`.
    """
    return _call("copy", x, (), async_op)


def reduce(x: Tensor, *, async_op: bool = False) -> Any:
    """P -> I: the sum over the ranks; the gradient passes.

    Where no gradient is asked it sums in place and gives `x` itself; where one is, `x` stays as it is.

    Raises:
        InputError: `x` is to be summed in place, and several of its elements are one in memory (an `expand`).

    Source: Megatron's `reduce_from_tensor_model_parallel_region`.
    """
    if not is_initialized() or (torch.is_grad_enabled() and x.requires_grad):
        return _call("reduce", x, (), async_op)
    handle = _reduce_in_place(x, lookup(MODEL))
    return handle if async_op else handle.wait()


def _reduce_in_place(x: Tensor, group: Group) -> Handle:
    if x.is_contiguous():
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)  # a backward that has kept x must say that it was changed
        return Handle(reducing(x, dist.ReduceOp.SUM, group))
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise InputError(
            "a tensor can't be summed in place where several of its elements are one in memory",
            where="reduce",
            why=f"its shape is {tuple(x.shape)}, its strides are {x.stride()}",
            attempt="reduce(x.contiguous())",
        )
    pending = reducing(x.contiguous(), dist.ReduceOp.SUM, group)
    return Handle(Pending(pending.work, lambda: x.copy_(pending.finish())))


def all_reduce(x: Tensor, *, async_op: bool = False) -> Any:
    """P -> R: the sum over the ranks; the gradients of all ranks are summed too."""
    return _call("all_reduce", x, (), async_op)


def scatter(x: Tensor, dim: int | None = -1, *, async_op: bool = False) -> Any:
    """I -> S(dim): this rank's slice; the gradient is gathered. `dim=None` splits nothing.

    [6, 8] over two ranks gives [3, 8] for `dim=0` and [6, 4] for `dim=-1`.
    """
    return _call("scatter", x, _end(x, dim), async_op) if dim is not None else _same(x, async_op)


def narrow(x: Tensor, dim: int = -1, *, async_op: bool = False) -> Any:
    """R -> S(dim): this rank's slice; the gradient is padded with zeros, an addend of the whole."""
    return _call("narrow", x, _end(x, dim), async_op)


def gather(x: Tensor, dim: int | None = -1, *, size: int | None = None, async_op: bool = False) -> Any:
    """S(dim) -> I: all ranks' slices joined; this rank keeps its slice of the gradient. `dim=None` joins nothing.

    [6, 8] on each of two ranks gives [12, 8] for `dim=0` and [6, 16] for `dim=-1`.

    Args:
        size: the global size of the dim, where it is known; else the ranks tell each other theirs.

    Raises:
        InputError: the ranks' sizes are not those of a split.
    """
    return _call("gather", x, _beginning(x, dim, size), async_op) if dim is not None else _same(x, async_op)


def all_gather(x: Tensor, dim: int = -1, *, size: int | None = None, async_op: bool = False) -> Any:
    """S(dim) -> R: all ranks' slices joined; the gradients are summed and scattered.

    Args:
        size: as in `gather`.
    """
    return _call("all_gather", x, _beginning(x, dim, size), async_op)


def reduce_scatter(x: Tensor, dim: int = -1, *, async_op: bool = False) -> Any:
    """P -> S(dim): this rank's slice of the sum over the ranks; the gradient is gathered."""
    return _call("reduce_scatter", x, _end(x, dim), async_op)


def all_to_all(x: Tensor, dim: int, to_dim: int, *, size: int | None = None, async_op: bool = False) -> Any:
    """S(dim) -> S(to_dim): split along another dim; the gradient goes the way back.

    Args:
        size: as in `gather`.
    """
    return _call("all_to_all", x, (*_beginning(x, dim, size), *_end(x, to_dim)), async_op)


def _call(name: str, x: Tensor, args: tuple[Any, ...], async_op: bool) -> Any:
    if not is_initialized():
        return _same(x, async_op)
    op = getattr(_ops, name).default
    return begin(op, x, *args, MODEL) if async_op else op(x, *args, MODEL)


def _same(x: Tensor, async_op: bool) -> Any:
    return Handle(Pending(None, lambda: x)) if async_op else x


def _end(x: Tensor, dim: int) -> tuple[int, list[int]]:
    """The split that a call leads to: (dim, parts)."""
    own = own_dim(x, dim)
    return own, [x.shape[own], 1]


def _beginning(x: Tensor, dim: int, size: int | None) -> tuple[int, list[int]]:
    """The split that a call begins from, with its global size."""
    own = own_dim(x, dim)
    if not is_initialized():
        return own, [x.shape[own], 1]
    return own, [global_size(x, own, lookup(MODEL)) if size is None else size, 1]


def own_dim(x: Tensor, dim: int) -> int:
    """A dim counted from the front.

    Raises:
        InputError: the tensor has no such dim.
    """
    if not -x.ndim <= dim < x.ndim:
        raise InputError(
            f"a tensor of {x.ndim} dims has no dim {dim}",
            where="dim=",
            why=f"its shape is {tuple(x.shape)}",
            attempt=f"{-x.ndim} to {x.ndim - 1}" if x.ndim else "a tensor with dims, or dim=None where that is allowed",
        )
    return dim % x.ndim


def global_size(x: Tensor, dim: int, group: Group) -> int:
    """The size along a dim of all ranks' slices together, which the ranks tell each other.

    Raises:
        InputError: the ranks' sizes are not those of a split.
    """
    if group.size == 1 or torch.compiler.is_compiling():
        return int(x.shape[dim] * group.size)
    device = communication_device(group)
    sizes = torch.empty(group.size, dtype=torch.int64, device=device)
    mine = torch.tensor([x.shape[dim]], dtype=torch.int64, device=device)
    dist.all_gather_single(sizes, mine, group=group.process_group)
    held = sizes.tolist()
    expected = [local_size([(sum(held), 1)], rank, group.size) for rank in range(group.size)]
    if held != expected:
        raise InputError(
            f"slices of sizes {held} are of no split of {sum(held)} over {group.size} ranks",
            where=f"dim {dim}",
            why=f"torch.chunk's rule, by which scatter splits, gives {expected}",
            attempt="slices that scatter made; all_gather_uneven for tensors of any shapes",
        )
    return sum(held)
