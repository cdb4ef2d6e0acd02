"""Collectives where producer and consumer disagree, one per edge; `simplify` then makes one of those that are alike.

before    q = linear(x, q_weight)                      x I, wanted R
after     x_copy = copy(x); q = linear(x_copy, q_weight)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchshard.conversions import route, step_args
from torchshard.distributed.groups import MODEL
from torchshard.errors import InternalError
from torchshard.graph import global_shape, is_tensor, is_tensor_op, layout_of, name_after, operands, where
from torchshard.layouts import I, Layout

aten = torch.ops.aten


def insert(module: fx.GraphModule) -> bool:
    """Inserts the collectives; returns whether there were any to insert."""
    before = len(module.graph.nodes)
    for node in list(module.graph.nodes):
        if is_tensor_op(node):
            wanted = node.meta["choice"].operands
        elif node.op == "output":
            wanted = (I,) * len([n for n in _flat(node.args) if is_tensor(n)])
        else:
            continue
        _convert_operands(module, node, wanted)
    return len(module.graph.nodes) != before


def _flat(args: Any) -> list[Any]:
    found: list[Any] = []
    fx.map_arg(args, found.append)
    return found


def _convert_operands(module: fx.GraphModule, node: fx.Node, wanted: tuple[Layout, ...]) -> None:
    places = operands(node) if node.op != "output" else [n for n in _flat(node.args) if is_tensor(n)]
    targets = iter(zip(places, wanted, strict=True))
    replaced: list[tuple[fx.Node, fx.Node]] = []
    with module.graph.inserting_before(node):
        for operand, layout in targets:
            replaced.append((operand, convert(module, operand, layout, node)))
    if all(a is b for a, b in replaced):
        return
    upcoming = iter(replaced)

    def swap(value: fx.Node) -> fx.Node:
        return next(upcoming)[1] if is_tensor(value) else value

    if node.op == "output":
        node.args = fx.map_arg(node.args, swap)
        return
    node.args, node.kwargs = _swap_in_schema_order(node, swap)


def _swap_in_schema_order(node: fx.Node, swap: Any) -> tuple[Any, Any]:
    """Positional arguments come first in a schema too, so args then kwargs is the order of `operands`."""
    return fx.map_arg(node.args, swap), fx.map_arg(_ordered_kwargs(node), swap)


def _ordered_kwargs(node: fx.Node) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else list(node.kwargs)
    return {name: node.kwargs[name] for name in names if name in node.kwargs}


def convert(module: fx.GraphModule, value: fx.Node, target: Layout, consumer: fx.Node) -> fx.Node:
    """The collective nodes that bring a value to a layout, before the insertion point."""
    needs_grad = bool(value.meta.get("needs_grad"))
    steps = route(layout_of(value), target, needs_grad=needs_grad)
    if steps is None:
        raise InternalError(
            f"no conversion leads from {layout_of(value)} to {target}",
            where=where(value),
            why=f"wanted by {consumer.name}",
        )
    for name, layout in steps:
        source = layout_of(value)
        args = step_args(name, source, layout, global_shape(value))
        made = module.graph.call_function(getattr(torch.ops.torchshard, name).default, (value, *args, MODEL))
        name_after(made, f"{value.name}_{name}")
        made.meta = {
            "val": value.meta["val"],
            "layouts": (layout,),
            "needs_grad": needs_grad,
            "module": consumer.meta.get("module", ""),
            "source": consumer.meta.get("source", ""),
            "note": f"{source} -> {layout}, for {consumer.name if consumer.op != 'output' else 'the result'}",
        }
        value = made
    return value
