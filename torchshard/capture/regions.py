"""Regions of a captured graph made flat: `no_grad` blocks, and autocast blocks that are switched off.

    before    getitem(wrap_with_set_grad_enabled(False, body, x), 0)
    after     x_detach = detach(x); ...body of x_detach...

A `no_grad` block keeps its meaning by detaching what goes in: nothing inside then needs a gradient.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torchshard.errors import CaptureError

_HIGHER = torch.ops.higher_order
aten = torch.ops.aten


def inline_regions(module: fx.GraphModule) -> None:
    """Inlines all regions, inner ones too; raises CaptureError for control flow that has no flat form."""
    while regions := [n for n in module.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]:
        for node in regions:
            _inline(module, node)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    name = str(node.target)
    body: Any
    if name == "wrap_with_set_grad_enabled":
        body, args, detached = node.args[1], node.args[2:], not node.args[0]
    elif name == "wrap_with_autocast" and node.args[2] is False:
        body, args, detached = node.args[4], node.args[5:], False
    else:
        raise CaptureError(
            f"the model has a {name} region, which has no flat form",
            where=(node.meta.get("stack_trace") or name).strip().splitlines()[-1].strip(),
            why="its branches or its dtype rules are not part of a flat graph",
            attempt="torch.where in place of a branch; autocast around the call in place of inside the model",
        )
    graph = module.graph
    inner: fx.GraphModule = getattr(module, body.target)
    env: dict[fx.Node, Any] = {}
    operands = iter(args)
    with graph.inserting_before(node):
        for step in inner.graph.nodes:
            if step.op == "placeholder":
                env[step] = _entered(graph, next(operands), detached)
            elif step.op == "output":
                results = fx.map_arg(step.args[0], lambda n: env[n])
            elif step.op == "get_attr":
                unique = f"{body.target}_{step.target}".replace(".", "_")
                setattr(module, unique, getattr(inner, step.target))
                env[step] = graph.get_attr(unique)
            else:
                env[step] = graph.node_copy(step, lambda n: env[n])
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise CaptureError("a region's result is used whole", where=str(user), attempt="report this model")
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _entered(graph: fx.Graph, value: Any, detached: bool) -> Any:
    is_float = isinstance(value, fx.Node) and getattr(value.meta.get("val"), "is_floating_point", bool)()
    if not detached or not is_float:
        return value
    made = graph.call_function(aten.detach.default, (value,))
    made.meta = {k: v for k, v in value.meta.items() if k not in ("kind", "path")}
    return made
