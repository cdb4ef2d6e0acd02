"""Registers the kernels and the gradients of the collectives' operators (`torchshard.ops`).

The kernel of an operator runs its row of the table, and its backward is the row's dual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchshard.core.conversions import TABLE, Conversion
from torchshard.distributed.consistency import forward_site, note_unverified, running_call
from torchshard.distributed.convert import functional, functional_max, own_part, start
from torchshard.distributed.experts import register_experts
from torchshard.distributed.group import Group, lookup
from torchshard.distributed.grouping import cpu_backend
from torchshard.distributed.kernels import reduced
from torchshard.distributed.wire import Handle
from torchshard.ops import OPS, SENDING, Kernels, Op, OpArgs, hashable, layouts_of, register_kernels
from torchshard.ops.declared import ALL_REDUCE_MAX, LIBRARY

_OPERATORS: dict[object, Op] = {}
"""A function that runs a collective without its operator -> the operator."""
PLAIN: set[type[Tensor]] = {Tensor, nn.Parameter}
"""Tensor classes that no tracer wraps; `weights.parameter` adds the class of sharded parameters."""


def _group(args: Sequence[object]) -> Group:
    return lookup(cast(str, args[-1]))


def _run(row: Conversion, x: Tensor, args: OpArgs, of: str = "", *, eager: bool = False) -> Tensor:
    """Runs a conversion on this rank.

    Args:
        of, eager: see `convert.start`.
    """
    source, target = layouts_of(row.name, args)
    return start(row.kernel, x, source, target, _group(args), of, eager=eager).wait()


class _Origin(NamedTuple):
    """The origin of a conversion, for the errors of its backward."""

    site: str
    """The line of the call, if backward verifies it; else ''."""
    model_call: str
    """The sharded model's call that runs this conversion's node; '' for an eager call."""


class _Context(Protocol):
    """Autograd's context of a conversion."""

    row: Conversion
    args: OpArgs
    origin: _Origin


def _remember(ctx: _Context, row: Conversion, args: OpArgs) -> None:
    ctx.row, ctx.args, ctx.origin = row, args, _Origin(forward_site(_group(args)), running_call())


def _gradient(ctx: _Context, grad: Tensor) -> Tensor:
    """Returns the gradient of a conversion: the dual conversion of the output's gradient."""
    dual, args, origin = TABLE[ctx.row.dual], ctx.args, ctx.origin
    args = (*args[2:4], *args[0:2], args[4]) if len(args) == 5 else args
    if torch.is_grad_enabled() or type(grad) not in PLAIN:
        # backward is itself differentiated or traced, so it must record an operator
        return getattr(torch.ops.torchshard, dual.name).default(grad, *args)
    if dual.kernel == "none" and not origin.site:
        return grad
    sends = dual.kernel in SENDING
    if origin.model_call and sends:
        note_unverified(_group(args), f"backward of {origin.model_call}: {dual.name}")
    return _run(dual, grad, args, origin.site, eager=sends and not origin.model_call)


class _Direct(torch.autograd.Function):
    """A conversion without its operator; `compute` returns its value."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, row: Conversion, args: OpArgs, compute: Callable[[], Tensor]) -> Tensor:
        _remember(ctx, row, args)
        return compute()

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gradient(ctx, grad), None, None, None


@functools.lru_cache(maxsize=len(TABLE))
def direct(op: Op) -> Callable[..., Tensor]:
    """Returns a function equal to a collective operator that skips the dispatcher if untraced.

    A Python operator costs as much as sending a small message: each call goes through Python four
    times.
    """
    row = OPS[op]

    def call(x: Tensor, *args: int | str | tuple[int, ...]) -> Tensor:
        if type(x) not in PLAIN:
            return op(x, *args)
        if x.requires_grad and torch.is_grad_enabled():
            return _Direct.apply(x, row, args, lambda: _run(row, x, args))
        return _run(row, x, args)

    call.__name__, _OPERATORS[call] = row.name, op
    return call


@functools.lru_cache(maxsize=len(TABLE))
def computing(op: Op) -> Callable[..., Tensor]:
    """Returns a function that computes a collective operator without dispatcher and gradients."""
    row = OPS[op]

    def call(x: Tensor, *args: int | str | Sequence[int]) -> Tensor:
        return _run(row, x, hashable(args))

    call.__name__, _OPERATORS[call] = row.name, op
    return call


def begin(op: Op, x: Tensor, *args: int | str | tuple[int, ...]) -> Handle:
    """Starts a collective; the handle's wait returns the operator's result."""
    row, grad_enabled = OPS[op], torch.is_grad_enabled()
    x = x.clone()  # the caller may change its tensor while the collective runs
    pending = start(row.kernel, x.detach(), *layouts_of(row.name, args), _group(args))

    def result() -> Tensor:
        with torch.set_grad_enabled(grad_enabled):  # the caller may wait in another grad mode
            return _Direct.apply(x, row, args, pending.wait)

    return Handle(pending, result)


def unwrapped(target: object) -> object:
    """Returns the collective that a target runs (operator, `Begin` or `wait`), or the target."""
    target = getattr(target, "__wrapped__", target)
    return _OPERATORS.get(target, target)


def _register(op: Op, row: Conversion) -> None:
    """Registers the kernel and the gradient of an operator of the table."""

    def kernel(x: Tensor, *args: int | str | list[int]) -> Tensor:
        return _run(row, x, hashable(args))

    def setup(ctx: _Context, inputs: tuple[Tensor, *OpArgs], output: Tensor) -> None:
        _remember(ctx, row, hashable(inputs[1:]))

    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradient(ctx, grad), *[None] * len(ctx.args))

    LIBRARY.impl(op, kernel, "CompositeExplicitAutograd")
    torch.library.register_autograd(op, backward, setup_context=setup, lib=LIBRARY)


for _op, _row in OPS.items():
    _register(cast(Op, _op), _row)


def _all_reduce_max(x: Tensor, group: str) -> Tensor:
    return reduced(x, dist.ReduceOp.MAX, lookup(group))


register_experts()
LIBRARY.impl(ALL_REDUCE_MAX, _all_reduce_max, "CompositeExplicitAutograd")
register_kernels(
    Kernels(
        lookup=lookup,
        start=lambda kernel, x, source, target, name: start(kernel, x, source, target, lookup(name)),
        own_part=lambda kernel, x, source, target, name: own_part(kernel, x, source, target, lookup(name)),
        functional=lambda kernel, x, source, target, name: functional(kernel, x, source, target, lookup(name)),
        functional_max=lambda x, name: functional_max(x, lookup(name)),
        computing=computing,
        cpu_backend=cpu_backend,
    )
)
