"""The op `store(x, value)`, which writes to a parameter, as forward does under `no_grad` or through `.data`.

    before    w_detach = detach(w); mul_(w_detach, 0.9)
    after     w_detach = detach(w); mul = mul(w_detach, 0.9); store(w, mul)

`copy_` can't: autograd refuses a leaf that requires a gradient, and a graph runs in one grad mode, that of the call.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("torchshard::store", mutates_args=("x",), schema="(Tensor(a!) x, Tensor value) -> ()")
def store(x: Tensor, value: Tensor) -> None:
    """Writes `value` to `x`, which has the same shape and dtype; no gradient passes."""
    x.copy_(value)


@store.register_fake
def _(x: Tensor, value: Tensor) -> None:
    pass


STORE = torch.ops.torchshard.store.default
