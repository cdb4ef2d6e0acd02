"""Tensors made inside the model (positions, masks): every rank makes the whole, which costs no communication.

They need no gradient, so a split op takes its slice of them for free.
"""

from __future__ import annotations

import torch

from torchshard.core.notation import Row
from torchshard.rules.registry import Call, block, letters, rule, spaced

aten = torch.ops.aten


@rule(
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default,
    aten.full.default, aten.empty.memory_format, aten.scalar_tensor.default, aten.eye.default, aten.eye.m,
    aten.linspace.default, aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low,
)  # fmt: skip
def creation(call: Call) -> Row:
    """`-> i64[8]     -> !a`."""
    ndim = len(call.results[0].shape)
    return call.row(f" -> {spaced(block(letters(ndim), range(ndim)))}")
