"""Splits a graph into segments: one ends after a result of the model that leads to another result.

Users may ask for the gradient of the earlier result, so autograd must pass gradients between the
segments there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from torchshard.ir.effects import is_view


def ops_of(graph: fx.Graph) -> Iterator[fx.Node]:
    """Returns the ops of a graph without `getitem`, which belongs to its operand."""
    return (node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem)


def is_view_result(node: fx.Node, results: set[fx.Node]) -> bool:
    return node in results and is_view(node)


def parts_between(graph: fx.Graph, results: set[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yields the ops of each segment; a view that is a result is a segment of its own."""
    part: list[fx.Node] = []
    for node in ops_of(graph):
        values = list(with_elements(node))
        views = [value for value in values if is_view_result(value, results)]
        part += [value for value in values if value not in views]
        if views or any(value in results and _leads_to(value, results - {value}) for value in values):
            yield from filter(None, (part, *([view] for view in views)))
            part = []
    if part:
        yield part


def with_elements(node: fx.Node) -> Iterator[fx.Node]:
    """Yields an op, then the nodes that select an element of its result."""
    yield node
    for user in node.users:
        if user.target is operator.getitem:
            yield from with_elements(user)


def _leads_to(node: fx.Node, others: set[fx.Node]) -> bool:
    """Returns whether a gradient of one of the other results flows back through a node."""
    seen, waiting = {node}, [node]
    while waiting:
        users = {user for user in waiting.pop().users if user.meta.get("needs_grad")} - seen
        if users & others:
            return True
        seen |= users
        waiting += users
    return False
