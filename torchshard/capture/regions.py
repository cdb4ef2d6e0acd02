"""Regions of a captured graph made flat: `no_grad` and autocast blocks.

    before    getitem(wrap_with_set_grad_enabled(False, body, x), 0)
    after     x_detach = detach(x); ...body of x_detach...

A `no_grad` block keeps its meaning by detaching what goes in: nothing inside then needs a gradient. What it hands out
as it came in (by `x.to(x.dtype)`, too) is no result of it, and keeps its gradient. Which ops are within one, and within
autocast, was noted when they were called: see `modes`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchshard.capture.modes import modes_of
from torchshard.core.errors import CaptureError
from torchshard.ir.graph import bound_args

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
    _detach_within_no_grad(module.graph)


_BODIES = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Region -> the place of its body among its arguments; the body's own arguments follow."""


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    name = str(node.target)
    if name not in _BODIES:
        raise CaptureError(
            f"the model has a {name} region, which has no flat form",
            where=(node.meta.get("stack_trace") or name).strip().splitlines()[-1].strip(),
            why="its branches are not part of a flat graph",
            attempt="torch.where in place of a branch",
        )
    body: Any = node.args[_BODIES[name]]
    inner: fx.GraphModule = getattr(module, body.target)
    given = iter(node.args[_BODIES[name] + 1 :])
    env: dict[fx.Node, Any] = {}
    graph = module.graph
    results: Any = []
    with graph.inserting_before(node):
        for step in inner.graph.nodes:
            if step.op == "placeholder":
                env[step] = next(given)
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


def _detach_within_no_grad(graph: fx.Graph) -> None:
    """Ops that were called without gradients, in a call with them, take what comes from outside detached."""
    ops = [n for n in graph.nodes if n.op == "call_function"]
    if not torch.is_grad_enabled():
        _refuse_enabled(ops)
        return
    inside = {n for n in ops if not modes_of(n).grad}
    detached: dict[fx.Node, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}

    def entered(node: fx.Node) -> fx.Node:
        if node in inside or not _is_differentiable(node):
            return node
        if node not in detached:
            detached[node] = graph.call_function(aten.detach.default, (node,))
            detached[node].meta = {k: v for k, v in node.meta.items() if k not in ("kind", "path")}
        return detached[node]

    for node in [*ops, graph.output_node()]:
        if node not in inside:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
            continue
        first: Any = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and (first in same or first not in inside) and _gives_itself(node):
            same[node] = same.get(first, first)
        with graph.inserting_before(node):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), entered)


def _is_differentiable(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and (val.is_floating_point() or val.is_complex())


def _refuse_enabled(ops: Sequence[fx.Node]) -> None:
    if any(modes_of(node).grad for node in ops):
        raise CaptureError(
            "the model enables gradients inside of forward, and is called without",
            where="torch.enable_grad() in forward",
            why="a graph runs in one grad mode, that of the call",
            attempt="call the model with gradients enabled, outside of torch.no_grad()",
        )


_MAY_GIVE_ITSELF = {
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten.contiguous.default,
    aten.resolve_conj.default, aten.resolve_neg.default,
}  # fmt: skip
"""Ops that give their operand itself, no view of it, where there is nothing to change."""


def _gives_itself(step: fx.Node) -> bool:
    schema = getattr(step.target, "_schema", None)
    if schema is not None and schema.is_mutable and schema.name.endswith("_"):
        return True  # what is written to is the tensor that came in, whose gradient the block does not change
    if step.target not in _MAY_GIVE_ITSELF:
        return False
    source: Any = step.args[0]
    before, after = source.meta["val"], step.meta["val"]
    unchanged = (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
    return unchanged and not bound_args(step).get("copy") and before.stride() == after.stride()
