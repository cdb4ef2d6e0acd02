"""Eager collectives: the conversions on this process's model-parallel group.

    y = copy(x)                 # I -> R   forward nothing,        backward all-reduce
    y = reduce(x)               # P -> I   forward all-reduce,     backward nothing
    y = gather(x, dim)          # S -> I   forward all-gather,     backward keep own slice
    y = scatter(x, dim)         # I -> S   forward keep own slice, backward all-gather

Outside any group, each call returns its input. A dim whose size is not divisible by the group size
is split by `torch.chunk`'s rule. A call on a Shard exchanges its global size in one small message;
pass `size=` to skip that. With `async_op=True`, a call returns a `Handle`; its `wait()` returns the
tensor. Under `torch.no_grad`, no tensor requires a gradient. Calls that differ between ranks raise
the same error on all of them: see `debug`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.distributed.eager import (
    check_memory,
    check_tensor,
    fill,
    needs_gradient,
    own_dim,
    verify_tensor_call,
    whole_size,
)
from torchshard.distributed.group import ALONE, CheckLevel, Group, own_group
from torchshard.distributed.kernels import copied, reducing
from torchshard.distributed.ops import begin, direct
from torchshard.distributed.wire import Handle, Pending

_ops = torch.ops.torchshard


@overload
def copy(x: Tensor, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def copy(x: Tensor, *, async_op: Literal[True]) -> Handle: ...
def copy(x: Tensor, *, async_op: bool = False) -> Tensor | Handle:
    """I -> R: returns the same value; backward sums the gradients of all ranks.

    Source: Megatron's `copy_to_tensor_model_parallel_region`.
    """
    return _call("copy", x, async_op)


@overload
def reduce(x: Tensor, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def reduce(x: Tensor, *, async_op: Literal[True]) -> Handle: ...
def reduce(x: Tensor, *, async_op: bool = False) -> Tensor | Handle:
    """P -> I: returns the sum over the ranks; backward passes the gradient on.

    If `x` requires no gradient, sums in place and returns `x` itself; otherwise `x` is unchanged.

    Raises:
        InputError: `x` would be summed in place, but its elements share memory (`expand`).

    Source: Megatron's `reduce_from_tensor_model_parallel_region`.
    """
    return _summed("reduce", x, async_op)


def _summed(name: str, x: Tensor, async_op: bool) -> Tensor | Handle:
    """Sums over the ranks, in place if `x` requires no gradient."""
    group = own_group()
    check_tensor(group, name, x)
    if needs_gradient(x):
        return _call(name, x, async_op)
    if group.size == 1:
        # `reduce` returns x itself; with an asynchronous `all_reduce`, the caller may change x before `wait`
        return _same(x, async_op) if name == "reduce" or not async_op else _call(name, x, async_op)
    if torch.compiler.is_compiling():
        # torch.compile can't trace a call of torch.distributed, so it gets the operator and a copy back
        total: Tensor = _ops.reduce(x, group.name)
        return x.copy_(total)
    if group.level is not CheckLevel.OFF:
        verify_tensor_call(group, name, x, valid=(lambda: check_memory(name, x)) if name == "reduce" else None)
    # unlike `reduce`, all_reduce leaves the caller free to change its tensor until `wait`
    copy_first = async_op and name == "all_reduce"
    pending = _reducing_in_place(x, group, copy_first=copy_first)
    return Handle(pending) if async_op else pending.wait()


def _reducing_in_place(x: Tensor, group: Group, *, copy_first: bool = False) -> Pending:
    if not copy_first and x.is_contiguous() and not x.is_neg() and not x.is_conj():
        if not x.is_inference():
            # the collective writes below autograd, and a backward that saved x must detect that
            torch.autograd.graph.increment_version(x)
        return reducing(x, dist.ReduceOp.SUM, group)
    pending = reducing(copied(x), dist.ReduceOp.SUM, group)
    return pending._replace(result=lambda: fill(x, pending.result()))


@overload
def all_reduce(x: Tensor, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(x: Tensor, *, async_op: Literal[True]) -> Handle: ...
def all_reduce(x: Tensor, *, async_op: bool = False) -> Tensor | Handle:
    """P -> R: returns the sum over the ranks; backward sums the gradients of all ranks too.

    If `x` requires no gradient, sums in place and returns `x`, like `torch.distributed.all_reduce`.
    """
    return _summed("all_reduce", x, async_op)


@overload
def scatter(x: Tensor, dim: int | None = -1, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def scatter(x: Tensor, dim: int | None = -1, *, async_op: Literal[True]) -> Handle: ...
def scatter(x: Tensor, dim: int | None = -1, *, async_op: bool = False) -> Tensor | Handle:
    """I -> S(dim): returns this rank's slice; backward gathers the gradient. `dim=None`: no split.

    [6, 8] over two ranks gives [3, 8] for `dim=0` and [6, 4] for `dim=-1`.
    """
    return _call("scatter", x, async_op, to_dim=dim) if dim is not None else _same(x, async_op)


@overload
def narrow(x: Tensor, dim: int = -1, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def narrow(x: Tensor, dim: int = -1, *, async_op: Literal[True]) -> Handle: ...
def narrow(x: Tensor, dim: int = -1, *, async_op: bool = False) -> Tensor | Handle:
    """R -> S(dim): returns this rank's slice; the gradient is zero-padded to a partial sum."""
    return _call("narrow", x, async_op, to_dim=dim)


@overload
def gather(x: Tensor, dim: int | None = -1, *, size: int | None = None, async_op: Literal[False] = False) -> Tensor: ...
@overload
def gather(x: Tensor, dim: int | None = -1, *, size: int | None = None, async_op: Literal[True]) -> Handle: ...
def gather(x: Tensor, dim: int | None = -1, *, size: int | None = None, async_op: bool = False) -> Tensor | Handle:
    """S(dim) -> I: joins all ranks' slices; backward keeps this rank's. `dim=None`: no change.

    [6, 8] on each of two ranks gives [12, 8] for `dim=0` and [6, 16] for `dim=-1`.

    Args:
        size: the global size of the dim; by default, the ranks exchange theirs.

    Raises:
        InputError: the ranks' sizes don't form a split.
    """
    return _call("gather", x, async_op, dim=dim, size=size) if dim is not None else _same(x, async_op)


@overload
def all_gather(x: Tensor, dim: int = -1, *, size: int | None = None, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_gather(x: Tensor, dim: int = -1, *, size: int | None = None, async_op: Literal[True]) -> Handle: ...
def all_gather(x: Tensor, dim: int = -1, *, size: int | None = None, async_op: bool = False) -> Tensor | Handle:
    """S(dim) -> R: joins all ranks' slices; backward sums and scatters the gradients.

    Args:
        size: see `gather`.
    """
    return _call("all_gather", x, async_op, dim=dim, size=size)


@overload
def reduce_scatter(x: Tensor, dim: int = -1, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def reduce_scatter(x: Tensor, dim: int = -1, *, async_op: Literal[True]) -> Handle: ...
def reduce_scatter(x: Tensor, dim: int = -1, *, async_op: bool = False) -> Tensor | Handle:
    """P -> S(dim): returns this rank's slice of the sum; backward gathers the gradient."""
    return _call("reduce_scatter", x, async_op, to_dim=dim)


@overload
def all_to_all(
    x: Tensor, dim: int, to_dim: int, *, size: int | None = None, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def all_to_all(x: Tensor, dim: int, to_dim: int, *, size: int | None = None, async_op: Literal[True]) -> Handle: ...
def all_to_all(x: Tensor, dim: int, to_dim: int, *, size: int | None = None, async_op: bool = False) -> Tensor | Handle:
    """S(dim) -> S(to_dim): splits along another dim; backward converts the gradient back.

    Args:
        size: see `gather`.
    """
    return _call("all_to_all", x, async_op, dim=dim, size=size, to_dim=to_dim)


def _call(
    name: str, x: Tensor, async_op: bool, dim: int | None = None, size: int | None = None, to_dim: int | None = None
) -> Tensor | Handle:
    """Runs one conversion.

    Args:
        dim, size: the dim of a source Shard, and its global size, if known.
        to_dim: the dim of a target Shard.
    """
    group, op, compiling = own_group(), getattr(_ops, name).default, torch.compiler.is_compiling()
    check_tensor(group, name, x)
    dim, to_dim = _from_front(x, dim), _from_front(x, to_dim)
    asks_sizes = dim is not None and size is None
    if compiling:
        sizes = _ask_sizes(group, name, x, dim, to_dim) if asks_sizes else None
    else:
        verifies = asks_sizes or group.level is not CheckLevel.OFF
        sizes = verify_tensor_call(group, name, x, dim, size=size, to_dim=to_dim) if verifies else None
    args: list[int | tuple[int, int]] = []
    if dim is not None:
        args += [own_dim(x, dim), (whole_size(name, x, dim, size, sizes, group), 1)]
    if to_dim is not None:
        args += [own_dim(x, to_dim), (x.shape[to_dim], 1)]
    if group is ALONE:
        return _same(x, async_op)
    if async_op:
        return begin(op, x, *args, group.name)
    # torch.compile puts the operator into its graph; eager calls skip the dispatcher
    run: Callable[..., Tensor] = op if compiling else direct(op)
    return run(x, *args, group.name)


def _from_front(x: Tensor, dim: int | None) -> int | None:
    """Returns a dim counted from the front; an out-of-range dim is returned for the error."""
    return dim + x.ndim if dim is not None and -x.ndim <= dim < 0 else dim


@torch.compiler.disable(reason="the ranks tell each other their sizes; size= gives the whole one")
def _ask_sizes(group: Group, name: str, x: Tensor, dim: int | None, to_dim: int | None) -> list[int] | None:
    return verify_tensor_call(group, name, x, dim, size=None, to_dim=to_dim)


def _same(x: Tensor, async_op: bool) -> Tensor | Handle:
    return Handle(Pending(lambda: x)) if async_op else x
