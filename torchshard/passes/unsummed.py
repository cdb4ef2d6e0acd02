"""Leaves the sums of parameters' gradients over some mesh axes to a later step: backward gives this rank's own parts.

    before    reduce = reduce(grad);  output = (results), (reduce, ...)
    after     output = (results), (None, ..., grad)    and of the parameter: [reduce]

What follows the first such sum is left out, too: other sums, casts, views, all of which are linear. A parameter that is
used in several layouts has several parts. Parameters without sums are among them, so that all are treated in one way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument, Target

from torchshard.distributed.ops import OPS
from torchshard.ir.graph import is_view, placeholders, results_of
from torchshard.passes.nodes import node_arg
from torchshard.rules.pointwise import CASTS

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """An op that a value goes through, without that value."""

    target: Target
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]


@dataclass(frozen=True)
class Part:
    """A part of a parameter's gradient, as a rank has it."""

    argument: int
    """The place of the parameter among the graph's arguments."""
    sums: tuple[Call, ...]
    """What makes a gradient of it."""


def leave_unsummed(joint: fx.GraphModule, axes: Collection[str]) -> None:
    """Takes the last sums off the gradients of parameters in a joint graph, and adds what is left to its results.

    The module's meta has 'parts': what the added results are, in their order.

    Args:
        axes: the names of the groups that the sums are over.
    """
    results, gradients = results_of(joint.graph)
    left, added, parts, passed = list(gradients), list[fx.Node](), list[Part](), set[fx.Node]()
    for i, (source, gradient) in enumerate(zip(placeholders(joint.graph), gradients, strict=False)):
        if source.meta.get("kind") == "parameter" and isinstance(gradient, fx.Node):
            left[i] = None
            for value, calls in parts_of(gradient, axes, passed):
                added.append(value)
                parts.append(Part(i, calls))
    joint.graph.output_node().args = ((results, (*left, *added)),)
    for node in reversed(joint.graph.nodes):
        if node in passed and not node.users:
            joint.graph.erase_node(node)
    joint.meta["parts"] = tuple(parts)


def parts_of(gradient: fx.Node, axes: Collection[str], passed: set[fx.Node]) -> list[tuple[fx.Node, tuple[Call, ...]]]:
    """The values of which a gradient is the sum, before sums over these axes, and what makes it of each.

    Args:
        passed: the nodes behind those values are added.
    """
    found = list[tuple[fx.Node, tuple[Call, ...]]]()
    behind = {gradient}
    if (call := _call(gradient)) is not None:
        is_sum = call.target in OPS and call.args[-1] in axes
        parts = parts_of(node_arg(gradient), axes, behind)
        found = [(value, (*calls, call)) for value, calls in parts if calls or is_sum]
    elif gradient.target is aten.add.Tensor and len(gradient.args) == 2 and not gradient.kwargs:
        found = [part for i in range(2) for part in parts_of(node_arg(gradient, i), axes, behind)]
    if not any(calls for _, calls in found):
        return [(gradient, ())]
    passed |= behind
    return found


def _call(node: fx.Node) -> Call | None:
    """A linear op of one value, if it is one."""
    if node.op != "call_function" or not (node.target in OPS or node.target in CASTS or is_view(node)):
        return None
    if node.all_input_nodes != [node.args[0]]:
        return None
    args = tuple(tuple(a) if isinstance(a, list) else a for a in node.args[1:])
    return Call(node.target, args, tuple(node.kwargs.items()))
