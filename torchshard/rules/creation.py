"""Ops that create tensors inside the model (positions, masks): every rank creates the full tensor.

This needs no communication. Since such tensors need no gradient, an op that requires a slice takes
it locally.
"""

from __future__ import annotations

import torch

from torchshard.core.rows import Row
from torchshard.rules.registry import Call, letters, rule, spaced, unsplittable

aten = torch.ops.aten


@rule(
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default,
    aten.full.default, aten.empty.memory_format, aten.scalar_tensor.default, aten.eye.default, aten.eye.m,
    aten.linspace.default, aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low,
)  # fmt: skip
def creation(call: Call) -> Row:
    """`-> i64[8]     -> !a`."""
    ndim = len(call.results[0].shape)
    return call.row(f" -> {spaced(unsplittable(letters(ndim), range(ndim)))}")
