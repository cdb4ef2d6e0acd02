"""`torch.distributed`'s primitives on this process's model-parallel group; `src` and `dst` are ranks in the group.

Where the mathematics is, they are differentiable: the gradient of each is the primitive that goes the other way. A rank
that takes part in a forward must take part in the backward too. Tensors are made contiguous on the way in, and no
result shares memory with an input. Alone, or outside any group, a call does what a group of one would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torchshard.distributed import collectives
from torchshard.distributed.collectives import global_size, own_dim
from torchshard.distributed.groups import Group, own_group, peer
from torchshard.distributed.kernels import Handle, Pending, gather_pieces, reduced, scatter_pieces
from torchshard.errors import InputError


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class _Linear(torch.autograd.Function):
    """A primitive and the one that goes the other way, as functions of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Linear.apply(grad, ctx.back, ctx.there), None, None


def _linear(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    made: Tensor = _Linear.apply(x, there, back)
    return made


# --- one to all, all to one ------------------------------------------------------------------------------------------


def broadcast(x: Tensor, src: int = 0) -> Tensor:
    """Rank `src`'s tensor, on every rank; the gradients of all ranks are summed on `src`, the others' inputs get zeros.

    Args:
        x: of the same shape and dtype on every rank.
    """
    group = own_group()
    src = peer(group, src, "src")
    return _linear(x, lambda v: _broadcast(v, src, group), lambda g: _sum_to(g, src, group))


def reduce_to(x: Tensor, dst: int = 0, op: Any = ReduceOp.SUM) -> Tensor:
    """The sum (or another `op`) over the ranks on rank `dst`, zeros on the others; a sum's gradient is `dst`'s, on all.

    Raises:
        InputError: `op` has no gradient, and one is asked.
    """
    group = own_group()
    dst = peer(group, dst, "dst")
    if op == ReduceOp.SUM:
        return _linear(x, lambda v: _sum_to(v, dst, group), lambda g: _broadcast(g, dst, group))
    whole: Tensor = all_reduce(x, op)
    return whole if group.rank == dst else torch.zeros_like(whole)


def _broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    held = _dense(x)
    if group.size > 1:
        dist.broadcast(held, group_src=src, group=group.process_group)
    return held


def _sum_to(x: Tensor, dst: int, group: Group) -> Tensor:
    held = _dense(x)
    if group.size > 1:
        dist.reduce(held, group_dst=dst, group=group.process_group)
    return held if group.rank == dst else torch.zeros_like(held)


def all_reduce(x: Tensor, op: Any = ReduceOp.SUM, *, async_op: bool = False) -> Any:
    """The sum over the ranks, or `AVG`, `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`, `BXOR`, on every rank.

    The gradient of a sum is the sum of all ranks' gradients (P -> R), of a mean their mean; the others have none.

    Args:
        async_op: gives a Handle; of a sum alone.

    Raises:
        InputError: `op` has no gradient, and one is asked; it is a mean of integers; or async_op is asked of it.
    """
    group = own_group()
    if op == ReduceOp.SUM:
        return collectives.all_reduce(x, async_op=async_op)
    if async_op:
        raise InputError(
            f"{op} over the ranks has no asynchronous form", where="all_reduce(async_op=True)", attempt="ReduceOp.SUM"
        )
    if op == ReduceOp.AVG:
        return _mean(x, group)
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{op} over the ranks has no gradient here",
            where="all_reduce",
            why="the tensor requires one",
            attempt="x.detach(), or ReduceOp.SUM or AVG",
        )
    return reduced(x, op, group)


def _mean(x: Tensor, group: Group) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        raise InputError(
            f"the mean of {x.dtype} is none",
            where="all_reduce(op=AVG)",
            why="it would be cut to integers",
            attempt="x.float()",
        )

    def mean(value: Tensor) -> Tensor:
        return reduced(value, ReduceOp.SUM, group) / group.size

    return _linear(x, mean, mean)


# --- pieces ----------------------------------------------------------------------------------------------------------


def gather_to(x: Tensor, dst: int = 0, dim: int = -1) -> Tensor:
    """All ranks' slices joined along `dim` on rank `dst`; on the others a tensor with no elements along it.

    The gradient is scattered from `dst`. The slices are those of a split, as in `gather`.
    """
    group, own = own_group(), own_dim(x, dim)
    dst = peer(group, dst, "dst")
    size = global_size(x, own, group)
    return _linear(
        x,
        lambda v: gather_pieces(v, dst, own, size, group),
        lambda g: scatter_pieces(g, dst, own, size, group),
    )


def scatter_from(x: Tensor, src: int = 0, dim: int = -1) -> Tensor:
    """This rank's slice along `dim` of rank `src`'s tensor; the gradient is gathered on `src`, the others' get zeros.

    Args:
        x: of the same shape and dtype on every rank.
    """
    group, own = own_group(), own_dim(x, dim)
    src, size = peer(group, src, "src"), x.shape[own]

    def back(grad: Tensor) -> Tensor:
        whole = gather_pieces(grad, src, own, size, group)
        return whole if group.rank == src else grad.new_zeros(x.shape)

    return _linear(x, lambda v: scatter_pieces(v, src, own, size, group), back)


def barrier() -> None:
    """Waits for all ranks of the group."""
    group = own_group()
    if group.size > 1:
        dist.barrier(group=group.process_group)


# --- point to point --------------------------------------------------------------------------------------------------


def isend(x: Tensor, dst: int) -> Handle:
    """Begins to send a copy of a tensor to a rank of the group; `wait()` gives the tensor that was sent."""
    group, held = own_group(), _dense(x.detach())
    work = dist.isend(held, group_dst=_other(group, dst, "dst"), group=group.process_group)
    return Handle(Pending(work, lambda: held))


def irecv(like: Tensor | Sequence[int], src: int, dtype: torch.dtype | None = None) -> Handle:
    """Begins to receive a tensor from a rank of the group; `wait()` gives it.

    Args:
        like: a tensor of the shape, dtype and device that are sent, which stays as it is; or the shape.
        dtype: with a shape; by default torch's.
    """
    group = own_group()
    held = (
        torch.empty_like(like, memory_format=torch.contiguous_format).detach()
        if isinstance(like, Tensor)
        else torch.empty(tuple(like), dtype=dtype)
    )
    work = dist.irecv(held, group_src=_other(group, src, "src"), group=group.process_group)
    return Handle(Pending(work, lambda: held))


def send(x: Tensor, dst: int) -> None:
    """Sends a tensor to a rank of the group, which must receive it."""
    isend(x, dst).wait()


def recv(like: Tensor | Sequence[int], src: int, dtype: torch.dtype | None = None) -> Tensor:
    """Receives a tensor from a rank of the group.

    Args:
        like, dtype: as in `irecv`.
    """
    return irecv(like, src, dtype).wait()


def _other(group: Group, rank: int, name: str) -> int:
    if peer(group, rank, name) == group.rank:
        raise InputError(
            "a rank can't send to itself",
            where=f"{name}={rank}",
            why=f"this process is rank {group.rank} of {group.size}",
            attempt="another rank",
        )
    return rank
