"""Turns concatenations that begin with the same pieces, as in dense nets, into a chain.

    before    a = cat([x, f], 1); b = cat([x, f, g], 1); c = cat([x, f, g, h], 1)
    after     a = cat([x, f], 1); b = cat([a, g], 1);    c = cat([b, h], 1)

The values and the number of copied elements stay the same. In a dense net, all later layers consume
each piece, and the exact solver can't eliminate variables with that number of neighbours; in a
chain each piece has one or two consumers.
"""

from __future__ import annotations

import torch
from torch import fx

from torchshard.ir.graph import bound_args

CAT = torch.ops.aten.cat.default


def chain_cats(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    earlier: dict[tuple[int, tuple[fx.Node, ...]], fx.Node] = {}
    changed = False
    for node in module.graph.nodes:
        if node.target is not CAT:
            continue
        args = bound_args(node)
        tensors, dim = tuple(args["tensors"]), args["dim"] % node.meta["val"].ndim
        shorter = range(len(tensors) - 1, 1, -1)
        longest = next((n for n in shorter if (dim, tensors[:n]) in earlier), None)
        if longest is not None:
            node.args, node.kwargs = ([earlier[dim, tensors[:longest]], *tensors[longest:]], dim), {}
            changed = True
        earlier.setdefault((dim, tensors), node)
    return changed
