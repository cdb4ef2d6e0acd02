"""Replaces a materialised causal mask with `is_causal`, so that attention keeps its fast kernel.

    before    le = le(k_index, q_index); mask = expand(le, [b, 1, t, t]); y = attention(q, k, v, mask)
    after     y = attention(q, k, v, is_causal=True)

A mask is replaced under two conditions. First, its ops depend only on sizes, compare and combine
positions, and use no constant above 1: a sliding window of 4,096 uses one, and would equal the
triangle at small sizes; so would documents of 4,096 tokens, so a dynamic mask has no such size either.
Second, its value is the lower triangle, at its own size or, with dynamic sizes, at several.
transformers 5 compares documents too, which it numbers by the steps between
positions: without `position_ids` there is one.
"""

from __future__ import annotations

import functools
import operator
import sys
from itertools import count

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target
from torch.utils._pytree import tree_leaves

from torchshard.ir.fake_values import size_expr
from torchshard.ir.graph import bound_args
from torchshard.passes.nodes import call_target

aten = torch.ops.aten

_COMPARING = {
    aten.arange.default, aten.arange.start, aten.add.Tensor, aten.sub.Tensor, aten.unsqueeze.default,
    aten.expand.default, aten.ones.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.logical_and.default,
    aten.le.Tensor, aten.ge.Tensor, aten.ge.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.tril.default, aten.to.dtype,
    aten.view.default, aten.reshape.default, aten.index.Tensor, aten.slice.Tensor, aten.cat.default,
    aten.cumsum.default, operator.add, operator.sub,
}  # fmt: skip
_WITH_CONSTANTS: dict[Target, slice] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.ge.Scalar, aten.ne.Scalar), slice(1, 2)),
    aten.slice.Tensor: slice(2, None), aten.tril.default: slice(1, None), aten.arange.start: slice(0, 1),
    **dict.fromkeys((operator.add, operator.sub), slice(0, None)),
}  # fmt: skip
"""Op -> its arguments that are positions or differences of positions; others are dims and sizes."""
_WITH_SIZES: dict[Target, slice] = {
    aten.arange.default: slice(0, 1), aten.arange.start: slice(0, 2), aten.ones.default: slice(0, 1),
    **dict.fromkeys((aten.expand.default, aten.view.default, aten.reshape.default), slice(1, 2)),
}  # fmt: skip
"""Op -> its arguments that are sizes, which a dynamic mask of one size may reach and one of another not."""
_FIRST_SIZES = (3, 6, 11)
"""The first sizes at which a dynamic mask is evaluated; its other sizes count up from there."""


def restore_causal(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    changed, is_causal = False, functools.cache(_is_causal)  # all layers may share one mask
    for node in module.graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        args = bound_args(node)
        if isinstance(args["attn_mask"], fx.Node) and not args["is_causal"] and is_causal(args["attn_mask"]):
            node.args = (args["query"], args["key"], args["value"], None, args["dropout_p"], True)
            node.kwargs = {"scale": args["scale"], "enable_gqa": args["enable_gqa"]}
            changed = True
    return changed


def _is_causal(mask: fx.Node) -> bool:
    dynamic = any(not isinstance(size_expr(s), int) for s in mask.meta["val"].shape)
    ancestors = _ancestors_from_sizes(mask, dynamic=dynamic)
    if ancestors is None or mask.meta["val"].dtype is not torch.bool:
        return False
    first_sizes = _FIRST_SIZES if dynamic else (1,)
    return all(_is_triangle(_evaluate(mask, ancestors, first)) for first in first_sizes)


def _is_triangle(mask: Tensor) -> bool:
    ones = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
    return mask.ndim >= 2 and torch.equal(mask, ones.tril().expand_as(mask))


def _ancestors_from_sizes(mask: fx.Node, *, dynamic: bool) -> list[fx.Node] | None:
    """The ancestors of the mask, in order, if they depend only on sizes, and on no number that small ones hide."""
    visited: set[fx.Node] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if node.target is aten.sym_size.int:
            continue  # a number, whatever tensor it is of
        if node.target not in _COMPARING or not all(map(_is_small, _constants(node, dynamic))):
            return None
        pending += node.all_input_nodes
    return [n for n in mask.graph.nodes if n in visited]


def _constants(node: fx.Node, dynamic: bool) -> list[float]:
    """The numbers among the positions that an op computes with and, in a dynamic mask, among its sizes."""
    none = slice(0, 0)
    given = [*node.args[_WITH_CONSTANTS.get(node.target, none)], node.kwargs.get("alpha", 1)]
    if dynamic:
        given += tree_leaves(node.args[_WITH_SIZES.get(node.target, none)])
    return [a for a in given if isinstance(a, (int, float))]


def _is_small(constant: float) -> bool:
    """Whether the smallest evaluated size shows what a constant does; the last position stands for the end."""
    return abs(constant) <= 1 or constant == sys.maxsize


def _evaluate(mask: fx.Node, ancestors: list[fx.Node], first: int) -> Tensor:
    """The mask's value; its dynamic sizes become `first`, `first` + 1 and so on."""
    sizes: dict[sympy.Basic, int] = {}
    fresh = count(first)
    env: dict[fx.Node, Argument] = {}
    for node in ancestors:
        if node.target is aten.sym_size.int:
            expr = sympy.sympify(size_expr(node.meta["val"]))
            for symbol in sorted(expr.free_symbols - sizes.keys(), key=str):
                sizes[symbol] = next(fresh)
            env[node] = int(expr.xreplace(sizes))
            continue
        # on the CPU, whatever device the model is on: the device does not change the triangle
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory")}
        env[node] = call_target(node, *fx.map_arg((node.args, kwargs), lambda n: env[n]))
    result = env[mask]
    assert isinstance(result, Tensor)
    return result
