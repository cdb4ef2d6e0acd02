"""The op `with_value(x, value)`, a straight-through estimator: returns `value`, gives `x` its gradient.

    before    h = linear(x, w); with torch.no_grad(): h.clamp_(-1, 1)
    after     h = linear(x, w); h_clamp = clamp(detach(h), -1, 1); h_1 = with_value(h, h_clamp)

Graphs need it for writes that autograd does not record, under `no_grad`, through `detach()` or
`.data`. Later ops read the new values, and their gradients flow to the ops that computed the old
ones. PyTorch lacks a functional op for this.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("torchshard::with_value", mutates_args=(), schema="(Tensor x, Tensor value) -> Tensor")
def with_value(x: Tensor, value: Tensor) -> Tensor:
    """Returns a copy of `value`; its gradient is the gradient of `x`. Both have the same shape."""
    return value.clone()


@with_value.register_fake
def _(x: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


with_value.register_autograd(lambda ctx, grad: (grad, None), setup_context=lambda ctx, inputs, output: None)
WITH_VALUE = torch.ops.torchshard.with_value.default
