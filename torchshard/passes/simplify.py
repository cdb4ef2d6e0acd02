"""Fuses a bias back into its op, if they are not separated by a collective.

before    h_linear = linear(x, w); h = add(h_linear, b)
after     h = linear(x, w, b)
"""

from __future__ import annotations

import torch
from torch import fx

from torchshard.core.choices import choices
from torchshard.core.layouts import Layout, Shard
from torchshard.core.mesh import MeshAxis
from torchshard.core.rows import Choice, Row
from torchshard.ir.editing import drop_dead_code
from torchshard.ir.graph import is_tensor, layout_of, node_row, operands
from torchshard.passes.annotate import serves
from torchshard.passes.nodes import node_arg, operator_of, replace_node
from torchshard.rules.convolution import CONVOLUTIONS

aten = torch.ops.aten


def simplify(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    changed = _fuse_biases(module)
    if changed:
        drop_dead_code(module)
    return changed


_BIASED = {aten.linear.default, *CONVOLUTIONS}


def _fuse_biases(module: fx.GraphModule) -> bool:
    fused = False
    for node in list(module.graph.nodes):
        if node.target is aten.add.Tensor and len(operands(node)) == 2 and not node.kwargs:
            fused |= _fuse_bias(module, node)
    return fused


def _fuse_bias(module: fx.GraphModule, node: fx.Node) -> bool:
    """Fuses one addition into the op that computes its first operand; returns whether it could."""
    product, bias = operands(node)[0], _bias_of(node)
    if bias is None:
        return False
    args = (*product.args[:2], bias, *product.args[3:])
    with module.graph.inserting_before(node):
        fused = module.graph.call_function(operator_of(product), args, dict(product.kwargs))
    fused.meta = {key: fact for key, fact in node.meta.items() if key != "row"}
    row = node_row(fused)
    choice = _choice_with_layouts(fused, row, layout_of(node), module.meta["axis"])
    if choice is None:
        module.graph.erase_node(fused)
        return False
    fused.meta.update(row=row, choice=choice, module=product.meta.get("module", ""))
    replace_node(node, fused)
    return True


def _bias_of(node: fx.Node) -> fx.Node | None:
    """The 1-D bias that an addition adds to a product with no other consumer, if it does."""
    product, added = operands(node)
    if product.target not in _BIASED or len(product.users) > 1:
        return None
    if len(product.args) > 2 and product.args[2] is not None:
        return None
    if product.target is not aten.linear.default:
        # normalize views the bias of a convolution as [n, 1, ...], so that it broadcasts
        if added.target is not aten.view.default or len(added.users) > 1:
            return None
        added = node_arg(added)
    if not is_tensor(added):
        return None
    bias, weight = added.meta["val"], operands(product)[1].meta["val"]
    fits = bias.ndim == 1 and bias.shape[0] == weight.shape[0] and bias.dtype == product.meta["val"].dtype
    return added if fits else None


def _choice_with_layouts(node: fx.Node, row: Row | None, result: Layout, axis: MeshAxis) -> Choice | None:
    """The choice of an op that keeps the present layouts of its operands and result, if one exists."""
    if row is None:
        return None
    layouts = [layout_of(operand) for operand in operands(node)]
    splits = [(i, layout) for i, layout in enumerate(layouts) if isinstance(layout, Shard)]
    for choice in choices(row, axis.size, splits):
        if choice.results == (result,) and all(map(serves, operands(node), choice.operands)):
            return choice
    return None
