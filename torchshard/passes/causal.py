"""A materialised causal mask becomes `is_causal` again, so that attention keeps its fast kernel.

    before    le = le(k_index, q_index); mask = expand(le, [b, 1, t, t]); y = attention(q, k, v, mask)
    after     y = attention(q, k, v, is_causal=True)

Only where the mask says just that: it is made of sizes alone, by comparing and combining positions with no constant
but zero (a window of 4,096 has one), and evaluated it is the lower triangle, at its own size or, where sizes are
dynamic, at several.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from torchshard.ir.graph import bound_args, size_expr

aten = torch.ops.aten

_COMPARING = {
    aten.arange.default, aten.arange.start, aten.add.Tensor, aten.unsqueeze.default, aten.expand.default,
    aten.ones.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.logical_and.default, aten.le.Tensor,
    aten.ge.Tensor, aten.ge.Scalar, aten.tril.default, aten.to.dtype, aten.view.default, aten.reshape.default,
}  # fmt: skip
_FIRST_SIZES = (3, 6, 11)
"""The smallest of the sizes at which a dynamic mask is evaluated."""


def restore_causal(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    changed = False
    for node in module.graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        args = bound_args(node)
        if isinstance(args["attn_mask"], fx.Node) and not args["is_causal"] and _is_causal(args["attn_mask"]):
            node.args = (args["query"], args["key"], args["value"], None, args["dropout_p"], True)
            node.kwargs = {"scale": args["scale"], "enable_gqa": args["enable_gqa"]}
            changed = True
    return changed


def _is_causal(mask: fx.Node) -> bool:
    made_of = _made_of(mask)
    if made_of is None or mask.meta["val"].dtype is not torch.bool:
        return False
    dynamic = any(not isinstance(size_expr(s), int) for s in mask.meta["val"].shape)
    return all(_is_triangle(_evaluate(mask, made_of, first)) for first in (_FIRST_SIZES if dynamic else (1,)))


def _is_triangle(mask: Tensor) -> bool:
    return mask.ndim >= 2 and torch.equal(mask, torch.ones(mask.shape[-2:], dtype=torch.bool).tril().expand_as(mask))


def _made_of(mask: fx.Node) -> list[fx.Node] | None:
    """The nodes that the mask is computed from, in order, or None where one may depend on more than sizes."""
    found: set[fx.Node] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node.target is aten.sym_size.int:
            continue
        if node.target not in _COMPARING or (node.target is aten.tril.default and len(node.args) > 1):
            return None
        scalars = [a for a in (*node.args[1:2], node.kwargs.get("alpha", 0)) if isinstance(a, (int, float))]
        if node.target in (aten.add.Tensor, aten.ge.Scalar) and any(scalars):
            return None
        pending += node.all_input_nodes
    return [n for n in mask.graph.nodes if n in found]


def _evaluate(mask: fx.Node, made_of: list[fx.Node], first: int) -> Tensor:
    """The mask for sizes that are all different, from `first` on."""
    sizes: dict[Any, int] = {}
    fresh = count(first)
    env: dict[fx.Node, Any] = {}
    for node in made_of:
        if node.target is aten.sym_size.int:
            expr = size_expr(node.meta["val"])
            env[node] = expr if isinstance(expr, int) else sizes.setdefault(expr, next(fresh))
            continue
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory")}
        target: Any = node.target
        env[node] = target(*fx.map_arg(node.args, lambda n: env[n]), **fx.map_arg(kwargs, lambda n: env[n]))
    result: Tensor = env[mask]
    return result
