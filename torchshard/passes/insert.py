"""Collectives where producer and consumer disagree.

before    q = linear(x, q_weight); k = linear(x, k_weight)                      x I, wanted R by both
after     x_copy = copy(x); q = linear(x_copy, q_weight); k = linear(x_copy, k_weight)

All consumers of a value count at once: it gets the cheapest conversions that give each what it wants, each once. What
makes a split value whole stands after its op, all else before the first op that wants it. Of one copy in place of two,
the backward is one all-reduce of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchshard.conversions import links, step_args
from torchshard.distributed.groups import MODEL
from torchshard.errors import InternalError
from torchshard.graph import consumers, demands, global_shape, is_tensor, layout_of, name_after, where
from torchshard.layouts import I, Layout, R, is_whole


def insert(module: fx.GraphModule) -> bool:
    """Inserts the collectives; returns whether there were any to insert."""
    before = len(module.graph.nodes)
    takers = consumers(module.graph)
    wanted: dict[fx.Node, list[Layout]] = {}
    for node in takers:
        for operand, layout in demands(node, node.meta.get("choice")):
            wanted.setdefault(operand, []).append(layout)
    made: dict[tuple[fx.Node, Layout], fx.Node] = {}
    for node in takers:
        _convert_operands(module, node, wanted, made)
    return len(module.graph.nodes) != before


def _convert_operands(
    module: fx.GraphModule,
    node: fx.Node,
    wanted: dict[fx.Node, list[Layout]],
    made: dict[tuple[fx.Node, Layout], fx.Node],
) -> None:
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for operand, layout in demands(node, node.meta.get("choice")):
        replaced.append((operand, _converted(module, operand, layout, node, wanted[operand], made)))
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


def _converted(
    module: fx.GraphModule,
    value: fx.Node,
    target: Layout,
    consumer: fx.Node,
    wanted: list[Layout],
    made: dict[tuple[fx.Node, Layout], fx.Node],
) -> fx.Node:
    """The value in a layout; what it takes to get there is inserted, unless it is there for another consumer."""
    needs_grad = bool(value.meta.get("needs_grad"))
    steps = links(layout_of(value), wanted, module.meta["world_size"], needs_grad=needs_grad)
    if steps is None:
        raise InternalError(
            f"no conversion leads from {layout_of(value)} to {target}",
            where=where(value),
            why=f"wanted by {consumer.name}",
        )
    into = {link.target: link for link in steps}
    for_whom = consumer.name if consumer.op != "output" else "the result"

    def in_layout(layout: Layout) -> fx.Node:
        if layout not in into:
            return value
        if (value, layout) not in made:
            link = into[layout]
            source = in_layout(link.source)
            args = step_args(link.name, link.source, layout, global_shape(value))
            after = value.op != "placeholder" and not is_whole(link.source)
            with module.graph.inserting_after(value) if after else module.graph.inserting_before(consumer):
                op = getattr(torch.ops.torchshard, link.name).default
                node = module.graph.call_function(op, (source, *args, MODEL))
            name_after(node, f"{source.name}_{link.name}")
            node.meta = {
                "val": value.meta["val"],
                "layouts": (layout,),
                "needs_grad": needs_grad,
                "module": (value if after else consumer).meta.get("module", ""),
                "source": (value if after else consumer).meta.get("source", ""),
                "note": f"{link.source} -> {layout}, for {for_whom}",
            }
            made[value, layout] = node
        elif not made[value, layout].meta["note"].endswith(f" {for_whom}"):
            made[value, layout].meta["note"] += f", {for_whom}"
        return made[value, layout]

    return in_layout(target if needs_grad or target != R else I)
