"""The bias back into its op, where nothing came between.

before    h_linear = linear(x, w); h = add(h_linear, b)
after     h = linear(x, w, b)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchshard.core.layouts import Shard
from torchshard.core.notation import choices
from torchshard.ir.graph import drop_dead_code, is_tensor, layout_of, node_row, operands

aten = torch.ops.aten
_ops = torch.ops.torchshard


def simplify(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    changed = _fuse_biases(module)
    if changed:
        drop_dead_code(module)
    return changed


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
    made.meta = {key: held for key, held in node.meta.items() if key != "row"}
    row = node_row(made)
    held = [layout_of(n) for n in operands(made)]
    hints = [(i, x) for i, x in enumerate(held) if isinstance(x, Shard)]
    world_choices = choices(row, module.meta["axis"].size, hints) if row is not None else []
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
