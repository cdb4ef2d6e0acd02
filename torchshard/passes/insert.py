"""Inserts collectives between producers and consumers that disagree about a layout.

before    q = linear(x, q_weight); k = linear(x, k_weight)                      x I, required as R by both
after     x_copy = copy(x); q = linear(x_copy, q_weight); k = linear(x_copy, k_weight)

The plan lists the conversions that give each value the layouts its consumers require. Each
conversion is inserted once for all of them: one `copy` instead of two also means one all-reduce of
the gradient instead of two. A conversion of a split value comes right after the op that computes
the value; any other comes before the first op that requires it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx
from torch.fx.node import Argument

from torchshard.core.conversions import ConversionStep, Steps, step_args
from torchshard.core.layouts import I, Layout, R, is_whole
from torchshard.ir.editing import name_after
from torchshard.ir.gathered_again import dims_gathered_again, is_gathered_again
from torchshard.ir.graph import OF_EARLIER_AXES, consumers, global_shape, is_carried, is_tensor, required_layouts


def insert(module: fx.GraphModule, planned: Mapping[str, Steps]) -> bool:
    """Inserts the collectives, under the name of the mesh axis; returns whether it inserted any.

    Args:
        planned: the conversions of each value, by its name: `Plan.conversions`.
    """
    before = len(module.graph.nodes)
    conversions = _Conversions(module, planned)
    for node in consumers(module.graph):
        _convert_operands(node, conversions)
    return len(module.graph.nodes) != before


def _convert_operands(node: fx.Node, conversions: _Conversions) -> None:
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for operand, layout in required_layouts(node, node.meta.get("choice")):
        replaced.append((operand, conversions.of(operand, layout, node)))
    if all(a is b for a, b in replaced):
        return
    upcoming = iter(replaced)

    def swap(value: fx.Node) -> fx.Node:
        return next(upcoming)[1] if is_tensor(value) and not (node.op == "output" and is_carried(value)) else value

    if node.op == "output":
        node.args = fx.map_arg(node.args, swap)
        return
    node.args, node.kwargs = _swap_in_schema_order(node, swap)


def _swap_in_schema_order(
    node: fx.Node, swap: Callable[[fx.Node], fx.Node]
) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """Visits operands in the order of `operands`: positional arguments come first in a schema too, then keywords."""
    return fx.map_arg(node.args, swap), fx.map_arg(_ordered_kwargs(node), swap)


def _ordered_kwargs(node: fx.Node) -> dict[str, Argument]:
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else list(node.kwargs)
    return {name: node.kwargs[name] for name in names if name in node.kwargs}


class _Conversions:
    """The conversions of a graph's values, each inserted once for all consumers that require it."""

    def __init__(self, module: fx.GraphModule, planned: Mapping[str, Steps]) -> None:
        self._module, self._group = module, module.meta["axis"].name
        self._into = {name: {step.target: step for step in steps} for name, steps in planned.items()}
        self._inserted: dict[tuple[fx.Node, Layout], fx.Node] = {}

    def of(self, value: fx.Node, target: Layout, consumer: fx.Node) -> fx.Node:
        """The node of a value in the layout that a consumer requires."""
        needs_grad = bool(value.meta.get("needs_grad"))
        # I and R differ only in their gradients: without one, I serves a consumer that requires R
        return self._in_layout(value, target if needs_grad or target != R else I, consumer)

    def _in_layout(self, value: fx.Node, layout: Layout, consumer: fx.Node) -> fx.Node:
        step = self._into.get(value.name, {}).get(layout)
        if step is None:
            return value
        consumer_name = consumer.name if consumer.op != "output" else "the result"
        node = self._inserted.get((value, layout))
        if node is None:
            source = self._in_layout(value, step.source, consumer)
            node = self._inserted[value, layout] = self._insert(value, step, source, consumer)
            node.meta["note"] = f"for {consumer_name}"
        elif not node.meta["note"].endswith(f" {consumer_name}"):
            node.meta["note"] += f", {consumer_name}"
        if is_gathered_again(step, dims_gathered_again(value, [consumer])):
            node.meta["gathered_again"] = True
        return node

    def _insert(self, value: fx.Node, step: ConversionStep, source: fx.Node, consumer: fx.Node) -> fx.Node:
        graph = self._module.graph
        args = step_args(step.source, step.target, global_shape(value))
        after = value.op != "placeholder" and not is_whole(step.source)
        beside = value if after else consumer
        with graph.inserting_after(source) if after else graph.inserting_before(consumer):
            node = graph.call_function(getattr(torch.ops.torchshard, step.name).default, (source, *args, self._group))
        name_after(node, f"{source.name}_{step.name}")
        node.meta = {
            "val": value.meta["val"],
            "layouts": (step.target,),
            "needs_grad": bool(value.meta.get("needs_grad")),
            "module": beside.meta.get("module", ""),
            "source": beside.meta.get("source", ""),
        }
        node.meta |= {key: value.meta[key] for key in OF_EARLIER_AXES if key in value.meta}
        if "recompute" in consumer.meta:
            node.meta["recompute"] = consumer.meta["recompute"]
        return node
