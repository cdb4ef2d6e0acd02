"""The conversions by hand, on this process's model-parallel group; outside any group all of them give their input.

    y = copy(x)                 # I -> R   forward nothing,        backward all-reduce
    y = reduce(x)               # P -> I   forward all-reduce,     backward nothing
    y = gather(x, dim)          # S -> I   forward all-gather,     backward keep own slice
    y = scatter(x, dim)         # I -> S   forward keep own slice, backward all-gather

A dim that does not divide by the group is split by `torch.chunk`'s rule. The calls that begin from a Shard need its
global size where it is not the group size times this rank's: pass `size=`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchshard.distributed.groups import MODEL, get_group_size, is_initialized

_ops = torch.ops.torchshard


def _dim(x: Tensor, dim: int) -> int:
    return dim + x.ndim if dim < 0 else dim


def _whole(x: Tensor, dim: int, size: int | None) -> list[int]:
    return [x.shape[dim] * get_group_size() if size is None else size, 1]


def copy(x: Tensor) -> Tensor:
    """I -> R: the same value; the gradients of all ranks are summed.

    Source: Megatron's `copy_to_tensor_model_parallel_region`.
    """
    return _ops.copy(x, MODEL) if is_initialized() else x


def reduce(x: Tensor) -> Tensor:
    """P -> I: the sum over the ranks; the gradient passes.

    Source: Megatron's `reduce_from_tensor_model_parallel_region`.
    """
    return _ops.reduce(x, MODEL) if is_initialized() else x


def all_reduce(x: Tensor) -> Tensor:
    """P -> R: the sum over the ranks; the gradients of all ranks are summed too."""
    return _ops.all_reduce(x, MODEL) if is_initialized() else x


def scatter(x: Tensor, dim: int | None = -1) -> Tensor:
    """I -> S(dim): this rank's slice; the gradient is gathered. `dim=None` splits nothing."""
    if dim is None or not is_initialized():
        return x
    return _ops.scatter(x, _dim(x, dim), [x.shape[dim], 1], MODEL)


def narrow(x: Tensor, dim: int = -1) -> Tensor:
    """R -> S(dim): this rank's slice; the gradient is padded with zeros, an addend of the whole."""
    return _ops.narrow(x, _dim(x, dim), [x.shape[dim], 1], MODEL) if is_initialized() else x


def gather(x: Tensor, dim: int | None = -1, *, size: int | None = None) -> Tensor:
    """S(dim) -> I: all ranks' slices joined; this rank keeps its slice of the gradient. `dim=None` joins nothing.

    Args:
        size: the global size of the dim, where it is not the group size times this rank's.
    """
    if dim is None or not is_initialized():
        return x
    return _ops.gather(x, _dim(x, dim), _whole(x, dim, size), MODEL)


def all_gather(x: Tensor, dim: int = -1, *, size: int | None = None) -> Tensor:
    """S(dim) -> R: all ranks' slices joined; the gradients are summed and scattered."""
    return _ops.all_gather(x, _dim(x, dim), _whole(x, dim, size), MODEL) if is_initialized() else x


def reduce_scatter(x: Tensor, dim: int = -1) -> Tensor:
    """P -> S(dim): this rank's slice of the sum over the ranks; the gradient is gathered."""
    return _ops.reduce_scatter(x, _dim(x, dim), [x.shape[dim], 1], MODEL) if is_initialized() else x


def all_to_all(x: Tensor, dim: int, to_dim: int, *, size: int | None = None) -> Tensor:
    """S(dim) -> S(to_dim): split along another dim; the gradient goes the way back."""
    if not is_initialized():
        return x
    own = _dim(x, dim)
    return _ops.all_to_all(x, own, _whole(x, own, size), _dim(x, to_dim), [x.shape[to_dim], 1], MODEL)
