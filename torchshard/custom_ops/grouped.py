"""The op `grouped_mm`: `torch._grouped_mm` with a fake kernel for any dtype, not only bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchshard.core.types import Context


@torch.library.custom_op(
    "torchshard::grouped_mm", mutates_args=(), schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor"
)
def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiplies each group of rows by a matrix of its own: `f32[9,8], f32[3,8,16], i32[3] -> f32[9,16]`."""
    result = x.new_zeros(x.shape[0], weight.shape[2])
    for rows, matrix in zip(_groups(offs), weight, strict=True):
        result[rows] = x[rows] @ matrix
    return result


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op(
    "torchshard::grouped_mm_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor input, Tensor weight, Tensor offs) -> (Tensor, Tensor)",
)
def grouped_mm_backward(grad: Tensor, x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the rows and of the matrices."""
    of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for i, rows in enumerate(_groups(offs)):
        of_x[rows], of_weight[i] = grad[rows] @ weight[i].mT, x[rows].mT @ grad[rows]
    return of_x, of_weight


@grouped_mm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _groups(offs: Tensor) -> Iterator[slice]:
    start = 0
    for end in offs.tolist():
        yield slice(start, end)
        start = end


def _backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *grouped_mm_backward(grad, *ctx.saved_tensors), None


grouped_mm.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
GROUPED_MM = torch.ops.torchshard.grouped_mm.default
