"""Defers the sums of parameters' gradients over some mesh axes: backward returns partial gradients.

    before    reduce = reduce(grad);  output = (results), (reduce, ...)
    after     output = (results), (None, ..., grad)    and of the parameter: [reduce]

Ops after the first such sum are deferred too: other sums, casts and views, all of them linear. A
parameter that is used in several layouts has several parts. Parameters without sums are included,
so that all of them take the same path.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument, Target

from torchshard.ir.effects import is_view
from torchshard.ir.graph import placeholders, results_of
from torchshard.ops import OPS
from torchshard.passes.nodes import node_arg
from torchshard.rules.pointwise import CASTS

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """A deferred op, without the value that it is applied to."""

    target: Target
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]


@dataclass(frozen=True)
class Part:
    """A part of a parameter's gradient, as computed by one rank."""

    argument: int
    """The place of the parameter among the graph's arguments."""
    sums: tuple[Call, ...]
    """The deferred ops that turn the part into a gradient."""


def leave_unsummed(joint: fx.GraphModule, axes: Collection[str]) -> None:
    """Takes the last sums off the parameters' gradients, and adds the parts to the graph's results.

    The module's meta 'parts' describes the added results, in order.

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
        passed: the nodes after these terms are added to it.
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
    """The linear op of one value that a node is, if it is one."""
    if node.op != "call_function" or not (node.target in OPS or node.target in CASTS or is_view(node)):
        return None
    if node.all_input_nodes != [node.args[0]]:
        return None
    args = tuple(tuple(a) if isinstance(a, list) else a for a in node.args[1:])
    return Call(node.target, args, tuple(node.kwargs.items()))
