"""Sharding rules: how each op may be split, one file per family of ops. `row_of` gives a call's row."""

from collections.abc import Hashable, Mapping

import torch

from torchshard.core.errors import RuleError, ShardError
from torchshard.core.rows import Row
from torchshard.custom_ops.fx_types import Argument, Target
from torchshard.custom_ops.whole import WholeCall
from torchshard.rules import (  # noqa: F401, they register their rules
    attention,
    batched,
    collectives,
    convolution,
    creation,
    cuts,
    experts,
    gathered_reductions,
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

__all__ = [
    "RULES", "Call", "Row", "TensorType", "has_rule", "has_users_rule", "is_random", "row_of", "rule",
    "writes_statistics",
]  # fmt: skip


def has_rule(target: Target | str) -> bool:
    """Returns whether an op has a rule; the rule may still return no row for some arguments."""
    return rule_of(target) is not None or pointwise.is_pointwise(target)


OWN = frozenset(RULES.values())
"""The library's rules; all others are the user's."""


def has_users_rule(target: Target | str) -> bool:
    """Returns whether an op's rule is the user's, not the library's."""
    return (rule_fn := rule_of(target)) is not None and rule_fn not in OWN


def row_of(call: Call) -> Row | None:
    """Returns the row of a call. If it is None (no rule applies), the op runs on Invariant operands."""
    rule_fn = rule_of(call.target)
    if rule_fn is None and pointwise.is_pointwise(call.target):
        rule_fn = pointwise.pointwise
    if rule_fn is None:
        return None
    if isinstance(call.target, WholeCall):  # a WholeCall belongs to one graph, which a cache would keep alive
        return _apply_rule(rule_fn, call)
    key = (rule_fn, call.target, _frozen(call.args), call.results, call.multiples)
    if key not in ROWS:
        if len(ROWS) >= MAX_ROWS:
            ROWS.clear()
        ROWS[key] = _apply_rule(rule_fn, call)
    return ROWS[key]


MAX_ROWS = 1 << 16
"""The size at which the cache of rows is cleared: a model has a few thousand, a process many models."""


def _apply_rule(rule_fn: RuleFn, call: Call) -> Row | None:
    """Calls a rule, perhaps the user's. Any exception in it becomes a RuleError that names the rule."""
    try:
        row = rule_fn(call)
        if row is not None and not isinstance(row, Row):
            raise TypeError(f"it returns {row!r:.80}")  # reported like any other error in the rule
        return row
    except ShardError:
        raise
    except Exception as error:
        shapes = ", ".join(str(list(t.shape)) for t in call.tensors)
        raise RuleError(
            f"the rule of {call.target} fails",
            where=getattr(rule_fn, "__qualname__", repr(rule_fn)),
            why=f"{type(error).__name__}: {error}; tensors of shape {shapes or '(none)'}",
            attempt="a rule returns call.row(...), or None for arguments that it does not support",
        ) from error


def _frozen(value: Argument) -> Hashable:
    """Returns an argument as a cache key, with its type: 1, 1.0 and True are equal in Python."""
    if isinstance(value, Mapping):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):  # `==` would add a guard
        return type(value), value.node.expr
    return type(value), value
