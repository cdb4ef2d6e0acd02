"""Checks before an eager collective: the input is a tensor, calls match, sizes are known."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import cast

import torch
from torch import Tensor

# `torch.func` has no public question for the current transform (PyTorch 2.13.0).
from torch._C._functorch import peek_interpreter_stack

from torchshard.core.errors import InputError
from torchshard.core.layouts import local_size, type_text
from torchshard.distributed.call_site import call_site
from torchshard.distributed.consistency import (
    announce,
    announces,
    note_unverified,
    remember,
    verifies_each,
    verify_call,
)
from torchshard.distributed.group import CheckLevel, Group

ONE_SIDED = frozenset({"broadcast", "reduce_to", "gather_to", "scatter_from"})
"""Calls in which one rank acts differently from the others, often on its own line."""


def check_tensor(group: Group, name: str, x: object, *, is_message: bool = False) -> None:
    """Raises InputError on all ranks if one passes no dense tensor or calls within a transform.

    Args:
        is_message: only this rank makes the call, so only this rank raises.
    """
    if group.size > 1 and not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:
        raise InputError(
            f"{name} was called within a transform of torch.func (vmap, grad, jvp, ...)",
            where=f"{name}, {call_site()}",
            why="ranks send tensors with memory; a transform gives it wrappers of them",
            attempt="a batch dim in place of vmap, and tensor.backward() or torch.autograd.grad in place of grad",
        )
    if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested:
        return

    def refused() -> str:
        if isinstance(x, Tensor):
            raise InputError(
                f"{name} takes a dense tensor",
                where=name,
                why=f"got one of layout {x.layout}, nested: {x.is_nested}; ranks send elements that lie in memory",
                attempt="x.to_dense(), or to_padded_tensor() of a nested one; or its indices and values apart",
            )
        raise InputError(
            f"{name} takes a tensor, not a {type(x).__name__}",
            where=name,
            why=f"got {x!r:.80}",
            attempt="torch.as_tensor(...) of numbers; all_gather_object and its like for any data",
        )

    if is_message:
        refused()
    verify_call(group, refused)


def needs_gradient(x: Tensor) -> bool:
    """Returns whether the result of an op on a tensor would require a gradient now."""
    return x.requires_grad and torch.is_grad_enabled()


def verify_tensor_call(
    group: Group,
    name: str,
    x: Tensor,
    dim: int | None = None,
    valid: Callable[[], object] | None = None,
    **facts: Hashable,
) -> list[int] | None:
    """Verifies an eager call if the group's level requires it.

    Args:
        dim: the dim along which the ranks' sizes may differ; with `size=None`, the ranks exchange
            them at every level.
        valid: raises if this call is invalid.
        facts: the arguments, the same on all ranks; names that end in `dim` are dims of `x`.

    Returns:
        all ranks' sizes along `dim`; None if they were not exchanged.

    Raises:
        DistributedError: the ranks' calls differ.
        InputError: the dim is out of range.
    """
    check_tensor(group, name, x)
    verified = group.handshake.verified_calls
    key = (name, dim, x.dtype, x.shape, needs_gradient(x), *facts.values())
    asks_sizes = dim is not None and facts["size"] is None and group.size > 1
    if key in verified and not verifies_each(group, x.device) and not asks_sizes:
        note_unverified(group, f"{name} {type_text(x.dtype, [])} {facts}")
        return None

    def describe() -> str:
        if valid is not None:
            valid()
        return _signature(name, x, dim, facts)

    sizes = None
    if announces(group) and dim is None:
        announce(group, describe)
    elif asks_sizes or group.level is not CheckLevel.OFF:
        own_size = (lambda: 0) if dim is None else (lambda: x.shape[dim])
        sizes = verify_call(group, describe, own_size, symmetric=name not in ONE_SIDED)
    else:
        describe()  # this rank's own mistakes raise at every level
    if not asks_sizes:
        remember(verified, key)
    return sizes


def _signature(name: str, x: Tensor, dim: int | None, facts: Mapping[str, object]) -> str:
    """Returns 'gather(dim=1) of f32[2,*]': a call's signature, with * for sizes that may differ.

    Raises:
        InputError: the dim is out of range.
    """
    arguments: dict[str, object] = {"dim": dim, **facts}
    dims = [own_dim(x, d) for argument, d in arguments.items() if argument.endswith("dim") and d is not None]
    shape: list[object] = list(x.shape)
    if dim is not None:
        shape[dims[0]] = "*"
    shown = ", ".join(f"{argument}={fact}" for argument, fact in arguments.items() if fact is not None)
    gradient = ", with a gradient" if needs_gradient(x) else ""
    return f"{name}({shown}) of {type_text(x.dtype, shape)}{gradient}"


def whole_size(name: str, x: Tensor, dim: int, size: int | None, sizes: list[int] | None, group: Group) -> int:
    """Returns the global size along a dim.

    Args:
        size: the size, if known.
        sizes: the size of each rank's slice, if known.

    Raises:
        InputError: the ranks' sizes don't form a split.
    """
    if sizes is None and size is None:
        return int(x.shape[dim] * group.size)
    if sizes is None:
        _check_size(name, x, dim, cast(int, size), group)
        return cast(int, size)
    total = sum(sizes) if size is None else size
    expected = [local_size([(total, 1)], rank, group.size) for rank in range(group.size)]
    if sizes != expected:
        group.handshake.forget()
        raise InputError(
            f"slices of sizes {sizes} are not those of a split of {total} over {group.size} ranks",
            where=f"{name}, dim {dim}, {call_site()}",
            why=f"torch.chunk's rule, by which scatter splits, gives {expected}",
            attempt="slices that scatter made; all_gather_uneven for tensors of any shapes",
        )
    return total


def _check_size(name: str, x: Tensor, dim: int, size: int, group: Group) -> None:
    """Raises InputError if this rank's slice is not part of a split of `size`; sends nothing."""
    if group.size == 1 or torch.compiler.is_compiling():
        return
    expected = local_size([(size, 1)], group.rank, group.size)
    if x.shape[dim] != expected:
        raise InputError(
            f"a slice of size {x.shape[dim]} is not that of a split of {size} over {group.size} ranks",
            where=f"{name}, dim {dim}, {call_site()}",
            why=f"torch.chunk's rule, by which scatter splits, gives rank {group.rank} {expected}",
            attempt="the size of all ranks' slices together, or no size=",
        )


def own_dim(x: Tensor, dim: object) -> int:
    """Returns a dim counted from the front.

    Raises:
        InputError: the dim is out of range.
    """
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise InputError(
            f"a tensor of {x.ndim} dims has no dim {dim!r}",
            where="dim=",
            why=f"its shape is {tuple(x.shape)}",
            attempt=f"{-x.ndim} to {x.ndim - 1}" if x.ndim else "a tensor with dims, or dim=None where that is allowed",
        )
    return dim % x.ndim


def fill(x: Tensor, value: Tensor) -> Tensor:
    """Copies values into a tensor and returns it.

    An expanded tensor is filled once per element; the values are returned instead of it.
    """
    target, source = x, value
    for dim in (repeated := _repeated(x)):
        target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    with torch.no_grad():
        target.copy_(source)
    return value if repeated else x


def check_memory(name: str, x: Tensor) -> None:
    """Raises InputError for a tensor that can't be filled because its elements share memory."""
    if _repeated(x):
        raise InputError(
            "a tensor can't be filled if several of its elements share memory",
            where=name,
            why=f"its shape is {tuple(x.shape)}, its strides are {x.stride()}",
            attempt=f"{name}(x.contiguous())",
        )


def _repeated(x: Tensor) -> list[int]:
    """Returns the dims along which a tensor is expanded: all elements share memory."""
    return [dim for dim in range(x.ndim) if x.stride(dim) == 0 and x.shape[dim] > 1]
