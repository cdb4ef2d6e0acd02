"""`carry(x)` marks x as a carried value: a call leaves it in an argument, such as a cache, for the
next.

The op gives such a value a choice of its own: it may stay split, as its consumers use it, while the
results of a call are unsharded.
"""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define("torchshard::carry", "(Tensor(a) x) -> Tensor(a)")


@torch.library.impl("torchshard::carry", "CompositeImplicitAutograd")
def _carry(x: Tensor) -> Tensor:
    return x.view_as(x)


CARRY = torch.ops.torchshard.carry.default
