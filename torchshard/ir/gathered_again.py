"""Chooses the values that backward gathers again instead of saving them.

Slices of a split sequence are gathered before a product with a weight, and the weight's gradient
needs the gathered value. Saving it would cost the memory of an unsplit sequence, so each rank
saves its slice and backward gathers again, as in Megatron-LM (V. Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, 2022, 4.2). Weights stored as slices are
gathered again too (S. Rajbhandari et al., ZeRO, 2020, 5.3; FSDP2's `reshard_after_forward`), unless
the plan gathers them once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from torchshard.core.conversions import TABLE, ConversionStep
from torchshard.core.layouts import Shard
from torchshard.ir.fake_values import size_expr
from torchshard.ir.graph import before_casts, is_weight, operands
from torchshard.rules.convolution import CONVOLUTIONS

aten = torch.ops.aten
MULTIPLIED = {aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default, *CONVOLUTIONS}
"""Ops that multiply their first two operands: one's gradient needs the other. A bias is added."""


def dims_gathered_again(value: fx.Node, consumers: Iterable[fx.Node]) -> frozenset[int]:
    """Returns the dims of a value along which backward gathers it again.

    All dims of a weight, unless it is gathered once; the dynamic dims of other values. Empty if no
    consumer saves the value.
    """
    if not any(_keeps(consumer, value) for consumer in consumers):
        return frozenset()
    if is_weight(weight := before_casts(value)):
        return frozenset() if weight.meta.get("gathered_once") else frozenset(range(value.meta["val"].ndim))
    sizes = map(size_expr, value.meta["val"].shape) if value.meta.get("needs_grad") else ()
    return frozenset(dim for dim, size in enumerate(sizes) if not isinstance(size, int))


def is_gathered_again(step: ConversionStep, dims: Collection[int]) -> bool:
    """Returns whether backward repeats a conversion: an all-gather along one of `dims`."""
    source = step.source
    return isinstance(source, Shard) and source.dim in dims and TABLE[step.name].kernel == "all_gather"


def _keeps(consumer: fx.Node, value: fx.Node) -> bool:
    """Returns whether an op needs `value` for the gradient of its other operand."""
    factors = operands(consumer)[:2] if consumer.target in MULTIPLIED else []
    return value in factors and any(other.meta.get("needs_grad") for other in factors if other is not value)
