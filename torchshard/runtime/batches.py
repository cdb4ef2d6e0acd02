"""A call whose batch the ranks divide: this rank's part of the arguments, and what becomes of its part of the results.

inputs="local"     each rank passes its part, and gets its part of results with the batch
inputs="global"    each passes the whole batch, and gets whole results

Of parts of results each rank computes a loss of its own. The mean of these is trained, as in DistributedDataParallel:
their gradient is divided by the number of ranks. (A loss that forward itself computes is that of the whole batch.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchshard.capture import Leaves
from torchshard.core.layouts import Layout, Shard, split
from torchshard.distributed.group import Group
from torchshard.distributed.kernels import gathered


def own_part(given: Leaves, layouts: Mapping[str, Layout], group: Group) -> Leaves:
    """A call with this rank's part of the tensors that have the batch, in place of the whole."""
    tensors = (_Part.apply(t, layouts[name], group) if name in layouts else t for name, t in given.named_tensors)
    return replace(given, tensors=tuple(tensors))


def averaged(results: Sequence[Any], layouts: Sequence[Layout], group: Group) -> list[Any]:
    """A graph's results; the gradient of a rank's part of the batch is divided by the number of ranks."""
    return [
        _Average.apply(result, group.size)
        if isinstance(layout, Shard) and isinstance(result, Tensor) and result.requires_grad
        else result
        for result, layout in zip(results, layouts, strict=True)
    ]


def joined(results: Sequence[Any], layouts: Sequence[Layout], group: Group) -> list[Any]:
    """A graph's results, those that have the batch whole: a collective call."""
    return [
        _Joined.apply(result, layout, group) if isinstance(layout, Shard) and isinstance(result, Tensor) else result
        for result, layout in zip(results, layouts, strict=True)
    ]


class _Average(torch.autograd.Function):
    """Its result is its operand; the gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class _Part(torch.autograd.Function):
    """This rank's slice of a tensor that all have whole; the gradients of all slices are joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Shard, group: Group) -> Tensor:
        ctx.of = layout, group
        return split(x, layout, group.rank, group.size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, *ctx.of), None, None


class _Joined(torch.autograd.Function):
    """The slices of all ranks in one tensor; its gradient, which all have, is sliced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Shard, group: Group) -> Tensor:
        ctx.of = layout, group
        return _gathered(x, layout, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        layout, group = ctx.of
        return split(gradient, layout, group.rank, group.size), None, None


def _gathered(x: Tensor, layout: Shard, group: Group) -> Tensor:
    whole = [size * (group.size if dim == layout.dim else 1) for dim, size in enumerate(x.shape)]
    return gathered(x, layout, whole, group)
