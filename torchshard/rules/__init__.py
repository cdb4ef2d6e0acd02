"""Rules: how each op may be split. One file per family; `row_of` finds an op's row."""

from torchshard.notation import Row
from torchshard.rules import (
    attention,
    convolution,
    creation,
    indexing,
    linear_algebra,
    losses,
    normalization,
    pointwise,
    random,
    reductions,
    shapes,
)
from torchshard.rules.random import is_random
from torchshard.rules.registry import RULES, Call, TensorType, rule

__all__ = ["RULES", "Call", "Row", "TensorType", "is_random", "row_of", "rule"]

FAMILIES = (
    attention, convolution, creation, indexing, linear_algebra, losses, normalization, pointwise, random, reductions,
    shapes,
)  # fmt: skip


def row_of(call: Call) -> Row | None:
    """The row of an op for these shapes, or None where it has no rule: it then runs on Invariant operands."""
    if call.target in RULES:
        return RULES[call.target](call)
    return pointwise.pointwise(call) if pointwise.is_pointwise(call.target) else None
