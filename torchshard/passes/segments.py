"""Cuts a rank's graph into segments, between which PyTorch's autograd passes the gradients.

A segment is one step of autograd with a backward of its own, so gradients exist of its arguments and results alone.
Where a result of the model is used for another one (logits for a loss, hidden states for logits), users may ask for its
gradient, or put a hook on it: there a segment ends. Results that are views of others are made by autograd itself, so
that they may be changed in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from torchshard.core.paths import layer_of
from torchshard.ir.graph import drop_dead_code, empty_module, is_tensor, is_view, placeholders, results_of


@dataclass(frozen=True)
class Segment:
    """A part of a rank's graph."""

    graph: fx.GraphModule
    arguments: tuple[str, ...]
    """The names, in the rank's graph, of the values that it takes."""
    results: tuple[str, ...]
    """Those of the values that it gives."""
    is_view: bool
    """Whether it makes a view of its argument, and nothing else."""


def segments(local: fx.GraphModule) -> list[Segment]:
    """The segments of a rank's graph, in the order in which they run; together they compute what the graph does."""
    results = {node for node in results_of(local.graph) if isinstance(node, fx.Node)}
    parts = list(_parts(local.graph, results))
    return _cut(local, parts, [_is_view_result(part[0], results) for part in parts])


def layers(local: fx.GraphModule) -> list[Segment]:
    """The same for parts that belong to one layer of the model each (see `layer_of`), or lie between two."""
    parts: list[list[fx.Node]] = []
    last = None
    for node in _ops(local.graph):
        layer = layer_of(node.meta.get("module", ""))
        if not parts or layer != last:
            parts.append([])
        parts[-1] += _with_elements(node)
        last = layer
    return _cut(local, parts, [False] * len(parts))


def _cut(local: fx.GraphModule, parts: Sequence[list[fx.Node]], are_views: Sequence[bool]) -> list[Segment]:
    results = {node for node in results_of(local.graph) if isinstance(node, fx.Node)}
    operands = [_operands(part, through_views=views) for part, views in zip(parts, are_views, strict=True)]
    made = []
    used = results  # by what comes later
    for part, (arguments, again), views in reversed([*zip(parts, operands, are_views, strict=True)]):
        given = [node for node in part if node in used]
        made.append(_segment(local, part, arguments, again, given, is_view=views))
        used = used | arguments.keys()
    return made[::-1]


def _ops(graph: fx.Graph) -> Iterator[fx.Node]:
    """The ops of a graph but those that take an element of another's result, which belong to that."""
    return (node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem)


def _is_view_result(node: fx.Node, results: set[fx.Node]) -> bool:
    return node in results and is_view(node)


def _parts(graph: fx.Graph, results: set[fx.Node]) -> Iterator[list[fx.Node]]:
    """The ops of each segment; those that are views of results are in segments of their own."""
    part: list[fx.Node] = []
    for node in _ops(graph):
        values = list(_with_elements(node))
        views = [value for value in values if _is_view_result(value, results)]
        part += [value for value in values if value not in views]
        if views or any(value in results and _leads_to(value, results - {value}) for value in values):
            yield from filter(None, (part, *([view] for view in views)))
            part = []
    if part:
        yield part


def _with_elements(node: fx.Node) -> Iterator[fx.Node]:
    """An op, and the nodes that take an element of its result."""
    yield node
    for user in node.users:
        if user.target is operator.getitem:
            yield from _with_elements(user)


def _leads_to(node: fx.Node, others: set[fx.Node]) -> bool:
    """Whether a gradient of one of the other results flows back through a node."""
    seen, waiting = {node}, [node]
    while waiting:
        users = {user for user in waiting.pop().users if user.meta.get("needs_grad")} - seen
        if users & others:
            return True
        seen |= users
        waiting += users
    return False


def _operands(part: list[fx.Node], *, through_views: bool) -> tuple[dict[fx.Node, None], dict[fx.Node, None]]:
    """What a segment takes as arguments, and what it computes again: sizes, and views if it is one itself."""
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
