"""Cuts a rank's graph into segments, between which PyTorch's autograd passes the gradients.

A segment is one step of autograd with its own backward, so gradients exist only for its arguments
and results. Where one result of the model is computed from another (a loss from logits, logits from
hidden states), users may request the gradient of the other, or put a hook on it: a segment ends
there. Results that are views of others are made by autograd itself, so that they may be changed in
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from torchshard.core.paths import layer_of
from torchshard.ir.editing import drop_dead_code, empty_module
from torchshard.ir.effects import is_view
from torchshard.ir.graph import is_tensor, placeholders, results_of
from torchshard.ir.segments import is_view_result, ops_of, parts_between, with_elements


@dataclass(frozen=True)
class Segment:
    """A part of a rank's graph with its own backward."""

    graph: fx.GraphModule
    arguments: tuple[str, ...]
    """Names, in the rank's graph, of the values that it takes."""
    results: tuple[str, ...]
    """Names, in the rank's graph, of the values that it returns."""
    is_view: bool
    """Whether it only makes a view of its argument."""


def segments(local: fx.GraphModule) -> list[Segment]:
    """The segments of a rank's graph in execution order; together they compute the graph's results."""
    results = {node for node in results_of(local.graph) if isinstance(node, fx.Node)}
    parts = list(parts_between(local.graph, results))
    return _cut(local, parts, [is_view_result(part[0], results) for part in parts])


def layers(local: fx.GraphModule) -> list[Segment]:
    """Cuts a rank's graph into segments of one layer each (`layer_of`), or between two layers."""
    parts: list[list[fx.Node]] = []
    last = None
    for node in ops_of(local.graph):
        layer = layer_of(node.meta.get("module", ""))
        if not parts or layer != last:
            parts.append([])
        parts[-1] += with_elements(node)
        last = layer
    return _cut(local, parts, [False] * len(parts))


def _cut(local: fx.GraphModule, parts: Sequence[list[fx.Node]], are_views: Sequence[bool]) -> list[Segment]:
    results = {node for node in results_of(local.graph) if isinstance(node, fx.Node)}
    operands = [_operands(part, through_views=views) for part, views in zip(parts, are_views, strict=True)]
    made = []
    used = results  # the values that later segments use
    for part, (arguments, again), views in reversed([*zip(parts, operands, are_views, strict=True)]):
        given = [node for node in part if node in used]
        made.append(_segment(local, part, arguments, again, given, is_view=views))
        used = used | arguments.keys()
    return made[::-1]


def _operands(part: list[fx.Node], *, through_views: bool) -> tuple[dict[fx.Node, None], dict[fx.Node, None]]:
    """A segment's arguments, and the nodes it recomputes: sizes, and views if it is a view itself."""
    arguments, again, inside = dict[fx.Node, None](), dict[fx.Node, None](), set(part)

    def need(node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand in inside or operand in again or operand in arguments:
                continue
            if operand.op == "placeholder" or (is_tensor(operand) and not (through_views and is_view(operand))):
                arguments[operand] = None
            else:
                need(operand)
                again[operand] = None

    for node in part:
        need(node)
    return arguments, again


def _segment(
    local: fx.GraphModule,
    part: list[fx.Node],
    arguments: Iterable[fx.Node],
    again: Iterable[fx.Node],
    given: list[fx.Node],
    *,
    is_view: bool,
) -> Segment:
    module, copies = empty_module(local.meta), dict[fx.Node, fx.Node]()
    graph = module.graph
    order = {node: i for i, node in enumerate(placeholders(local.graph))}
    taken = sorted(arguments, key=lambda n: order.get(n, len(order)))
    for node in taken:
        copies[node] = graph.placeholder(node.name)
    for node in (*again, *part):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    for node, copy in copies.items():
        copy.name = node.name
        copy.meta = {"kind": "input", "path": node.name} | node.meta
    graph.output(tuple(copies[n] for n in given))
    drop_dead_code(module)
    return Segment(module, tuple(n.name for n in taken), tuple(n.name for n in given), is_view)
