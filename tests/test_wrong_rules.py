"""The oracle can fail: wrong rules and tampered collectives are caught."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

import torchshard as ts
from tests.op_cases.notation import case, f, ids
from tests.oracle import Case, build, row_and_choices, run
from tests.test_rules import aten
from torchshard.testing import (
    Choice,
    PlannedCall,
    changed_rule,
    collective,
)

# --- the oracle can fail ---------------------------------------------------------------------------------------------


def _row(text: str, **options: Any) -> Any:
    return lambda call: call.row(text, **options)


WRONG_RULES = [
    ("a split axis of a norm", case(aten.layer_norm.default, None, f(5, 4), [4]), _row("a b -> a b")),
    ("a scan along a split axis", case(aten.cumsum.default, None, f(5, 4), 1), _row("a b -> a b")),
    ("a mean of means", case(aten.mean.dim, None, f(5, 4), [1]), _row("a b -> a")),
    ("a table split without masks", case(aten.embedding.default, None, f(5, 4), ids(5, 7)), _row("v e, a -> a e")),
    ("a bias added by every rank", case(aten.linear.default, None, f(5, 4), f(3, 4), f(3)), _row("a k, n k, n -> a n")),
    ("a nonlinear op of addends", case(aten.relu.default, None, f(5, 4)), _row("a b -> a b", linear=[{0}])),
    ("a sum with a whole of a Partial", case(aten.add.Tensor, None, f(4), f(4)), _row("a, a -> a", linear=[{0}])),
    ("a mask per rank", case(aten.dropout.default, None, f(5, 4), 0.5, True), _row("a b -> a b")),
    ("copies in the wrong order", case(aten.repeat.default, None, f(4), [3]), _row("a -> (a r)", sizes={"r": 3})),
    ("dims swapped", case(aten.transpose.int, None, f(4, 4), 0, 1), _row("a b -> a b")),
    ("a size of the whole", case(aten.expand.default, None, f(5, 1), [5, 4]), _row("a 1 -> a b")),
    ("a target split alone", case(aten.gather.default, None, f(4, 5), 1, ids(5, 4, 3)), _row("a v, a i -> a i")),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("op", "wrong"), [w[1:] for w in WRONG_RULES], ids=[w[0] for w in WRONG_RULES])
def test_a_wrong_rule_is_caught(op: Case, wrong: Any) -> None:
    assert all(run(op, choice, 2).ok for choice in row_and_choices(op, 2)[1])
    with changed_rule(op.target, wrong):
        assert not all(_holds(op, choice) for choice in row_and_choices(op, 2)[1])


def _holds(op: Case, choice: Choice) -> bool:
    try:
        return run(op, choice, 2).ok
    except (ts.RuleError, RuntimeError, IndexError):  # a wrong rule may also raise
        return False


SABOTAGED = [
    (case(aten.linear.default, None, f(5, 6), f(4, 6)), "split n"),
    (case(aten.linear.default, None, f(5, 6), f(4, 6)), "split k"),
    (case(aten.softmax.int, None, f(5, 4), 1), "split b"),
    (case(aten.embedding.default, None, f(5, 4), ids(5, 3, 7)), "split v"),
    (case(aten.mul.Tensor, None, f(5, 4), f(4)), "P"),
    (case(aten.exp.default, None, f(5, 4)), "R"),
]


@pytest.mark.parametrize(("op", "name"), SABOTAGED, ids=[f"{c.target}-{n}" for c, n in SABOTAGED])
def test_every_tampered_collective_is_caught(op: Case, name: str) -> None:
    _, found = row_and_choices(op, 2, in_parts=False)
    choice = next(c for c in found if c.name == name)
    made = build(op, choice, 2)
    assert made.check().ok
    tampered = list(_tampered(made))
    assert tampered
    for what, graph in tampered:
        report = made.check(graph)
        assert not report.ok and report.diverges_at, what


def _tampered(made: PlannedCall) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yields the graph with one collective dropped, replaced by another kind, or applied to other elements.

    Collectives before a sum over a stack of addends keep their elements, because the sum would not change.
    """
    names = {n.name for n in made.graph.graph.nodes}
    same_shape = {"copy": "all_reduce", "reduce": "all_reduce", "all_reduce": "reduce"}
    for position, node in enumerate(made.graph.graph.nodes):
        row = collective(node)
        if row is None:
            continue
        held = row.name
        if held in same_shape:
            yield f"{node.name} dropped", _edited(made, position, None)
            yield f"{node.name} as {same_shape[held]}", _edited(made, position, same_shape[held])
        if held in ("scatter", "narrow", "gather") and f"{node.args[0].name}_sum" not in names:
            size, first = node.args[2][0], 2 + node.args[2][0] % 2
            yield f"{node.name} in other parts", _edited(made, position, held, parts=[first, 1, size - first, 1])


def _edited(made: PlannedCall, position: int, name: str | None, parts: Any = None) -> fx.GraphModule:
    held = made.graph_copy()
    node = list(held.graph.nodes)[position]
    if name is None:
        node.replace_all_uses_with(node.args[0])
        held.graph.erase_node(node)
    else:
        node.target = getattr(torch.ops.torchshard, name).default
        node.args = node.args if parts is None else (*node.args[:2], parts, *node.args[3:])
    held.recompile()
    return held
