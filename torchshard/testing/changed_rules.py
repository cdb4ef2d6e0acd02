"""Rules that hold for one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchshard.custom_ops.whole import OpKey
from torchshard.rules import RULES
from torchshard.rules.registry import RuleFn


def ops_with_rules() -> set[OpKey]:
    """The ops with a rule of their own, of the library or of a user; elementwise ops by their tag have none."""
    return set(RULES)


@contextmanager
def changed_rule(op: OpKey, rule: RuleFn | None) -> Iterator[None]:
    """Gives an op another rule, or none, within a block.

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
