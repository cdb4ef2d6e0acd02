"""Finds the factors of each op that the search may split, and the parts to split them into.

By default the search may split the factors that weights bring into the graph, into contiguous parts and into the
segments that neighbouring ops could use, such as seven heads of eight rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import networkx as nx
from torch import fx

from torchshard.core.choices import factor_groups, spread
from torchshard.core.layouts import Shard, has_blocks
from torchshard.core.rows import Row
from torchshard.ir.graph import is_tensor, operands, values
from torchshard.planner.constants import MAX_WANTED, MAX_WANTED_PARTS
from torchshard.planner.properties import Op

WEIGHTS = "the weights"
"""The node that the dims of weights are joined to."""
Tensors = Mapping[fx.Node, Sequence[fx.Node | None]]
"""Op -> its operands and results; None for unused results."""


def tensors_of(node: fx.Node) -> list[fx.Node | None]:
    """Returns operands, then results: the node itself, or the getitems of its results (None if unused)."""
    if is_tensor(node):
        return [*operands(node), node]
    taken: dict[object, fx.Node] = {user.args[1]: user for user in node.users}
    return [*operands(node), *(taken.get(i) for i in range(len(values(node))))]


def wanted_parts(ops: Sequence[Op], tensors: Tensors, ranks: int) -> dict[fx.Node, list[Shard]]:
    """Returns the segmented Shards that ops around a value could use: a weight of 56 rows as seven heads of eight."""
    wanted: dict[fx.Node, list[Shard]] = {}
    ruled = [op for op in ops if op.row is not None]
    for op in (*reversed(ruled), *ruled):
        around = tensors[op.node]
        hints = [(i, s) for i, t in enumerate(around) if t is not None for s in wanted.get(t, ())]
        assert op.row is not None
        for position, shard in spread(op.row, ranks, hints):
            tensor = around[position]
            if tensor is None:
                continue
            known = wanted.setdefault(tensor, [])
            small = shard.parts is not None and (has_blocks(shard) or len(shard.listed) <= MAX_WANTED_PARTS)
            if shard not in known and len(known) < MAX_WANTED and small:
                known.append(shard)
    return wanted


def weight_axes(ops: Sequence[Op], tensors: Tensors) -> dict[fx.Node, set[str]]:
    """Returns, for each op, the factors that weights bring into the graph by products and look-ups.

    They are the connected component of the weights' dims in a graph of (tensor, dim) and (op, factor of its row).
    A dim is joined to each factor that it consists of; factors that are split together are joined to each other. In
    `linear(x, w)` the factor `n` is only in `w`; it is followed through views, attention and the next `linear`. Batch
    and sequence of `x` are never reached, even if a table of positions is added.
    """
    of_weights, joined = _computed_from_weights(ops, tensors), nx.Graph()
    joined.add_node(WEIGHTS)
    for op in ops:
        if op.row is not None:
            joined.add_edges_from(_joined_dims(op, op.row, tensors[op.node]))
            weights = [i for i, t in enumerate(op.inputs) if t in of_weights or is_parameter(t)]
            if brings_axes(op, weights):
                dims = ((op.inputs[i], d) for i in weights for d in range(len(op.operands[i].shape)))
                joined.add_edges_from((WEIGHTS, dim) for dim in dims)
    axes: dict[fx.Node, set[str]] = {op.node: set() for op in ops}
    for node, axis in nx.node_connected_component(joined, WEIGHTS) - {WEIGHTS}:
        if isinstance(axis, str):
            axes[node].add(axis)
    return axes


def _computed_from_weights(ops: Sequence[Op], tensors: Tensors) -> set[fx.Node]:
    """Returns the values that depend only on parameters, such as casts of weights."""
    found: set[fx.Node] = set()
    for op in ops:
        inputs = [n for n in op.node.all_input_nodes if is_tensor(n)]
        if inputs and all(n in found or is_parameter(n) for n in inputs):
            found.update(t for t in tensors[op.node][len(op.operands) :] if t is not None)
    return found


def _joined_dims(op: Op, row: Row, around: Sequence[fx.Node | None]) -> Iterator[tuple[object, object]]:
    for tensor, dims in zip(around, (*row.operands, *row.results), strict=False):
        if tensor is not None:
            yield from (((tensor, d), (op.node, a)) for d, dim in enumerate(dims) for term in dim for a in term)
    for group in factor_groups(row):
        yield from pairwise((op.node, axis) for axis in group)


def brings_axes(op: Op, weights: Sequence[int]) -> bool:
    """Returns whether an op's weights have a factor that its other operands lack: `n` of `... k, n k -> ... n`."""
    assert op.row is not None
    tensors = [*op.row.operands, *op.row.results]
    joined = {a for dims in tensors for dim in dims if len(dim) > 1 for term in dim for a in term}
    own, others = set[str](), set[str]()
    for i, dims in enumerate(op.row.operands):
        (own if i in weights else others).update(a for dim in dims for term in dim for a in term)
    return 0 < len(weights) < len(op.operands) and bool(own - others - joined)


def is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["kind"] == "parameter"
