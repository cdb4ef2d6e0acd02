"""Gathers a layer's small weights, and sums small gradients, in one message each (`ir.buckets`).

    before    reduce = reduce(grad_weight);  reduce_1 = reduce(grad_bias)
    after     cat = cat([grad_weight, grad_bias]);  reduce = reduce(cat);  split = split_with_sizes(reduce, [16, 16])

Slicing rows and concatenating commute: a slice of rows of a concatenation is the concatenation of
the slices. So one conversion of the concatenation replaces the conversions of several tensors:

    before    q = all_gather(q_slice, 0, [4, 1]);  k = all_gather(k_slice, 0, [4, 1])            rows of 8
    after     both = all_gather(cat, 0, [4, 8, 4, 8]);  split = split_with_sizes(both, [32, 32]);  q = view(...)

Each gradient gets memory of its own afterwards: users may keep one, or change it in place.

Inductor (`torch/_inductor/fx_passes/bucketing.py`, PyTorch 2.13) also combines small collectives,
in compiled graphs. Graphs here also run uncompiled, and their collectives have layouts that
`verify` checks. The pass could go if a compiler were required.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from torchshard.ir.buckets import Bucket, bucket_of
from torchshard.ir.editing import emit
from torchshard.ir.graph import global_shape
from torchshard.passes.nodes import int_list_arg, node_arg, operator_of, replace_node, upstream

aten = torch.ops.aten
REDUCE = torch.ops.torchshard.reduce.default
GATHER = torch.ops.torchshard.all_gather.default
SCATTER = torch.ops.torchshard.reduce_scatter.default


class _Message(NamedTuple):
    """The key of a message: collectives with equal keys are joined."""

    of: Bucket
    op: object
    group: Argument
    again: bool
    """Whether the backward repeats the collective."""
    region: Argument
    """The recomputed region (`recompute`) that the collectives belong to."""


def bucket(joint: fx.GraphModule) -> bool:
    """Joins the collectives of small parameters in a joint graph; returns whether it changed."""
    known = {node.name: node for node in joint.graph.nodes}
    buckets: dict[_Message, list[fx.Node]] = defaultdict(list)
    for node in joint.graph.nodes:
        of = _bucket(node, known)
        if of is not None:
            again = bool(node.meta.get("gathered_again"))
            buckets[_Message(of, node.target, node.args[-1], again, node.meta.get("recompute"))].append(node)
    several = {message: nodes for message, nodes in buckets.items() if len(nodes) > 1}
    for message, nodes in several.items():
        _join(joint, message, nodes)
    return bool(several)


def _bucket(node: fx.Node, known: dict[str, fx.Node]) -> Bucket | None:
    """The bucket of a collective that gathers a parameter's slices, or sums a parameter's gradient."""
    of: Bucket | None = None
    if node.target is GATHER and not node.meta.get("is_backward"):
        of = _of_slices(node_arg(node))
    elif node.target in (REDUCE, SCATTER) and node.meta.get("is_backward"):
        found_by = bucket_of if node.target is REDUCE else _of_slices
        found = {found_by(known[name]) for name in node.meta.get("gradient_of", ()) if name in known}
        of = found.pop() if len(found) == 1 else None
    return None if of is None or (node.target is not REDUCE and node.args[1] != 0) else of


def _of_slices(value: fx.Node) -> Bucket | None:
    """The bucket of a parameter that is gathered, over any mesh axis."""
    of = bucket_of(value)
    if of is None or of.gathered is not None:
        return of
    return of._replace(gathered=value.meta["val"].dtype) if of.layer else None


def _join(joint: fx.GraphModule, message: _Message, nodes: Sequence[fx.Node]) -> None:
    """Replaces several collectives with one: gathers at the place of the first, sums at the last."""
    place = {node: i for i, node in enumerate(joint.graph.nodes)}
    nodes = sorted(nodes, key=place.__getitem__)  # a sum over one axis may have moved after a sum over another
    gathers, args = message.op is GATHER, list(nodes[0].args[1:])
    if message.op is not REDUCE:
        args[1] = [number for node in nodes for number in _parts_of_rows(node)]
    at = nodes[0] if gathers else nodes[-1]
    followers = [] if gathers else _followers(nodes)
    if gathers:
        _move_operands(nodes, place)
    before, made = at.prev, list[fx.Node]()
    with joint.graph.inserting_before(at):
        flat = [_in_shape(joint, aten.reshape.default, node_arg(node), [-1]) for node in nodes]
        parts = emit(joint, aten.cat.default, (flat,), at)
        total = emit(joint, operator_of(at), (parts, *args), at)
        pieces = emit(joint, aten.split_with_sizes.default, (total, [n.meta["val"].numel() for n in nodes]), at)
        for i, node in enumerate(nodes):
            piece = emit(joint, operator.getitem, (pieces, i), node)
            made.append(_in_shape(joint, aten.view.default, piece, list(node.meta["val"].shape)))
            if not gathers:
                made[-1] = emit(joint, aten.clone.default, (made[-1],), node)
    while message.again and (before := before.next) is not at:
        before.meta["gathered_again"] = True
    total.meta |= {"module": message.of.layer, "layouts": at.meta["layouts"]}
    if gathers:
        total.meta["note"] = f"for {', '.join(node.meta['note'].removeprefix('for ') for node in nodes)}"
    else:
        total.meta["gradient_of"] = tuple(dict.fromkeys(name for node in nodes for name in node.meta["gradient_of"]))
    name = at.name
    for node, own in zip(nodes, made, strict=True):
        own.meta = node.meta
        replace_node(node, own)
    if not gathers:
        made[-1]._rename(f"{name}_own")
        total.name = name
    for node in reversed(followers):
        made[-1].append(node)


def _parts_of_rows(node: fx.Node) -> Iterator[int]:
    """The (count, unit) numbers of a row dim's parts, with units counted in elements."""
    width = math.prod(global_shape(node)[1:])
    for i, number in enumerate(int_list_arg(node, 2)):
        yield number * width if i % 2 else number


def _move_operands(gathers: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> None:
    """Moves the ops that compute the operands, such as casts, before the first of the collectives."""
    needed = set[fx.Node]().union(*(upstream(node, lambda n: n.all_input_nodes) for node in gathers))
    for node in sorted(needed, key=place.__getitem__):
        if place[node] > place[gathers[0]]:
            gathers[0].prepend(node)


def _in_shape(joint: fx.GraphModule, target: OpOverload[..., object], value: fx.Node, shape: list[int]) -> fx.Node:
    """A value reshaped, or the value itself if it has that shape already."""
    is_flat = value.meta["val"].ndim == 1 == len(shape)
    return value if is_flat else emit(joint, target, (value, shape), value)


def _followers(sums: Sequence[fx.Node]) -> list[fx.Node]:
    """Ops before the last sum that depend on an earlier one, in order: casts and sums of gradients."""
    found: dict[fx.Node, None] = {}
    node = sums[0]
    while node is not sums[-1]:
        node = node.next
        if any(used in found or used in sums for used in node.all_input_nodes) and node not in sums:
            found[node] = None
    return list(found)
