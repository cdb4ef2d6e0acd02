"""Regions of a captured graph made flat: `no_grad` blocks, and autocast blocks that are switched off.

    before    getitem(wrap_with_set_grad_enabled(False, body, x), 0)
    after     x_detach = detach(x); ...body of x_detach...

A `no_grad` block keeps its meaning by detaching what goes in: nothing inside then needs a gradient. What it hands out
as it came in (by `x.to(x.dtype)`, too) is no result of it, and keeps its gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchshard.errors import CaptureError
from torchshard.graph import bound_args

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
    args: Sequence[Any]
    if name == "wrap_with_set_grad_enabled":
        body, args, detached = node.args[1], node.args[2:], not node.args[0]
        args = args if detached else _before_detached(args)
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
    given: dict[Any, Any] = dict(zip((n for n in inner.graph.nodes if n.op == "placeholder"), args, strict=True))
    same = dict(given)
    with graph.inserting_before(node):
        for step in inner.graph.nodes:
            if step.op == "placeholder":
                env[step] = _entered(graph, given[step], detached)
            elif step.op == "output":
                results = fx.map_arg(step.args[0], lambda n: same.get(n, env[n]))
            elif step.op == "get_attr":
                unique = f"{body.target}_{step.target}".replace(".", "_")
                setattr(module, unique, getattr(inner, step.target))
                env[step] = graph.get_attr(unique)
            else:
                env[step] = graph.node_copy(step, lambda n: env[n])
                if step.args and step.args[0] in same and _gives_itself(step):
                    same[step] = same[step.args[0]]
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise CaptureError("a region's result is used whole", where=str(user), attempt="report this model")
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


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


_ENTERED = "entered"
"""The meta key of a detach that a `no_grad` block made: what it detaches."""


def _before_detached(args: Sequence[Any]) -> list[Any]:
    """What an `enable_grad` block within a `no_grad` block is given: a parameter keeps its gradient there."""
    if not torch.is_grad_enabled():
        raise CaptureError(
            "the model enables gradients inside of forward, and is called without",
            where="torch.enable_grad() in forward",
            why="a graph runs in one grad mode, that of the call",
            attempt="call the model with gradients enabled, outside of torch.no_grad()",
        )
    return [a.meta.get(_ENTERED, a) if isinstance(a, fx.Node) else a for a in args]


def _entered(graph: fx.Graph, value: Any, detached: bool) -> Any:
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not detached or not isinstance(val, torch.Tensor) or not (val.is_floating_point() or val.is_complex()):
        return value
    made = graph.call_function(aten.detach.default, (value,))
    made.meta = {k: v for k, v in value.meta.items() if k not in ("kind", "path")} | {_ENTERED: value}
    return made
