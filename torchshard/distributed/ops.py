"""Defines the conversions as PyTorch operators, `torch.ops.torchshard.*`, for nodes of graphs.

Each row of `conversions.TABLE` generates one operator: the kernel runs the row, the fake kernel
computes shapes from the layouts, and the backward is the row's dual. An operator takes the name of
a group, because a graph with a process group could not be printed, saved or exported.

    copy(x, group)      gather(x, dim, parts, group)      all_to_all(x, dim, parts, to_dim, to_parts, group)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload

from torchshard.core.conversions import ROUNDS, TABLE, Conversion, source_and_target
from torchshard.core.layouts import Shard, local_shape, whole_shape, with_parts
from torchshard.distributed.consistency import forward_site, note_unverified, running_call
from torchshard.distributed.experts import COMBINE, DISPATCH
from torchshard.distributed.group import Group, lookup
from torchshard.distributed.kernels import Exchange, own_part, reduced, start
from torchshard.distributed.wire import Handle, Pending

_ARGS = {0: "", 1: "int dim, int[] parts, ", 2: "int dim, int[] parts, int to_dim, int[] to_parts, "}
OpArgs = tuple[int | str | tuple[int, ...], ...]
"""An operator's arguments after the tensor: dims, parts, and finally the group's name."""
Op = OpOverload[..., Tensor]
OPS: dict[object, Conversion] = {}
"""Operator -> its row of the table."""
_OPERATORS: dict[object, Op] = {}
"""A function that runs a collective without its operator -> the operator."""
PLAIN: set[type[Tensor]] = {Tensor, nn.Parameter}
"""Tensor classes that no tracer wraps; `weights.parameter` adds the class of sharded parameters."""


_source_and_target = functools.lru_cache(maxsize=4096)(source_and_target)


def _group(args: Sequence[object]) -> Group:
    return lookup(cast(str, args[-1]))


def _run(row: Conversion, x: Tensor, args: OpArgs, of: str = "", *, eager: bool = False) -> Tensor:
    """Runs a conversion on this rank.

    Args:
        of, eager: see `kernels.start`.
    """
    source, target = _source_and_target(row.name, args)
    return start(row.kernel, x, source, target, _group(args), of, eager=eager).wait()


def hashable(args: Sequence[int | str | Sequence[int]]) -> OpArgs:
    """Returns an operator's arguments after the tensor, with tuples instead of lists."""
    return tuple(tuple(a) if isinstance(a, (list, tuple)) else cast(int | str, a) for a in args)


class _Origin(NamedTuple):
    """The origin of a conversion, for the errors of its backward."""

    site: str
    """The line of the call, if backward verifies it; else ''."""
    model_call: str
    """The sharded model's call that runs this conversion's node; '' for an eager call."""


def _origin(args: OpArgs) -> _Origin:
    return _Origin(forward_site(_group(args)), running_call())


def _gradient(row: Conversion, grad: Tensor, args: OpArgs, origin: _Origin) -> Tensor:
    """Returns the gradient of a conversion: the dual conversion of the output's gradient."""
    dual = TABLE[row.dual]
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


SENDING = frozenset(ROUNDS)
"""The kernels that communicate."""


class _Direct(torch.autograd.Function):
    """A conversion without its operator; `compute` returns its value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Conversion, args: OpArgs, compute: Callable[[], Tensor]) -> Tensor:
        ctx.row, ctx.args, ctx.origin = row, args, _origin(args)
        return compute()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gradient(ctx.row, grad, ctx.args, ctx.origin), None, None, None


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
    pending = start(row.kernel, x.detach(), *_source_and_target(row.name, args), _group(args))

    def result() -> Tensor:
        with torch.set_grad_enabled(grad_enabled):  # the caller may wait in another grad mode
            return _Direct.apply(x, row, args, pending.wait)

    return Handle(pending, result)


@dataclass(frozen=True)
class Begin:
    """The target of a node that begins a collective without gradients; a `wait` node ends it."""

    op: OpOverload[..., object]
    in_place: bool
    """Whether the result reuses the operand's memory, as an all-reduce can."""
    __module__: str = __name__

    @property
    def __name__(self) -> str:
        """The name in a graph's code and in listings."""
        return f"begin_{OPS[self.op].name}"

    def __call__(self, x: Tensor, *args: int | str | Sequence[int]) -> Pending:
        own = hashable(args)
        return start(self._kernel, x, *_source_and_target(OPS[self.op].name, own), _group(own))

    @property
    def _kernel(self) -> str:
        kernel = OPS[self.op].kernel
        return f"{kernel}_" if self.in_place else kernel

    def part(self, x: Tensor, group: Group, args: OpArgs) -> Tensor | Exchange:
        """Returns the rank's part of the collective without sending it."""
        return own_part(self._kernel, x, *_source_and_target(OPS[self.op].name, args), group)


def wait(pending: Pending) -> Tensor:
    """Returns the result of a collective that was begun."""
    return pending.wait()


def unwrapped(target: object) -> object:
    """Returns the collective that a target runs (operator, `Begin` or `wait`), or the target."""
    target = getattr(target, "__wrapped__", target)
    return _OPERATORS.get(target, target)


def communicates(target: object) -> bool:
    """Returns whether a node's target is a collective that sends data."""
    return target in OPS and OPS[target].kernel in SENDING


def _define(row: Conversion) -> None:
    """Registers the operator of a row."""
    shards = [row.source, row.target].count(Shard)

    def kernel(x: Tensor, *args: int | str | list[int]) -> Tensor:
        return _run(row, x, hashable(args))

    def fake(x: Tensor, *args: int | str | list[int]) -> Tensor:
        if row.kernel == "none":
            return torch.empty_like(x)
        group = _group(args)
        source, target = with_parts(*source_and_target(row.name, args), x.shape, group.size)
        return x.new_empty(local_shape(whole_shape(x.shape, source), target, group.rank, group.size))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.args = hashable(inputs[1:])
        ctx.origin = _origin(ctx.args)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradient(row, grad, ctx.args, ctx.origin), *[None] * len(ctx.args))

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
    """Returns the elementwise maximum over the ranks, on every rank; it has no gradient."""
    return reduced(x, dist.ReduceOp.MAX, lookup(group))


@all_reduce_max.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


COLLECTIVES = frozenset([*OPS, torch.ops.torchshard.all_reduce_max.default, DISPATCH, COMBINE])
"""The operators of the table, `all_reduce_max`, `dispatch` and `combine`.

Some operators of the table send nothing, but their backward does.
"""


def is_collective(target: object) -> bool:
    """Returns whether a node's target is one of `COLLECTIVES`."""
    return target in COLLECTIVES


def is_or_begins_collective(target: object) -> bool:
    """Returns whether a node's target is one of `COLLECTIVES`, or begins one."""
    return is_collective(target) or isinstance(target, Begin)
