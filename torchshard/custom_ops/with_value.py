"""One op for graphs that PyTorch has no functional name for: a tensor's values are replaced, its gradient goes on.

    before    h = linear(x, w); with torch.no_grad(): h.clamp_(-1, 1)
    after     h = linear(x, w); h_clamp = clamp(detach(h), -1, 1); h_1 = with_value(h, h_clamp)

Eager PyTorch does not record a write under `no_grad`, through `detach()` or `.data`: what is computed of the tensor
later sees the new values, and gradients pass to where the old ones came from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("torchshard::with_value", mutates_args=(), schema="(Tensor x, Tensor value) -> Tensor")
def with_value(x: Tensor, value: Tensor) -> Tensor:
    """`value`; its gradient is the gradient of `x`, of the same shape."""
    return value.clone()


@with_value.register_fake
def _(x: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


with_value.register_autograd(
    lambda ctx, grad: (grad, None),
    setup_context=lambda ctx, inputs, output: None,
)
WITH_VALUE: Any = torch.ops.torchshard.with_value.default
