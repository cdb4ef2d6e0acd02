"""Finds which axes of each op the search may split, and in which parts.

By default it may split the axes that weights bring into the graph, in contiguous parts and in the segments that
neighbouring ops could use, such as seven heads of eight rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from torchshard.core.choices import axis_groups, spread
from torchshard.core.layouts import Shard
from torchshard.ir.graph import is_tensor, operands, values
from torchshard.planner.constants import MAX_WANTED, MAX_WANTED_PARTS
from torchshard.planner.costs import Op

Tensors = Mapping[fx.Node, Sequence[fx.Node | None]]
"""Op -> its operands and results; None for results that nobody uses."""


def tensors_of(node: fx.Node) -> list[fx.Node | None]:
    """Operands, then results: the node itself, or the getitems of its results (None where nobody takes one)."""
    if is_tensor(node):
        return [*operands(node), node]
    taken: dict[object, fx.Node] = {user.args[1]: user for user in node.users}
    return [*operands(node), *(taken.get(i) for i in range(len(values(node))))]


def wanted_parts(ops: Sequence[Op], tensors: Tensors, ranks: int) -> dict[fx.Node, list[Shard]]:
    """The segmented Shards that the ops around a value could use: a weight of 56 rows as seven heads of eight."""
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
            small = shard.parts is not None and len(shard.parts) <= MAX_WANTED_PARTS
            if shard not in known and len(known) < MAX_WANTED and small:
                known.append(shard)
    return wanted


def weight_axes(ops: Sequence[Op], tensors: Tensors) -> dict[fx.Node, set[str]]:
    """For each op the axes that weights bring into the graph, in products and look-ups, followed through the graph.

    In `linear(x, w)` the axis `n` comes from `w` alone: it is marked, and followed through views, attention and the
    next `linear` until nothing new is marked. Batch and sequence of `x` never are, even if a table of positions is
    added.
    """
    of_weights: set[fx.Node] = set()
    for op in ops:
        inputs = [n for n in op.node.all_input_nodes if is_tensor(n)]
        if inputs and all(n in of_weights or _is_parameter(n) for n in inputs):
            of_weights.update(t for t in tensors[op.node][len(op.operands) :] if t is not None)
    marked: set[tuple[fx.Node | None, int]] = set()
    axes: dict[fx.Node, set[str]] = {op.node: set() for op in ops}
    ruled = [op for op in ops if op.row is not None]
    for op in ruled:
        weights = [i for i, t in enumerate(op.inputs) if t in of_weights or _is_parameter(t)]
        if _brings_axes(op, weights):
            marked.update((op.inputs[i], d) for i in weights for d in range(len(op.operands[i].shape)))
    before = -1
    while before != len(marked):
        before = len(marked)
        for op in (*ruled, *reversed(ruled)):
            _spread_marks(op, tensors[op.node], marked, axes[op.node])
    return axes


def _brings_axes(op: Op, weights: Sequence[int]) -> bool:
    """Whether the op's weights have an axis that its other operands have not: `n` of `... k, n k -> ... n`."""
    assert op.row is not None
    tensors = [*op.row.operands, *op.row.results]
    joined = {a for dims in tensors for dim in dims if len(dim) > 1 for term in dim for a in term}
    own, others = set[str](), set[str]()
    for i, dims in enumerate(op.row.operands):
        (own if i in weights else others).update(a for dim in dims for term in dim for a in term)
    return 0 < len(weights) < len(op.operands) and bool(own - others - joined)


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["kind"] == "parameter"


def _spread_marks(
    op: Op, around: Sequence[fx.Node | None], marked: set[tuple[fx.Node | None, int]], axes: set[str]
) -> None:
    assert op.row is not None
    dims = [
        (t, i, dim)
        for t, row in zip(around, (*op.row.operands, *op.row.results), strict=False)
        for i, dim in enumerate(row)
    ]
    axes.update(a for t, i, dim in dims if (t, i) in marked for term in dim for a in term)
    for group in axis_groups(op.row):
        if axes.intersection(group):
            axes.update(group)
    marked.update((t, i) for t, i, dim in dims if t is not None and any(a in axes for term in dim for a in term))
