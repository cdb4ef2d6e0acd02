"""The conversions by hand, on this process's model-parallel group; outside any group all of them give their input.

    y = copy(x)                 # I -> R   forward nothing,        backward all-reduce
    y = reduce(x)               # P -> I   forward all-reduce,     backward nothing
    y = gather(x, dim)          # S -> I   forward all-gather,     backward keep own slice
    y = scatter(x, dim)         # I -> S   forward keep own slice, backward all-gather

A dim that does not divide by the group is split by `torch.chunk`'s rule. The calls that begin from a Shard ask the
ranks for its global size, in one small message; pass `size=` where it is known. With `async_op=True` a call gives a
`Handle`, whose `wait()` gives the tensor. Calls that differ between the ranks are one error on all: see `debug`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from torchshard.core.errors import InputError
from torchshard.core.layouts import local_size, type_text
from torchshard.distributed.checks import Mode, compares_each, forget, meet, note, remember, where_called
from torchshard.distributed.groups import ALONE, MODEL, Group, own_group
from torchshard.distributed.kernels import copied, reducing
from torchshard.distributed.ops import begin, direct
from torchshard.distributed.wire import Handle, Pending

_ops = torch.ops.torchshard


@overload
def copy(x: Tensor, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def copy(x: Tensor, *, async_op: Literal[True]) -> Handle: ...
def copy(x: Tensor, *, async_op: bool = False) -> Tensor | Handle:
    """I -> R: the same value; the gradients of all ranks are summed.

    Source: Megatron's `copy_to_tensor_model_parallel_region`.
    """
    return _call("copy", x, async_op)


@overload
def reduce(x: Tensor, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def reduce(x: Tensor, *, async_op: Literal[True]) -> Handle: ...
def reduce(x: Tensor, *, async_op: bool = False) -> Tensor | Handle:
    """P -> I: the sum over the ranks; the gradient passes.

    Where no gradient is asked it sums in place and gives `x` itself; where one is, `x` stays as it is.

    Raises:
        InputError: `x` is to be summed in place, and several of its elements are one in memory (an `expand`).

    Source: Megatron's `reduce_from_tensor_model_parallel_region`.
    """
    return _summed("reduce", x, async_op)


def _summed(name: str, x: Tensor, async_op: bool) -> Any:
    """The sum over the ranks: in place, where no gradient is asked."""
    group = own_group()
    check_tensor(group, name, x)
    if needs_gradient(x):
        return _call(name, x, async_op)
    if group.size == 1:
        return _same(x, async_op) if name == "reduce" or not async_op else _call(name, x, async_op)
    if torch.compiler.is_compiling():
        return x.copy_(_ops.reduce(x, MODEL))
    if Mode.on is not False:
        alike(group, name, x, valid=(lambda: check_memory(name, x)) if name == "reduce" else None)
    copy_first = async_op and name == "all_reduce"  # whose tensor may change meanwhile
    pending = _reducing_in_place(x, group, copy_first=copy_first)
    return Handle(pending) if async_op else pending.wait()


def _reducing_in_place(x: Tensor, group: Group, *, copy_first: bool = False) -> Pending:
    if not copy_first and x.is_contiguous() and not x.is_neg() and not x.is_conj():
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)  # a backward that has kept x must say that it was changed
        return reducing(x, dist.ReduceOp.SUM, group)
    pending = reducing(copied(x), dist.ReduceOp.SUM, group)
    return pending._replace(result=lambda: fill(x, pending.result()))


def fill(x: Tensor, value: Tensor) -> Tensor:
    """The tensor that was given, with other values; an expanded one takes the first of each, and is not given."""
    target, taken = x, value
    for dim in (repeated := _repeated(x)):
        target, taken = target.narrow(dim, 0, 1), taken.narrow(dim, 0, 1)
    with torch.no_grad():
        target.copy_(taken)
    return value if repeated else x


def check_memory(name: str, x: Tensor) -> None:
    """Raises InputError for a tensor that can't be filled: several of its elements are one in memory."""
    if _repeated(x):
        raise InputError(
            "a tensor can't be filled where several of its elements are one in memory",
            where=name,
            why=f"its shape is {tuple(x.shape)}, its strides are {x.stride()}",
            attempt=f"{name}(x.contiguous())",
        )


def _repeated(x: Tensor) -> list[int]:
    """The dims along which a tensor is expanded: all elements are one in memory."""
    return [dim for dim in range(x.ndim) if x.stride(dim) == 0 and x.shape[dim] > 1]


@overload
def all_reduce(x: Tensor, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(x: Tensor, *, async_op: Literal[True]) -> Handle: ...
def all_reduce(x: Tensor, *, async_op: bool = False) -> Tensor | Handle:
    """P -> R: the sum over the ranks; the gradients of all ranks are summed too.

    Where no gradient is asked it sums in place and gives `x` itself, as `torch.distributed.all_reduce` and `reduce` do.
    """
    return _summed("all_reduce", x, async_op)


@overload
def scatter(x: Tensor, dim: int | None = -1, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def scatter(x: Tensor, dim: int | None = -1, *, async_op: Literal[True]) -> Handle: ...
def scatter(x: Tensor, dim: int | None = -1, *, async_op: bool = False) -> Tensor | Handle:
    """I -> S(dim): this rank's slice; the gradient is gathered. `dim=None` splits nothing.

    [6, 8] over two ranks gives [3, 8] for `dim=0` and [6, 4] for `dim=-1`.
    """
    return _call("scatter", x, async_op, to_dim=dim) if dim is not None else _same(x, async_op)


@overload
def narrow(x: Tensor, dim: int = -1, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def narrow(x: Tensor, dim: int = -1, *, async_op: Literal[True]) -> Handle: ...
def narrow(x: Tensor, dim: int = -1, *, async_op: bool = False) -> Tensor | Handle:
    """R -> S(dim): this rank's slice; the gradient is padded with zeros, an addend of the whole."""
    return _call("narrow", x, async_op, to_dim=dim)


@overload
def gather(x: Tensor, dim: int | None = -1, *, size: int | None = None, async_op: Literal[False] = False) -> Tensor: ...
@overload
def gather(x: Tensor, dim: int | None = -1, *, size: int | None = None, async_op: Literal[True]) -> Handle: ...
def gather(x: Tensor, dim: int | None = -1, *, size: int | None = None, async_op: bool = False) -> Tensor | Handle:
    """S(dim) -> I: all ranks' slices joined; this rank keeps its slice of the gradient. `dim=None` joins nothing.

    [6, 8] on each of two ranks gives [12, 8] for `dim=0` and [6, 16] for `dim=-1`.

    Args:
        size: the global size of the dim, where it is known; else the ranks tell each other theirs.

    Raises:
        InputError: the ranks' sizes are not those of a split.
    """
    return _call("gather", x, async_op, dim=dim, size=size) if dim is not None else _same(x, async_op)


@overload
def all_gather(x: Tensor, dim: int = -1, *, size: int | None = None, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_gather(x: Tensor, dim: int = -1, *, size: int | None = None, async_op: Literal[True]) -> Handle: ...
def all_gather(x: Tensor, dim: int = -1, *, size: int | None = None, async_op: bool = False) -> Tensor | Handle:
    """S(dim) -> R: all ranks' slices joined; the gradients are summed and scattered.

    Args:
        size: as in `gather`.
    """
    return _call("all_gather", x, async_op, dim=dim, size=size)


@overload
def reduce_scatter(x: Tensor, dim: int = -1, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def reduce_scatter(x: Tensor, dim: int = -1, *, async_op: Literal[True]) -> Handle: ...
def reduce_scatter(x: Tensor, dim: int = -1, *, async_op: bool = False) -> Tensor | Handle:
    """P -> S(dim): this rank's slice of the sum over the ranks; the gradient is gathered."""
    return _call("reduce_scatter", x, async_op, to_dim=dim)


@overload
def all_to_all(
    x: Tensor, dim: int, to_dim: int, *, size: int | None = None, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def all_to_all(x: Tensor, dim: int, to_dim: int, *, size: int | None = None, async_op: Literal[True]) -> Handle: ...
def all_to_all(x: Tensor, dim: int, to_dim: int, *, size: int | None = None, async_op: bool = False) -> Tensor | Handle:
    """S(dim) -> S(to_dim): split along another dim; the gradient goes the way back.

    Args:
        size: as in `gather`.
    """
    return _call("all_to_all", x, async_op, dim=dim, size=size, to_dim=to_dim)


def _call(
    name: str, x: Tensor, async_op: bool, dim: int | None = None, size: int | None = None, to_dim: int | None = None
) -> Any:
    """One conversion.

    Args:
        dim, size: where it begins from a split: the dim, and its global size where that is known.
        to_dim: where it leads to a split.
    """
    group, op, compiling = own_group(), getattr(_ops, name).default, torch.compiler.is_compiling()
    check_tensor(group, name, x)
    dim, to_dim = _counted(x, dim), _counted(x, to_dim)
    asked = dim is not None and size is None
    if compiling:
        sizes = _asked(group, name, x, dim, to_dim) if asked else None
    else:
        sizes = alike(group, name, x, dim, size=size, to_dim=to_dim) if asked or Mode.on is not False else None
    args: list[Any] = [] if dim is None else [own_dim(x, dim), (whole_size(name, x, dim, size, sizes, group), 1)]
    args += [] if to_dim is None else [own_dim(x, to_dim), (x.shape[to_dim], 1)]
    if group is ALONE:
        return _same(x, async_op)
    if async_op:
        return begin(op, x, *args, MODEL)
    return (op if compiling else direct(op))(x, *args, MODEL)


ONE_SIDED = frozenset({"broadcast", "reduce_to", "gather_to", "scatter_from"})
"""Calls in which one rank does another thing than the rest, often from a line of its own."""


def _counted(x: Tensor, dim: int | None) -> int | None:
    """A dim counted from the front, if there is such a dim."""
    return dim + x.ndim if dim is not None and -x.ndim <= dim < 0 else dim


@torch.compiler.disable(reason="the ranks tell each other their sizes; size= gives the whole one")
def _asked(group: Group, name: str, x: Tensor, dim: int | None, to_dim: int | None) -> list[int] | None:
    return alike(group, name, x, dim, size=None, to_dim=to_dim)


def _same(x: Tensor, async_op: bool) -> Any:
    return Handle(Pending(lambda: x)) if async_op else x


def check_tensor(group: Group, name: str, x: Any) -> None:
    """Raises InputError on all ranks where one passes something else than a tensor, or calls within a transform."""
    if group.size > 1 and not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:
        raise InputError(
            f"{name} was called within a transform of torch.func (vmap, grad, jvp, ...)",
            where=f"{name}, {where_called()}",
            why="ranks send tensors with memory; a transform gives it wrappers of them",
            attempt="a batch dim in place of vmap, and tensor.backward() or torch.autograd.grad in place of grad",
        )
    if isinstance(x, Tensor):
        return

    def refused() -> str:
        raise InputError(
            f"{name} takes a tensor, not a {type(x).__name__}",
            where=name,
            why=f"got {x!r:.80}",
            attempt="torch.as_tensor(...) of numbers; all_gather_object and its like for any data",
        )

    meet(group, refused)


def needs_gradient(x: Tensor) -> bool:
    """Whether what is made of a tensor now has a gradient."""
    return x.requires_grad and torch.is_grad_enabled()


def alike(
    group: Group, name: str, x: Tensor, dim: int | None = None, valid: Callable[[], Any] | None = None, **facts: Any
) -> list[int] | None:
    """Compares a call by hand with the other ranks', if its like is new; gives all ranks' sizes along `dim` then.

    Args:
        dim: the one along which the ranks' sizes may differ; with `size=None` they are always asked.
        valid: raises where a call of this kind can't be made.
        facts: the arguments, which are the same on all ranks. Those whose names end in `dim` are dims of `x`.

    Raises:
        DistributedError: the ranks' calls differ.
        InputError: the tensor has no such dim.
    """
    check_tensor(group, name, x)
    kind = (name, dim, x.dtype, x.shape, x.requires_grad and torch.is_grad_enabled(), *facts.values())
    asked = dim is not None and facts["size"] is None and group.size > 1
    if kind in group.talk.met and not compares_each(group) and not asked:
        note(group, f"{name} {type_text(x.dtype, [])} {facts}")
        return None
    given = {"dim": dim, **facts}

    def said() -> str:
        if valid is not None:
            valid()
        dims = [own_dim(x, d) for key, d in given.items() if key.endswith("dim") and d is not None]
        shape = ["*" if dim is not None and i == dims[0] else n for i, n in enumerate(x.shape)]
        arguments = ", ".join(f"{key}={fact}" for key, fact in given.items() if fact is not None)
        gradient = ", with a gradient" if needs_gradient(x) else ""
        return f"{name}({arguments}) of {type_text(x.dtype, shape)}{gradient}"

    sizes = None
    if asked or Mode.on is not False:
        sizes = meet(group, said, lambda: 0 if dim is None else x.shape[dim], symmetric=name not in ONE_SIDED)
    else:
        said()
    if not asked:
        remember(group.talk.met, kind)
    return sizes


def whole_size(name: str, x: Tensor, dim: int, size: int | None, sizes: list[int] | None, group: Group) -> int:
    """The size along a dim of all ranks' slices together.

    Args:
        size: where it is known.
        sizes: of each rank's slice, where that is known.

    Raises:
        InputError: the ranks' sizes are of no split.
    """
    if sizes is None and size is None:
        return int(x.shape[dim] * group.size)
    if sizes is None:
        _check_size(name, x, dim, cast(int, size), group)
        return cast(int, size)
    total = sum(sizes) if size is None else size
    expected = [local_size([(total, 1)], rank, group.size) for rank in range(group.size)]
    if sizes != expected:
        forget(group)
        raise InputError(
            f"slices of sizes {sizes} are of no split of {total} over {group.size} ranks",
            where=f"{name}, dim {dim}, {where_called()}",
            why=f"torch.chunk's rule, by which scatter splits, gives {expected}",
            attempt="slices that scatter made; all_gather_uneven for tensors of any shapes",
        )
    return total


def _check_size(name: str, x: Tensor, dim: int, size: int, group: Group) -> None:
    """Raises InputError where this rank's slice is none of a split of `size`; the other ranks are not asked."""
    if group.size == 1 or torch.compiler.is_compiling():
        return
    expected = local_size([(size, 1)], group.rank, group.size)
    if x.shape[dim] != expected:
        raise InputError(
            f"a slice of size {x.shape[dim]} is of no split of {size} over {group.size} ranks",
            where=f"{name}, dim {dim}, {where_called()}",
            why=f"torch.chunk's rule, by which scatter splits, gives rank {group.rank} {expected}",
            attempt="the size of all ranks' slices together, or no size=",
        )


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
