"""Flattens the regions of an exported graph: `no_grad` and autocast blocks.

    before    getitem(wrap_with_set_grad_enabled(False, body, x), 0)
    after     x_detach = detach(x); ...body of x_detach...

A `no_grad` block keeps its meaning because its inputs are detached: no value inside then needs a
gradient. A value that the block returns unchanged (even through `x.to(x.dtype)`) keeps its
gradient, because the block does not compute it. The modes noted at each op's call decide which ops
are inside a `no_grad` block (see `modes`).

Export in PyTorch 2.13 makes these regions in
`torch/_export/passes/replace_set_grad_with_hop_pass.py` and `replace_autocast_with_hop_pass.py`.
This module is needed as long as it does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

# The type of export's regions in a graph has no public name (PyTorch 2.13.0).
from torch._ops import HigherOrderOperator
from torch.fx.node import Argument

from torchshard.capture.modes import modes_of
from torchshard.core.errors import CaptureError
from torchshard.ir.graph import bound_args, is_float

aten = torch.ops.aten


def inline_regions(module: fx.GraphModule) -> None:
    """Inlines all regions, including nested ones; call `detach_within_no_grad` afterwards.

    Raises:
        CaptureError: a region is control flow, which has no flat form.
    """
    # Inlining a region adds its inner regions to the graph.
    while regions := [n for n in module.graph.nodes if isinstance(n.target, HigherOrderOperator)]:
        for node in regions:
            _inline(module, node)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)


_BODIES = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Region -> the index of its body among its arguments; the body's own arguments follow it."""


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    name = str(node.target)
    if name not in _BODIES:
        raise CaptureError(
            f"the model has a {name} region, which has no flat form",
            where=(node.meta.get("stack_trace") or name).strip().splitlines()[-1].strip(),
            why="its branches are not part of a flat graph",
            attempt="torch.where in place of a branch",
        )
    body = node.args[_BODIES[name]]
    assert isinstance(body, fx.Node)
    results = _copy_body(module, str(body.target), node, node.args[_BODIES[name] + 1 :])
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise CaptureError("a region's result is used whole", where=str(user), attempt="report this model")
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index, arg-type]
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _copy_body(module: fx.GraphModule, body: str, before: fx.Node, args: Sequence[Argument]) -> Sequence[Argument]:
    """Copies a region's body in front of a node of the outer graph; returns its results."""
    graph, inner, inputs = module.graph, getattr(module, body), iter(args)
    copies: dict[fx.Node, Argument] = {}
    with graph.inserting_before(before):
        for step in inner.graph.nodes:
            if step.op == "placeholder":
                copies[step] = next(inputs)
            elif step.op == "get_attr":
                unique = f"{body}_{step.target}".replace(".", "_")
                setattr(module, unique, getattr(inner, step.target))
                copies[step] = graph.get_attr(unique)
            elif step.op != "output":
                copies[step] = graph.node_copy(step, lambda n: copies[n])
    results: Sequence[Argument] = fx.map_arg(inner.graph.output_node().args[0], lambda n: copies[n])
    return results


def detach_within_no_grad(graph: fx.Graph) -> None:
    """Detaches outside values that ops under `no_grad` use, if the call records gradients."""
    ops = [n for n in graph.nodes if n.op == "call_function"]
    if not torch.is_grad_enabled():
        _refuse_enabled(ops)
        return
    inside = {n for n in ops if not modes_of(n).grad}
    detached: dict[fx.Node, fx.Node] = {}
    originals: dict[fx.Node, fx.Node] = {}  # value returned unchanged -> the value outside

    def detach(node: fx.Node) -> fx.Node:
        if node in inside or not is_float(node.meta.get("val")):
            return node
        if node not in detached:
            detached[node] = graph.call_function(aten.detach.default, (node,))
            detached[node].meta = {k: v for k, v in node.meta.items() if k not in ("kind", "path")}
        return detached[node]

    for node in [*ops, graph.output_node()]:
        if node not in inside:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: originals.get(n, n))
            continue
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and (first in originals or first not in inside) and _returns_operand(node):
            originals[node] = originals.get(first, first)
        with graph.inserting_before(node):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), detach)


def _refuse_enabled(ops: Sequence[fx.Node]) -> None:
    if any(modes_of(node).grad for node in ops):
        raise CaptureError(
            "the model enables gradients inside of forward, and is called without",
            where="torch.enable_grad() in forward",
            why="a graph runs in one grad mode, that of the call",
            attempt="call the model with gradients enabled, outside of torch.no_grad(); plan it in mode 'train'",
        )


_MAY_RETURN_OPERAND = {
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten.contiguous.default,
    aten.resolve_conj.default, aten.resolve_neg.default,
}  # fmt: skip
"""Ops that return the operand itself, not a view, if it has the requested properties."""


def _returns_operand(step: fx.Node) -> bool:
    schema = getattr(step.target, "_schema", None)
    if schema is not None and schema.is_mutable and schema.name.endswith("_"):
        return True  # the written tensor comes from outside and keeps its gradient
    if step.target not in _MAY_RETURN_OPERAND:
        return False
    operand = step.args[0]
    assert isinstance(operand, fx.Node)
    before, after = operand.meta["val"], step.meta["val"]
    unchanged = (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
    return unchanged and not bound_args(step).get("copy") and before.stride() == after.stride()
