"""Checks the rule of an op under every choice that it allows, and changes rules for the duration of one test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchshard.checking.report import Report
from torchshard.core.errors import RuleError, ShardError, in_short
from torchshard.core.rows import Choice
from torchshard.custom_ops.fx_types import Argument, Target
from torchshard.custom_ops.whole import OpKey
from torchshard.rules import RULES
from torchshard.rules.registry import RuleFn
from torchshard.testing.one_op import OpCall


def check_rule(op: Target, *args: Argument, ranks: Sequence[int] = (2, 3), **kwargs: Argument) -> list[Choice]:
    """Compares an op, split under every choice of its rule, with the full op: results and input gradients.

        testing.check_rule(torch.ops.mine.scale.default, torch.randn(5, 7, dtype=torch.float64, requires_grad=True), 2)

    Sizes of five and seven split unevenly over two and three ranks; a size of one leaves ranks with empty slices.

    Args:
        op: an overload of an operator with a rule (`torchshard.rule`).
        args, kwargs: its arguments. A `torch.nn.Buffer` is a buffer of the model, which the op may write to.
        ranks: the numbers of ranks.

    Returns:
        the choices that were compared, among them `split a` for each factor `a` that may be split.

    Raises:
        RuleError: the op lacks a rule for this call, or fails under one of its choices.
        CheckError: a value differs under one of the choices; the error names the choice, the value and the difference.
    """
    call, compared = OpCall(op, args, kwargs), list[Choice]()
    for number in ranks:
        row, found = call.row_and_choices(number)
        if row is None:
            raise RuleError(
                f"{op} has no rule for this call",
                where="testing.check_rule",
                why="without a rule an op runs on full operands, so nothing is split",
                attempt="@torchshard.rule(op) before it; a rule returns a row, and None for calls it does not support",
            )
        for choice in found:
            _checked(call, choice, number).raise_on_error()
        compared += found
    return list({choice.name: choice for choice in compared}.values())


def _checked(call: OpCall, choice: Choice, ranks: int) -> Report:
    try:
        return call.check(choice, ranks)
    except ShardError:
        raise
    except Exception as error:  # the op fails on operands that its rule made too small or too large
        raise RuleError(
            f"{call.target} fails under {choice.name!r}",
            where=f"testing.check_rule, one of {ranks} ranks",
            why=in_short(error),
            attempt="a row that splits fewer axes, or with `local=`, what a rank computes for it",
        ) from error


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
