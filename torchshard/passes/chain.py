"""Concatenations that begin alike become a chain, as dense nets have them.

    before    a = cat([x, f], 1); b = cat([x, f, g], 1); c = cat([x, f, g, h], 1)
    after     a = cat([x, f], 1); b = cat([a, g], 1);    c = cat([b, h], 1)

The values are the same, and as many elements are copied. But each piece then has few consumers, where in a dense net
each has all later layers, which no exact plan could be found for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchshard.ir.graph import bound_args

CAT = torch.ops.aten.cat.default


def chain_cats(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    earlier: dict[tuple[Any, ...], fx.Node] = {}
    changed = False
    for node in module.graph.nodes:
        if node.target is not CAT:
            continue
        args = bound_args(node)
        tensors, dim = list(args["tensors"]), args["dim"] % node.meta["val"].ndim
        longest = next((n for n in range(len(tensors) - 1, 1, -1) if (dim, *tensors[:n]) in earlier), None)
        if longest is not None:
            node.args, node.kwargs = ([earlier[(dim, *tensors[:longest])], *tensors[longest:]], dim), {}
            changed = True
        earlier.setdefault((dim, *tensors), node)
    return changed
