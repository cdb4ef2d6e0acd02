"""The gradients of results that are a rank's part of the batch.

The mean of the losses that the ranks compute of their parts is trained, as in DistributedDataParallel: the gradient of
such a result is divided by the number of ranks. A loss that forward itself computes is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard.core.layouts import Layout, Shard


def averaged(results: Sequence[Any], layouts: Sequence[Layout], ranks: int) -> list[Any]:
    """A graph's results; the gradient of a rank's part of the batch is divided by the number of ranks."""
    return [
        _Average.apply(result, ranks)
        if isinstance(layout, Shard) and isinstance(result, Tensor) and result.requires_grad
        else result
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
