"""The op `store(x, value)` writes to a parameter, like a forward under `no_grad` or through `.data`.

    before    w_detach = detach(w); mul_(w_detach, 0.9)
    after     w_detach = detach(w); mul = mul(w_detach, 0.9); store(w, mul)

`copy_` would fail: autograd refuses in-place writes to a leaf that requires a gradient, and a graph
runs in the single grad mode of its call.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("torchshard::store", mutates_args=("x",), schema="(Tensor(a!) x, Tensor value) -> ()")
def store(x: Tensor, value: Tensor) -> None:
    """Writes `value` to `x`, which has the same shape and dtype; gradients do not pass."""
    x.copy_(value)


@store.register_fake
def _(x: Tensor, value: Tensor) -> None:
    pass


STORE = torch.ops.torchshard.store.default
