"""Kernels of the operators that send rows to the ranks of their experts, and back.

    dispatch(x, sent, received, rows, group)     f32[6,8] -> f32[u,8]     each expert's rows, of all ranks
    combine(x, sent, received, rows, group)      f32[u,8] -> f32[6,8]     the rows as they were

Each is the gradient of the other. Rows are in the order of their experts before and after, and each
rank has consecutive experts. `sent` [experts] counts a rank's own rows for each expert, `received`
[own experts, ranks] the rows for each of its experts from each rank. The number of received rows is
known only at the call: `rows` is a size that an earlier call of a graph has found, or None.

Source: Megatron-LM's token dispatcher by all-to-all (`MoEAlltoAllTokenDispatcher`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from torchshard.core.layouts import type_text
from torchshard.distributed.consistency import note_unverified, running_call, verify_following_call
from torchshard.distributed.convert import begun, refuse_simulated
from torchshard.distributed.group import Group, lookup
from torchshard.distributed.kernels import Exchange, dense
from torchshard.ops import COMBINE, DISPATCH, experts_of_ranks
from torchshard.ops.declared import LIBRARY, Size


def _numbers(sent: Tensor, received: Tensor, group: Group) -> tuple[list[int], list[int]]:
    """Returns (rows from each rank, rows to each rank)."""
    to = [part.sum() for part in sent.split(experts_of_ranks(sent.shape[0], group.size))]
    come, go = torch.stack([received.sum(0), torch.stack(to)]).tolist()
    return come, go


def _in_order_of_experts(received: Tensor) -> Tensor:
    """Returns the indices that sort received rows by expert; rows of one rank already are."""
    experts, ranks = received.shape
    own = torch.arange(experts, device=received.device).repeat(ranks)
    return own.repeat_interleave(received.t().flatten()).argsort(stable=True)


def _dispatch(x: Tensor, sent: Tensor, received: Tensor, group: Group) -> Exchange:
    order, lengths = _in_order_of_experts(received), _numbers(sent, received, group)
    return Exchange("all_to_all_single", dense(x), lambda rows: rows[order], lengths)


def _combine(x: Tensor, sent: Tensor, received: Tensor, group: Group) -> Exchange:
    as_they_came = torch.empty_like(x, memory_format=torch.contiguous_format)
    as_they_came[_in_order_of_experts(received)] = x
    come, go = _numbers(sent, received, group)
    return Exchange("all_to_all_single", as_they_came, lambda rows: rows, (go, come))


Kernel = Callable[[Tensor, Tensor, Tensor, Group], Exchange]


def _run(name: str, kernel: Kernel, x: Tensor, sent: Tensor, received: Tensor, group: Group) -> Tensor:
    """Runs one of the two kernels on this rank.

    Raises:
        DistributedError: the group is simulated, or the ranks' calls differ.
    """
    refuse_simulated(group)
    verify_following_call(group, lambda: f"{name} of rows {type_text(x.dtype, x.shape[1:])}")
    return x.clone() if group.size == 1 else begun(kernel(x, sent, received, group), group).wait()


class _Context(Protocol):
    """Autograd's context of the two operators."""

    rows: int
    group: str
    call: str
    saved_tensors: tuple[Tensor, Tensor]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _register(op: OpOverload[..., Tensor], dual: OpOverload[..., Tensor], kernel: Kernel) -> None:
    name, dual_name = (each._schema.name.partition("::")[2] for each in (op, dual))

    def run(x: Tensor, sent: Tensor, received: Tensor, rows: Size | None, group: str) -> Tensor:
        return _run(name, kernel, x, sent, received, lookup(group))

    def setup(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor, Size | None, str], output: Tensor) -> None:
        x, sent, received, _, group = inputs
        ctx.save_for_backward(sent, received)
        ctx.rows, ctx.group, ctx.call = x.shape[0], group, running_call()

    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call and not torch.is_grad_enabled():
            note_unverified(lookup(ctx.group), f"backward of {ctx.call}: {dual_name}")
        return dual(grad, *ctx.saved_tensors, ctx.rows, ctx.group), None, None, None, None

    LIBRARY.impl(op, run, "CompositeExplicitAutograd")
    torch.library.register_autograd(op, backward, setup_context=setup, lib=LIBRARY)


KERNELS: dict[object, Kernel] = {DISPATCH: _dispatch, COMBINE: _combine}
"""Operator -> the kernel that computes a rank's exchange."""


def register_experts() -> None:
    """Registers the kernels and the gradients of `dispatch` and `combine`."""
    _register(DISPATCH, COMBINE, _dispatch)
    _register(COMBINE, DISPATCH, _combine)
