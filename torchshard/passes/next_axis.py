"""Prepares a rank's graph for the split over the next mesh axis.

To the next axis, this rank's shards are full tensors, and the collectives over earlier axes are
ordinary ops.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._ops import OpOverload

from torchshard.custom_ops.stepwise import Stepwise
from torchshard.ir.axes import axes_of, layouts_of
from torchshard.ir.editing import duplicate, mark_needs_grad
from torchshard.ir.graph import is_own_collective, is_tensor, placeholders

aten = torch.ops.aten
OF_AXIS = ("layouts", "choice", "row", "global_shapes", "gathered_once", "own_order", "counts_all", "at_experts")
"""Metadata keys about the axis that a graph is split over."""


OPERATORS: dict[object, OpOverload[..., torch.Tensor]] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
}
"""Python's operators, which a rule's replacement may call -> PyTorch's, which have rules."""


def for_next_axis(local: fx.GraphModule) -> fx.GraphModule:
    """A copy of a localized graph, with the metadata of an unsplit one."""
    graph = duplicate(local)
    for node in graph.graph.nodes:
        if is_own_collective(node) or isinstance(node.target, Stepwise):
            node.meta["settled"] = True
        if node.meta.get("layouts"):
            node.meta["earlier"] = layouts_of(node)
            node.meta.setdefault("whole_shapes", node.meta.get("global_shapes", ()))
        if node.target in OPERATORS and is_tensor(node) and is_tensor(node.args[0]):
            node.target = OPERATORS[node.target]
        for key in OF_AXIS:
            node.meta.pop(key, None)
    mark_needs_grad(graph, [n.meta["path"] for n in placeholders(graph.graph) if n.meta["needs_grad"]])
    del graph.meta["group"]
    graph.meta |= {"multiples": frozenset(), "recordings": {}, "earlier_axes": axes_of(graph.graph)}
    return graph
