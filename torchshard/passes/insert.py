"""Collectives where producer and consumer disagree.

before    q = linear(x, q_weight); k = linear(x, k_weight)                      x I, wanted R by both
after     x_copy = copy(x); q = linear(x_copy, q_weight); k = linear(x_copy, k_weight)

All consumers of a value count at once: it gets the conversions that give each what it wants in the least time on the
plan's machine, each once. What
makes a split value whole stands after its op, all else before the first op that wants it. Of one copy in place of two,
the backward is one all-reduce of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchshard.core.conversions import Link, step_args
from torchshard.core.errors import InternalError
from torchshard.core.layouts import I, Layout, R, is_whole
from torchshard.distributed.group import MODEL
from torchshard.ir.graph import consumers, demands, global_shape, is_tensor, layout_of, name_after, where
from torchshard.planner.costs import CostModel, Value


def insert(module: fx.GraphModule) -> bool:
    """Inserts the collectives; returns whether there were any to insert."""
    before = len(module.graph.nodes)
    takers = consumers(module.graph)
    wanted: dict[fx.Node, list[Layout]] = {}
    for node in takers:
        for operand, layout in demands(node, node.meta.get("choice")):
            wanted.setdefault(operand, []).append(layout)
    conversions = _Conversions(module, wanted)
    for node in takers:
        _convert_operands(node, conversions)
    return len(module.graph.nodes) != before


def _convert_operands(node: fx.Node, conversions: _Conversions) -> None:
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for operand, layout in demands(node, node.meta.get("choice")):
        replaced.append((operand, conversions.of(operand, layout, node)))
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


class _Conversions:
    """The conversions of a graph's values, each inserted once for all that want it."""

    def __init__(self, module: fx.GraphModule, wanted: dict[fx.Node, list[Layout]]) -> None:
        self._module, self._wanted = module, wanted
        self._costs = CostModel(module.meta["machine"], module.meta["world_size"])
        self._into: dict[fx.Node, dict[Layout, Link]] = {}
        self._made: dict[tuple[fx.Node, Layout], fx.Node] = {}

    def of(self, value: fx.Node, target: Layout, consumer: fx.Node) -> fx.Node:
        """The value in a layout, for a consumer."""
        needs_grad = bool(value.meta.get("needs_grad"))
        if value not in self._into:
            steps = self._costs.links(Value.of(value), layout_of(value), self._wanted[value])
            if steps is None:
                raise InternalError(
                    f"no conversion leads from {layout_of(value)} to {target}",
                    where=where(value),
                    why=f"wanted by {consumer.name}",
                )
            self._into[value] = {link.target: link for link in steps}
        return self._in_layout(value, target if needs_grad or target != R else I, consumer)

    def _in_layout(self, value: fx.Node, layout: Layout, consumer: fx.Node) -> fx.Node:
        link = self._into[value].get(layout)
        if link is None:
            return value
        for_whom = consumer.name if consumer.op != "output" else "the result"
        made = self._made.get((value, layout))
        if made is None:
            source = self._in_layout(value, link.source, consumer)
            made = self._made[value, layout] = self._insert(value, link, source, consumer)
            made.meta["note"] = f"{link.source} -> {layout}, for {for_whom}"
        elif not made.meta["note"].endswith(f" {for_whom}"):
            made.meta["note"] += f", {for_whom}"
        return made

    def _insert(self, value: fx.Node, link: Link, source: fx.Node, consumer: fx.Node) -> fx.Node:
        graph = self._module.graph
        args = step_args(link.name, link.source, link.target, global_shape(value))
        after = value.op != "placeholder" and not is_whole(link.source)
        beside = value if after else consumer
        with graph.inserting_after(source) if after else graph.inserting_before(consumer):
            node = graph.call_function(getattr(torch.ops.torchshard, link.name).default, (source, *args, MODEL))
        name_after(node, f"{source.name}_{link.name}")
        node.meta = {
            "val": value.meta["val"],
            "layouts": (link.target,),
            "needs_grad": bool(value.meta.get("needs_grad")),
            "module": beside.meta.get("module", ""),
            "source": beside.meta.get("source", ""),
        }
        return node
