"""Rules: how each op may be split. One file per family; `row_of` finds an op's row."""

from collections.abc import Mapping
from typing import Any

from torchshard.core.errors import RuleError, ShardError
from torchshard.core.notation import Row
from torchshard.rules import (
    attention,
    batched,
    convolution,
    creation,
    indexing,
    linear_algebra,
    losses,
    normalization,
    pointwise,
    random,
    recurrent,
    reductions,
    shapes,
)
from torchshard.rules.normalization import writes_statistics
from torchshard.rules.random import is_random
from torchshard.rules.registry import ROWS, RULES, Call, RuleFn, TensorType, rule, rule_of

__all__ = ["RULES", "Call", "Row", "TensorType", "has_rule", "is_random", "row_of", "rule", "writes_statistics"]

FAMILIES = (
    attention, batched, convolution, creation, indexing, linear_algebra, losses, normalization, pointwise, random,
    recurrent, reductions, shapes,
)  # fmt: skip


def has_rule(target: Any) -> bool:
    """Whether an op has one, though perhaps not for all arguments."""
    return rule_of(target) is not None or pointwise.is_pointwise(target)


def row_of(call: Call) -> Row | None:
    """The row of an op for these shapes, or None where it has no rule: it then runs on Invariant operands."""
    found = rule_of(call.target) or (pointwise.pointwise if pointwise.is_pointwise(call.target) else None)
    if found is None:
        return None
    key = (found, call.target, _frozen(call.args), call.results)
    if key not in ROWS:
        if len(ROWS) >= MOST_ROWS:
            ROWS.clear()
        ROWS[key] = _ruled(found, call)
    return ROWS[key]


MOST_ROWS = 1 << 16
"""As many rows are kept: those of one model are few thousand, but a process may shard many."""


def _ruled(found: RuleFn, call: Call) -> Row | None:
    try:
        return found(call)
    except ShardError:
        raise
    except Exception as error:
        shapes = ", ".join(str(list(t.shape)) for t in call.tensors)
        raise RuleError(
            f"the rule of {call.target} fails",
            where=f"{found.__module__}.{found.__name__}",
            why=f"{type(error).__name__}: {error}; of tensors of {shapes or 'no shape'}",
            attempt="a rule gives a row, or None for arguments that it has none for",
        ) from error


def _frozen(value: Any) -> Any:
    """An argument as a key; 1, 1.0 and True are three."""
    if isinstance(value, Mapping):
        return tuple((name, _frozen(held)) for name, held in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return type(value), value
