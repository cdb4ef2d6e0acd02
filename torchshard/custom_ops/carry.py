"""`carry(x)` is x, where a call leaves it for the next one: in a cache, or in another object that an argument holds.

The op gives such a value a choice of its own: it may stay split, as its consumers take it, while the results of a call
are whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define("torchshard::carry", "(Tensor(a) x) -> Tensor(a)")


@torch.library.impl("torchshard::carry", "CompositeImplicitAutograd")
def _carry(x: Tensor) -> Tensor:
    return x.view_as(x)


CARRY = torch.ops.torchshard.carry.default
