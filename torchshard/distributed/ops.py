"""The conversions as PyTorch operators, `torch.ops.torchshard.*`: the collective nodes of a graph.

All are made from the rows of `conversions.TABLE`: the kernel runs the row, the fake kernel takes shapes from the
layouts, and the backward is the row's dual. Groups are passed by name, so that a printed, saved or exported graph
stays whole.

    copy(x, group)      gather(x, dim, parts, group)      all_to_all(x, dim, parts, to_dim, to_parts, group)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchshard.core.conversions import TABLE, Conversion, source_and_target
from torchshard.core.layouts import Layout, Shard, local_shape, whole_shape
from torchshard.distributed.consistency import forward_site, note_unverified, running_call
from torchshard.distributed.group import lookup
from torchshard.distributed.kernels import reduced, start
from torchshard.distributed.wire import Handle

_ARGS = {0: "", 1: "int dim, int[] parts, ", 2: "int dim, int[] parts, int to_dim, int[] to_parts, "}
OPS: dict[Any, Conversion] = {}
"""OpOverload -> its row of the table."""
PLAIN = {Tensor, nn.Parameter}
"""The classes of tensors that nobody watches: parameters of sharded models are added."""


def local_result_shape(shape: Sequence[Any], source: Layout, target: Layout, rank: int, world: int) -> list[Any]:
    """The local shape after a conversion, from the local shape before it."""
    return list(local_shape(whole_shape(shape, source), target, rank, world))


_source_and_target = functools.lru_cache(maxsize=4096)(source_and_target)


def _run(row: Conversion, x: Tensor, args: tuple[Any, ...], of: str = "", *, eager: bool = False) -> Tensor:
    """A conversion on this rank; `args` are the operator's after the tensor."""
    source, target = _source_and_target(row.name, args)
    return start(row.kernel, x, source, target, lookup(args[-1]), of, eager=eager).wait()


def hashable(args: Sequence[Any]) -> tuple[Any, ...]:
    """An operator's arguments after the tensor, with tuples for lists."""
    return tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in args)


def _gradient(row: Conversion, grad: Tensor, args: tuple[Any, ...], of: str, call: str) -> Tensor:
    """The gradient of a conversion is its dual, of the gradient; an operator where it is differentiated or traced.

    Args:
        of: where the conversion was made, if that is compared.
        call: the call of a sharded model that it is a node of; '': it was an eager call.
    """
    dual = TABLE[row.dual]
    args = (*args[2:4], *args[0:2], args[4]) if len(args) == 5 else args
    if torch.is_grad_enabled() or type(grad) not in PLAIN:
        return getattr(torch.ops.torchshard, dual.name).default(grad, *args)
    if dual.kernel == "none" and not of:
        return grad
    if call and dual.kernel in SENDING:
        note_unverified(lookup(args[-1]), f"backward of {call}: {dual.name}")
    return _run(dual, grad, args, of, eager=not call and dual.kernel in SENDING)


SENDING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
"""The kernels that communicate."""


class _Direct(torch.autograd.Function):
    """A conversion without its operator; `compute` gives its value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Conversion, args: tuple[Any, ...], compute: Callable[[], Tensor]) -> Tensor:
        ctx.row, ctx.args, ctx.call = row, args, running_call()
        ctx.site = forward_site(lookup(args[-1]))
        return compute()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gradient(ctx.row, grad, ctx.args, ctx.site, ctx.call), None, None, None


@functools.cache
def direct(op: Any) -> Callable[..., Tensor]:
    """What a collective operator computes, without PyTorch's dispatcher, where no one traces it.

    A Python operator costs as much as the sending of a small message: its calls go through Python four times.
    """
    row = OPS[op]

    def call(x: Tensor, *args: Any) -> Tensor:
        if type(x) not in PLAIN:
            return op(x, *args)
        if x.requires_grad and torch.is_grad_enabled():
            return _Direct.apply(x, row, args, lambda: _run(row, x, args))
        return _run(row, x, args)

    call.__name__ = row.name
    return call


def begin(op: Any, x: Tensor, *args: Any) -> Handle:
    """Starts a collective of a copy of `x`, which may change meanwhile; waiting gives what the operator would."""
    row, held, enabled = OPS[op], x.clone(), torch.is_grad_enabled()
    pending = start(row.kernel, held.detach(), *_source_and_target(row.name, args), lookup(args[-1]))

    def result() -> Tensor:
        with torch.set_grad_enabled(enabled):  # as it was when the call was made, of what x was then
            return _Direct.apply(held, row, args, pending.wait)

    return Handle(pending, result)


def _define(row: Conversion) -> None:
    shards = [row.source, row.target].count(Shard)

    def kernel(x: Tensor, *args: Any) -> Tensor:
        return _run(row, x, hashable(args))

    def fake(x: Tensor, *args: Any) -> Tensor:
        group = lookup(args[-1])
        return x.new_empty(local_result_shape(x.shape, *source_and_target(row.name, args), group.rank, group.size))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.args, ctx.call = hashable(inputs[1:]), running_call()
        ctx.site = forward_site(lookup(inputs[-1]))

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (_gradient(row, grad, ctx.args, ctx.site, ctx.call), *[None] * len(ctx.args))

    name = f"torchshard::{row.name}"
    op = torch.library.custom_op(
        name, kernel, mutates_args=(), schema=f"(Tensor x, {_ARGS[shards]}str group) -> Tensor"
    )
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup)
    OPS[getattr(torch.ops.torchshard, row.name).default] = row


for _row in TABLE.values():
    _define(_row)


@torch.library.custom_op("torchshard::all_reduce_max", mutates_args=(), schema="(Tensor x, str group) -> Tensor")
def all_reduce_max(x: Tensor, group: str) -> Tensor:
    """The elementwise largest over the ranks, on every rank; it has no gradient."""
    return reduced(x, dist.ReduceOp.MAX, lookup(group))


@all_reduce_max.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


COLLECTIVES = frozenset([*OPS, torch.ops.torchshard.all_reduce_max.default])
"""All operators that communicate, or stand where communication would be."""


def is_collective(target: Any) -> bool:
    """Whether a node's target is one of ours."""
    return target in COLLECTIVES
