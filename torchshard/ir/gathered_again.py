"""Which values backward gathers again, in place of keeping what was gathered.

Slices of a split sequence are gathered to be multiplied with weights, whose gradients need what was gathered. Kept, it
would take as much memory as if the sequence were not split; so a rank keeps its slice, and backward gathers again, as
Megatron-LM does (V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, 4.2). So
it is with weights of which each rank holds a slice (S. Rajbhandari et al., ZeRO, 2020, 5.3; FSDP2's
`reshard_after_forward`), unless they are to be gathered once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from torchshard.core.conversions import TABLE, ConversionStep
from torchshard.core.layouts import Shard
from torchshard.ir.graph import before_casts, is_weight, operands, size_expr
from torchshard.rules.convolution import CONVOLUTIONS

aten = torch.ops.aten
MULTIPLIED = {aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default, *CONVOLUTIONS}
"""Ops that multiply their first two operands: the gradient of one needs the other. A bias is added."""


def dims_gathered_again(value: fx.Node, consumers: Iterable[fx.Node]) -> frozenset[int]:
    """The dims of a value along which backward gathers again what some consumers take: all of a weight's, dynamic ones
    of other values."""
    if not any(_keeps(consumer, value) for consumer in consumers):
        return frozenset()
    if is_weight(weight := before_casts(value)):
        return frozenset() if weight.meta.get("gathered_once") else frozenset(range(value.meta["val"].ndim))
    sizes = map(size_expr, value.meta["val"].shape) if value.meta.get("needs_grad") else ()
    return frozenset(dim for dim, size in enumerate(sizes) if not isinstance(size, int))


def is_gathered_again(step: ConversionStep, dims: Collection[int]) -> bool:
    """Whether backward runs a conversion again, for these are the dims along which it does."""
    source = step.source
    return isinstance(source, Shard) and source.dim in dims and TABLE[step.name].kernel == "all_gather"


def _keeps(consumer: fx.Node, value: fx.Node) -> bool:
    """Whether the gradient of an op's other factor needs a value."""
    factors = operands(consumer)[:2] if consumer.target in MULTIPLIED else []
    return value in factors and any(other.meta.get("needs_grad") for other in factors if other is not value)
