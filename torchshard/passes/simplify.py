"""Fewer collectives, and the bias back into its op.

    the same collective twice     x_copy = copy(x); x_copy_1 = copy(x)     ->  x_copy = copy(x)
    two that are one              y = reduce(p); z = scatter(y, 1)         ->  z = reduce_scatter(p, 1)
    a bias of its own             h_linear = linear(x, w); h = add(h_linear, b)  ->  h = linear(x, w, b)

Sibling copies merged are one all-reduce of the gradient in place of one per consumer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchshard.distributed.ops import OPS, is_collective
from torchshard.graph import is_tensor, layout_of, name_after, node_row, operands
from torchshard.layouts import Shard
from torchshard.notation import choices

aten = torch.ops.aten
_ops = torch.ops.torchshard

FUSIONS: dict[tuple[str, str], str | None] = {
    ("reduce", "scatter"): "reduce_scatter",
    ("reduce", "copy"): "all_reduce",
    ("gather", "copy"): "all_gather",
    ("copy", "narrow"): "scatter",
    ("scatter", "gather"): None,
    ("all_reduce", "narrow"): "reduce_scatter",
}
"""(first, second) -> the one that does both, or None where the second undoes the first. (gather, scatter) back to the
same layout undoes itself too, but never arises: routes have no loops."""


def simplify(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    changed = _merge_twins(module)
    changed |= _fuse_pairs(module)
    changed |= _fuse_biases(module)
    if changed:
        module.graph.eliminate_dead_code(lambda n: n.op == "placeholder" or n.is_impure())
    return changed


def _merge_twins(module: fx.GraphModule) -> bool:
    first: dict[tuple[Any, ...], fx.Node] = {}
    merged = False
    for node in list(module.graph.nodes):
        if not is_collective(node.target):
            continue
        key = (node.target, node.args[0], repr(node.args[1:]))
        kept = first.setdefault(key, node)
        if kept is not node:
            kept.meta["note"] = f"{kept.meta['note']}, {node.meta['note'].partition(', for ')[2]}"
            node.replace_all_uses_with(kept)
            module.graph.erase_node(node)
            merged = True
    return merged


def _fuse_pairs(module: fx.GraphModule) -> bool:
    fused = False
    for node in list(module.graph.nodes):
        before: Any = node.args[0] if node.target in OPS else None
        if not isinstance(before, fx.Node) or before.target not in OPS or len(before.users) > 1:
            continue
        pair = (OPS[before.target].name, OPS[node.target].name)
        if pair not in FUSIONS or (pair == ("scatter", "gather") and before.args[1:3] != node.args[1:3]):
            continue
        source: Any = before.args[0]
        name = FUSIONS[pair]
        if name is None:
            node.replace_all_uses_with(source)
        else:
            shard = next((n.args[1:3] for n in (before, node) if len(n.args) > 2), ())
            node.target = getattr(_ops, name).default
            node.args = (source, *shard, node.args[-1])
            name_after(node, f"{source.name}_{name}")
            node.meta["note"] = f"{layout_of(source)} -> {node.meta['note'].partition(' -> ')[2]}"
        fused = True
    return fused


_BIASED = {aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
           aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding}  # fmt: skip


def _fuse_biases(module: fx.GraphModule) -> bool:
    fused = False
    for node in list(module.graph.nodes):
        if node.target is aten.add.Tensor and len(operands(node)) == 2 and not node.kwargs:
            fused |= _fuse_bias(module, node)
    return fused


def _fuse_bias(module: fx.GraphModule, node: fx.Node) -> bool:
    product, bias = operands(node)
    if (
        product.target not in _BIASED
        or len(product.users) > 1
        or (len(product.args) > 2 and product.args[2] is not None)
    ):
        return False
    if product.target is not aten.linear.default:
        if bias.target is not aten.view.default or len(bias.users) > 1:
            return False
        bias = bias.args[0]  # type: ignore[assignment]
    weight = operands(product)[1]
    same_size = (
        is_tensor(bias) and bias.meta["val"].ndim == 1 and bias.meta["val"].shape[0] == weight.meta["val"].shape[0]
    )
    if not same_size or bias.meta["val"].dtype != product.meta["val"].dtype:
        return False
    args = (*product.args[:2], bias, *product.args[3:])
    with module.graph.inserting_before(node):
        target: Any = product.target
        made = module.graph.call_function(target, args, dict(product.kwargs))
    made.meta = dict(node.meta)
    row = node_row(made)
    held = [layout_of(n) for n in operands(made)]
    hints = [(i, x) for i, x in enumerate(held) if isinstance(x, Shard)]
    world_choices = choices(row, module.meta["world_size"], hints) if row is not None else []
    legal = [c for c in world_choices if list(c.operands) == held and c.results == (layout_of(node),)]
    if not legal:
        module.graph.erase_node(made)
        return False
    made.meta.update(row=row, choice=legal[0], module=product.meta.get("module", ""))
    name = node.name
    node.replace_all_uses_with(made)
    module.graph.erase_node(node)
    made.name = name
    return True
