"""Sums small gradients of parameters over the ranks in one message per layer (see `ir.buckets`).

    before    reduce = reduce(grad_weight);  reduce_1 = reduce(grad_bias)
    after     cat = cat([grad_weight, grad_bias]);  reduce = reduce(cat);  split = split_with_sizes(reduce, [16, 16])

Each gradient has memory of its own afterwards: users may keep one, or change it in place.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from torchshard.core.layouts import I
from torchshard.ir.buckets import Bucket, bucket_of
from torchshard.ir.graph import emit
from torchshard.passes.nodes import node_arg

aten = torch.ops.aten
REDUCE = torch.ops.torchshard.reduce.default


def bucket(joint: fx.GraphModule) -> bool:
    """Joins the `reduce` of gradients in a joint graph; returns whether there were any to join."""
    known = {node.name: node for node in joint.graph.nodes}
    buckets: dict[tuple[Bucket, Argument], list[fx.Node]] = defaultdict(list)
    for node in joint.graph.nodes:
        if node.target is REDUCE and node.meta.get("is_backward"):
            found = {bucket_of(known[name]) for name in node.meta.get("gradient_of", ()) if name in known}
            if len(found) == 1 and (of := found.pop()) is not None:
                buckets[of, node.args[-1]].append(node)
    several = {of: reduces for of, reduces in buckets.items() if len(reduces) > 1}
    for (of, _), reduces in several.items():
        _join(joint, of, reduces)
    return bool(several)


def _join(joint: fx.GraphModule, of: Bucket, reduces: Sequence[fx.Node]) -> None:
    """Puts one collective in place of several, where the last of them stands."""
    last, name = reduces[-1], reduces[-1].name
    followers = _followers(reduces)
    shapes = [list(node.meta["val"].shape) for node in reduces]
    with joint.graph.inserting_before(last):
        flat = [_in_shape(joint, aten.reshape.default, node_arg(node), [-1]) for node in reduces]
        parts = emit(joint, aten.cat.default, (flat,), last)
        total = emit(joint, REDUCE, (parts, *last.args[1:]), last)
        pieces = emit(joint, aten.split_with_sizes.default, (total, [n.meta["val"].numel() for n in flat]), last)
        for i, (node, shape) in enumerate(zip(reduces, shapes, strict=True)):
            piece = _in_shape(joint, aten.view.default, emit(joint, operator.getitem, (pieces, i), node), shape)
            own = emit(joint, aten.clone.default, (piece,), node)
            own.meta = node.meta
            node.replace_all_uses_with(own)
    names = [name for node in reduces for name in node.meta["gradient_of"]]
    total.meta |= {"module": of.layer, "layouts": (I,), "gradient_of": tuple(dict.fromkeys(names))}
    for node in reduces:
        joint.graph.erase_node(node)
    total.name = name
    for node in reversed(followers):
        own.append(node)


def _in_shape(joint: fx.GraphModule, target: OpOverload[..., object], value: fx.Node, shape: list[int]) -> fx.Node:
    """A value in another shape, or the value itself if it has that."""
    is_flat = value.meta["val"].ndim == 1 == len(shape)
    return value if is_flat else emit(joint, target, (value, shape), value)


def _followers(reduces: Sequence[fx.Node]) -> list[fx.Node]:
    """What computes with the results of collectives before the last of them, in order: casts and sums of gradients."""
    found: dict[fx.Node, None] = {}
    node = reduces[0]
    while node is not reduces[-1]:
        node = node.next
        if any(used in found or used in reduces for used in node.all_input_nodes) and node not in reduces:
            found[node] = None
    return list(found)
