"""The plan onto the graph: every op gets its choice, every value its layouts.

before    q = linear(x, q_weight)      f32[2,8,8]
after     q = linear(x, q_weight)      f32[2,8,8]  S(2)     split n: ... k, n k -> ... n
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from torchshard.core.errors import PlanError
from torchshard.core.layouts import I, Shard
from torchshard.core.mesh import MeshAxis
from torchshard.core.notation import Choice, Row, choices
from torchshard.ir.graph import is_tensor_op, node_row, where, whole_choice
from torchshard.plans.plan import Plan


def annotate(module: fx.GraphModule, plan: Plan) -> bool:
    """Sets meta 'layouts', 'choice' and 'row'; always a change.

    Raises:
        PlanError: the plan has no choice for an op, or one that is not legal for it.
    """
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta["layouts"] = (plan.parameters.get(node.meta["path"], I),)
        elif is_tensor_op(node):
            row = node_row(node)
            node.meta["row"] = row
            node.meta["choice"] = planned_choice(node, row, plan)
            node.meta["layouts"] = node.meta["choice"].results
        elif node.target is operator.getitem:
            source: Any = node.args[0]
            held = source.meta.get("layouts", ())
            node.meta["layouts"] = (held[node.args[1]],) if len(held) > node.args[1] else (I,)
        elif node.op == "call_function":
            node.meta["layouts"] = (I,)
    return True


def legal_choices(node: fx.Node, row: Row | None, axis: MeshAxis, planned: Choice) -> Iterable[Choice]:
    """The choices that a row allows, in the parts that the planned one has."""
    if row is None:
        return [whole_choice(node)]
    held = enumerate(zip((*planned.operands, *planned.results), (*row.operands, *row.results), strict=False))
    splits = [(i, layout) for i, (layout, dims) in held if isinstance(layout, Shard) and layout.dim < len(dims)]
    return choices(row, axis.size, splits)


def planned_choice(node: fx.Node, row: Row | None, plan: Plan) -> Choice:
    """What the plan chooses for an op.

    Raises:
        PlanError: nothing, or something that is not legal for it.
    """
    planned = plan.choices.get(node.name)
    if planned is None:
        raise PlanError(
            "the plan has no choice for an op of the model",
            where=where(node),
            why="it was made for another model, another mode (train or eval) or other inputs",
            attempt="make the plan anew, or give a dict of module styles",
        )
    for choice in legal_choices(node, row, plan.axis, planned):
        same_layouts = (choice.operands, choice.results) == (planned.operands, planned.results)
        if choice.name == planned.name and same_layouts:
            return choice
    shown = ", ".join(map(str, planned.operands))
    raise PlanError(
        f"the plan's choice {planned.name!r} is not legal for an op",
        where=where(node),
        why=f"its operands would lie as {shown}; the op's row is {row.text if row else 'missing: it runs whole'}",
        attempt="make the plan anew for this model and this version of torchshard",
    )
