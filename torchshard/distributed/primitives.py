"""`torch.distributed`'s primitives on the model-parallel group; `src` and `dst` are ranks in it.

Unlike in `torch.distributed`, each has a gradient: the primitive in the other direction. A rank in
a forward must also take part in the backward. Inputs may be non-contiguous. If a tensor requires no
gradient, or under `torch.no_grad`, a call fills the same tensors as `torch.distributed` does, and
returns them. Outside any group, a call behaves as in a group of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torchshard.core.errors import InputError
from torchshard.core.layouts import type_text
from torchshard.distributed import collectives
from torchshard.distributed.consistency import forward_site, needs_verification, verify_call, verify_following_call
from torchshard.distributed.eager import check_memory, fill, needs_gradient, own_dim, verify_tensor_call, whole_size
from torchshard.distributed.group import Group, own_group, peer
from torchshard.distributed.kernels import as_sent, copied, gather_pieces, reduced, scatter_pieces, summable
from torchshard.distributed.memory import ReduceKind, op_text
from torchshard.distributed.wire import Handle, collective


class _Paired(torch.autograd.Function):
    """A primitive `there` with `back` as its gradient; both are functions of a tensor."""

    what: str
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    group: Group
    site: str

    @staticmethod
    def forward(
        ctx: _Paired,
        x: Tensor,
        what: str,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
        group: Group,
    ) -> Tensor:
        ctx.what, ctx.there, ctx.back, ctx.group = what, there, back, group
        ctx.site = forward_site(group)
        return there(x)

    @staticmethod
    def backward(ctx: _Paired, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        what = f"the gradient of {ctx.what}"
        verify_following_call(ctx.group, lambda: what, ctx.site, eager=grad.device)
        # `apply` again, so that the gradient has a gradient too
        return _Paired.apply(grad, what, ctx.back, ctx.there, ctx.group), None, None, None, None


def _paired(
    x: Tensor, group: Group, what: str, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    if not needs_gradient(x):
        return there(x)
    return _Paired.apply(x, f"{what} of {type_text(x.dtype, [])}", there, back, group)


# --- one to all, all to one ------------------------------------------------------------------------------------------


def broadcast(x: Tensor, src: int = 0) -> Tensor:
    """Returns rank `src`'s tensor on every rank.

    All ranks' gradients are summed on `src`; the other ranks' inputs get zeros. If `x` requires no
    gradient, fills `x` and returns it, like `torch.distributed.broadcast`.

    Args:
        x: of the same shape and dtype on every rank.

    Raises:
        InputError: `x` would be filled, but its elements share memory (`expand`).
    """
    group = own_group()
    verify_tensor_call(group, "broadcast", x, valid=lambda: _check_filled(x, src=src), src=src)
    if not needs_gradient(x):
        return fill(x, _broadcast(x, src, group))
    what = f"broadcast(src={src}), {tuple(x.shape)}"
    return _paired(x, group, what, lambda v: _broadcast(v, src, group), lambda g: _sum_to(g, src, group))


def reduce_to(x: Tensor, dst: int = 0, op: ReduceKind = ReduceOp.SUM) -> Tensor:
    """Returns the sum (or another `op`) over the ranks on rank `dst`, zeros on the others.

    The gradient of a sum is `dst`'s gradient, on all ranks. If `x` requires no gradient, fills
    `dst`'s tensor and returns it, like `torch.distributed.reduce`; the others' are unchanged.

    Raises:
        InputError: `x` requires a gradient, and `op` has none.
    """
    group = own_group()
    verify_tensor_call(group, "reduce_to", x, valid=lambda: _check_op(x, op, dst=dst), dst=dst, op=op_text(op))
    result = _reduced_to(x, dst, op, group)
    return result if needs_gradient(x) or group.rank != dst else fill(x, result)


def _reduced_to(x: Tensor, dst: int, op: ReduceKind, group: Group) -> Tensor:
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        x = x if op == ReduceOp.SUM else x / group.size
        what = f"reduce_to(dst={dst}), {tuple(x.shape)}"
        return _paired(x, group, what, lambda v: _sum_to(v, dst, group), lambda g: _broadcast(g, dst, group))
    whole = _all_reduced(x, op, group)
    return whole if group.rank == dst else torch.zeros_like(whole)


def _check_filled(x: Tensor, *, src: int) -> None:
    peer(own_group(), src, "src")
    if not needs_gradient(x):
        check_memory("broadcast", x)


def _broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    result = copied(x)
    if group.size > 1:
        collective(group, dist.broadcast, as_sent(result), group_src=src)
    return result


def _sum_to(x: Tensor, dst: int, group: Group) -> Tensor:
    total = summable(copied(x))
    if group.size > 1:
        collective(group, dist.reduce, total, group_dst=dst)
    # backends leave partial sums on the other ranks; zeros prevent their use
    return total.to(x.dtype) if group.rank == dst else torch.zeros_like(x, memory_format=torch.contiguous_format)


@overload
def all_reduce(x: Tensor, op: ReduceKind = ReduceOp.SUM, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(x: Tensor, op: ReduceKind = ReduceOp.SUM, *, async_op: Literal[True]) -> Handle: ...
def all_reduce(x: Tensor, op: ReduceKind = ReduceOp.SUM, *, async_op: bool = False) -> Tensor | Handle:
    """Returns the sum, `AVG`, `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR` or `BXOR` over the ranks.

    The gradient of a sum is the sum of all ranks' gradients (P -> R), of a mean their mean; the
    others are not differentiable. If `x` requires no gradient, fills `x` and returns it, like
    `torch.distributed.all_reduce`.

    Args:
        async_op: returns a Handle; for sums only.

    Raises:
        InputError: `x` requires a gradient, and `op` has none; a mean of integers; async_op with
            an op other than SUM.
    """
    if op == ReduceOp.SUM:
        return collectives.all_reduce(x, async_op=True) if async_op else collectives.all_reduce(x)
    group = own_group()
    verify_tensor_call(group, "all_reduce", x, valid=lambda: _check_op(x, op, async_op=async_op), op=op_text(op))
    result = _all_reduced(x, op, group)
    return result if needs_gradient(x) else fill(x, result)


def _all_reduced(x: Tensor, op: ReduceKind, group: Group) -> Tensor:
    if op != ReduceOp.AVG:
        return reduced(x, op, group)

    def mean(value: Tensor) -> Tensor:
        return reduced(value, ReduceOp.SUM, group) / group.size

    return _paired(x, group, f"all_reduce(op=AVG), {tuple(x.shape)}", mean, mean)


def _check_op(x: Tensor, op: ReduceKind, *, async_op: bool = False, dst: int = 0) -> None:
    peer(own_group(), dst, "dst")
    if async_op:
        raise InputError(
            f"{op_text(op)} over the ranks has no asynchronous form",
            where="all_reduce(async_op=True)",
            attempt="ReduceOp.SUM",
        )
    if op == ReduceOp.AVG and not (x.is_floating_point() or x.is_complex()):
        raise InputError(
            f"the mean of {x.dtype} is not supported",
            where="op=ReduceOp.AVG",
            why="it would be cut to integers",
            attempt="x.float()",
        )
    if op not in (ReduceOp.SUM, ReduceOp.AVG) and needs_gradient(x):
        raise InputError(
            f"{op_text(op)} over the ranks has no gradient here",
            where="op=",
            why="the tensor requires one",
            attempt="x.detach(), or ReduceOp.SUM or AVG",
        )


# --- pieces ----------------------------------------------------------------------------------------------------------


def gather_to(x: Tensor, dst: int = 0, dim: int = -1) -> Tensor:
    """Returns all ranks' slices joined along `dim` on rank `dst`; on others, size 0 along `dim`.

    Backward scatters the gradient from `dst`. The slices must form a split, as in `gather`.
    """
    group = own_group()
    sizes = verify_tensor_call(group, "gather_to", x, dim, lambda: peer(group, dst, "dst"), dst=dst, size=None)
    own, size = own_dim(x, dim), whole_size("gather_to", x, dim, None, sizes, group)
    return _paired(
        x,
        group,
        f"gather_to(dst={dst}, dim={own}), {[*x.shape[:own], size, *x.shape[own + 1 :]]}",
        lambda v: gather_pieces(v, dst, own, size, group),
        lambda g: scatter_pieces(g, dst, own, size, group),
    )


def scatter_from(x: Tensor, src: int = 0, dim: int = -1) -> Tensor:
    """Returns this rank's slice along `dim` of rank `src`'s tensor.

    Backward gathers the gradient on `src`; the other ranks' inputs get zeros.

    Args:
        x: of the same shape and dtype on every rank.
    """
    group = own_group()
    verify_tensor_call(group, "scatter_from", x, valid=lambda: peer(group, src, "src"), to_dim=dim, src=src)
    own, size = own_dim(x, dim), x.shape[dim]

    shape = x.shape

    def back(grad: Tensor) -> Tensor:
        whole = gather_pieces(grad, src, own, size, group)
        return whole if group.rank == src else grad.new_zeros(shape)

    what = f"scatter_from(src={src}, dim={own}), {tuple(shape)}"
    return _paired(x, group, what, lambda v: scatter_pieces(v, src, own, size, group), back)


def barrier() -> None:
    """Waits for all ranks of the group."""
    group = own_group()
    if needs_verification(group, group.handshake.verified_calls, "barrier", torch.device("cpu")):
        verify_call(group, lambda: "barrier()", symmetric=True)
    if group.size > 1:
        only_nccl = dist.get_backend(group.process_group) == "nccl"  # otherwise NCCL guesses the device
        collective(group, dist.barrier, **({"device_ids": [torch.cuda.current_device()]} if only_nccl else {}))
