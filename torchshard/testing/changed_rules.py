"""Changes rules for the duration of one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchshard.custom_ops.whole import OpKey
from torchshard.rules import RULES
from torchshard.rules.registry import RuleFn


def ops_with_rules() -> set[OpKey]:
    """Returns the ops with a registered rule, built-in or a user's; many elementwise ops are split by tag instead."""
    return set(RULES)


@contextmanager
def changed_rule(op: OpKey, rule: RuleFn | None) -> Iterator[None]:
    """Replaces or removes the rule of an op within a block.

    with testing.changed_rule(torch.ops.aten.relu.default, lambda call: call.row("a b -> a b")):
        ...
    """
    before = RULES.get(op)
    _register(op, rule)
    try:
        yield
    finally:
        _register(op, before)


def _register(op: OpKey, rule: RuleFn | None) -> None:
    if rule is None:
        RULES.pop(op, None)
    else:
        RULES[op] = rule
