"""A call whose batch the ranks divide: this rank's part of the arguments, and what becomes of its part of the results.

inputs="local"     each rank passes its part, and gets its part of results with the batch
inputs="global"    each passes the whole batch, and gets whole results

Of parts of results each rank computes a loss of its own. The mean of these is trained, as in DistributedDataParallel:
their gradient is divided by the number of ranks. (A loss that forward itself computes is that of the whole batch.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard.core.conversions import step_args
from torchshard.core.layouts import I, Layout, Shard
from torchshard.distributed.group import Group
from torchshard.distributed.ops import direct, hashable

_OPS = torch.ops.torchshard


def own_parts(whole: Mapping[str, Tensor], layouts: Mapping[str, Layout], group: Group) -> list[Tensor]:
    """This rank's parts of a call's tensors that have the batch, and the others; gradients are those of the whole."""
    found = []
    for name, tensor in whole.items():
        layout = layouts.get(name, I)
        if isinstance(layout, Shard):
            args = hashable(step_args(I, layout, tensor.shape))
            tensor = direct(_OPS.scatter.default)(tensor, *args, group.name)
        found.append(tensor)
    return found


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
        _joined(result, layout, group) if isinstance(layout, Shard) and isinstance(result, Tensor) else result
        for result, layout in zip(results, layouts, strict=True)
    ]


def _joined(part: Tensor, layout: Shard, group: Group) -> Tensor:
    whole = [size * (group.size if dim == layout.dim else 1) for dim, size in enumerate(part.shape)]
    return direct(_OPS.gather.default)(part, *hashable(step_args(layout, I, whole)), group.name)


class _Average(torch.autograd.Function):
    """Its result is its operand; the gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
