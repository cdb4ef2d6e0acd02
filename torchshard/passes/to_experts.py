"""Sends rows to the ranks that own their experts, where ranks sort their own rows (`own_order`).

    before    h = grouped_mm(rows, up, ends)                      each rank gathers the weights of all experts
              y = grouped_mm(silu(h), down, ends)
    after     sent, received, own_ends = expert_counts(ends, 2)
              rows_1 = to_experts(rows, sent, received)
              h = grouped_mm(rows_1, up, own_ends)                each rank has some experts, and the rows of all ranks
              y = from_experts(grouped_mm(silu(h), down, own_ends), sent, received, n)

From the first product to the last, a rank then has a different number of rows, which each call
determines.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from torchshard.core.choices import choices
from torchshard.core.layouts import Shard
from torchshard.core.mesh import MeshAxis
from torchshard.custom_ops.experts import EXPERT_COUNTS, FROM_EXPERTS, TO_EXPERTS
from torchshard.ir.editing import emit, name_after
from torchshard.ir.fake_values import size_expr
from torchshard.ir.graph import before_casts, call_of, is_tensor, layout_of, multiples_of, node_row, operands
from torchshard.ops import experts_of_ranks
from torchshard.passes.nodes import node_arg
from torchshard.passes.own_order import own_order_choice
from torchshard.plans.data import AxisPlan
from torchshard.rules.experts import TOGETHER
from torchshard.rules.linear_algebra import is_grouped

aten = torch.ops.aten


def send_to_experts(module: fx.GraphModule, axis: MeshAxis) -> bool:
    """Sends rows to the experts that the ranks of an axis own; returns whether it sends any."""
    by_ends = dict[fx.Node, list[fx.Node]]()
    for node in module.graph.nodes:
        if "own_order" in node.meta and is_grouped(node.target):
            by_ends.setdefault(operands(node)[2], []).append(node)
    regions = [_region(ends, products) for ends, products in by_ends.items()]
    sending = [region for region in regions if _can_send(region, axis)]
    for region in sending:
        _send(module, region, axis)
    return bool(sending)


def sends_to_experts(plan: AxisPlan) -> bool:
    """Whether a plan is for a graph that sends rows to experts."""
    counts = [choice for name, choice in plan.choices.items() if name.startswith("expert_counts")]
    return any(choice.name == "split e" and len(choice.results) == 3 for choice in counts)


@dataclass(frozen=True)
class _Region:
    """The products of rows with the same group ends, and the ops between these products."""

    ends: fx.Node
    products: list[fx.Node]
    nodes: list[fx.Node]
    """The products and the ops between them, in order."""

    @property
    def rows(self) -> fx.Node:
        """The sorted rows that the first product takes."""
        return operands(self.products[0])[0]


def _region(ends: fx.Node, products: list[fx.Node]) -> _Region:
    after = _reached(products, lambda node: node.users)
    before = _reached(products, lambda node: node.all_input_nodes)
    inside = {*products, *(after & before)}
    inside |= {part for node in inside for part in node.users if part.target is operator.getitem}
    return _Region(ends, products, [node for node in ends.graph.nodes if node in inside])


def _reached(nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes reached from `nodes` by way of sorted rows."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        new = {node for node in neighbours(waiting.pop()) if _gives_rows(node)} - found
        found |= new
        waiting += new
    return found


def _gives_rows(node: fx.Node) -> bool:
    op = node_arg(node) if node.target is operator.getitem else node
    return op.meta.get("own_order") == "rows"


def _can_send(region: _Region, axis: MeshAxis) -> bool:
    """Whether each rank has experts, each row has one, and ops use no row count but the region's."""
    own = all(_has_experts(operands(product)[1], axis.size) for product in region.products)
    others = any(is_grouped(node.target) and node not in region.products for node in region.nodes)
    counted = before_casts(region.ends).meta.get("counts_all", False)
    sized = [(node, size) for node in region.nodes for size in _sizes(node) if _depends_on_batch(size)]
    return (
        own
        and counted
        and not others
        and all(node.target in _SHAPED and _counts(size, region.rows) for node, size in sized)
    )


_SHAPED = (aten.view.default, aten.reshape.default, aten.expand.default)
"""Ops that take row counts only as sizes of their results, not as values to compute with."""


def _has_experts(weight: fx.Node, ranks: int) -> bool:
    """Whether each rank owns experts of a weight's parameter, and can compute its slice from them."""
    own = Shard(0)
    while weight.op == "call_function":
        row = node_row(weight)
        made = choices(row, ranks) if row is not None else []
        if not any((choice.operands, choice.results) == ((own,), (own,)) for choice in made):
            return False
        (weight,) = operands(weight)
    return layout_of(weight) == own and experts_of_ranks(weight.meta["val"].shape[0], ranks)[-1] > 0


def _sizes(node: fx.Node) -> list[fx.Node]:
    return [size for size in node.all_input_nodes if isinstance(size.meta.get("val"), torch.SymInt)]


def _counts(size: fx.Node, rows: fx.Node) -> bool:
    return size_expr(size.meta["val"]) == size_expr(rows.meta["val"].shape[0])


def _depends_on_batch(size: fx.Node) -> bool:
    expr = size_expr(size.meta["val"])
    return not isinstance(expr, int) and any(expr.has(*batch.free_symbols) for batch in multiples_of(size.graph))


def _send(module: fx.GraphModule, region: _Region, axis: MeshAxis) -> None:
    """Computes a region on the ranks that own the experts."""
    graph, first, at_experts = module.graph, region.nodes[0], dict[fx.Node, fx.Node]()
    with graph.inserting_before(first):
        counts = emit(module, EXPERT_COUNTS, (region.ends, axis.size), region.ends)
        counts.meta["own_order"] = "counts"
        name_after(counts, "expert_counts")
        sent, received, own_ends = (emit(module, operator.getitem, (counts, i), counts) for i in range(3))

    def to_experts(rows: fx.Node, *own_count: fx.Node) -> fx.Node:
        if rows not in at_experts:
            at_experts[rows] = emit(module, TO_EXPERTS, (rows, sent, received, *own_count), rows)
            at_experts[rows].meta |= {"own_order": "rows", "at_experts": True}
            name_after(at_experts[rows], "to_experts")
        return at_experts[rows]

    with graph.inserting_before(first):
        count = emit(module, aten.sym_size.int, (region.rows, 0), counts)
        own_count = emit(module, aten.sym_size.int, (to_experts(region.rows), 0), counts)
        own_count.meta["at_experts"] = True
    for node in region.nodes:
        rows = [] if node.target is operator.getitem else _rows_taken(node, axis)
        with graph.inserting_before(node):
            for taken in rows:
                if taken not in region.nodes:
                    node.replace_input_with(taken, to_experts(taken, own_count))
        for size in _sizes(node):
            if _counts(size, region.rows):
                node.replace_input_with(size, own_count)
        node.meta["at_experts"] = True
    for product in region.products:
        product.replace_input_with(region.ends, own_ends)
        product.meta["row"] = call_of(product).row(_PRODUCT, together=TOGETHER)
    _take_back(module, region.nodes, sent, received, count)


def _take_back(module: fx.GraphModule, nodes: Sequence[fx.Node], *how: fx.Node) -> None:
    """Returns results used outside of these nodes to the ranks of the tokens."""
    for node in filter(is_tensor, nodes):
        leaving = [user for user in node.users if user not in nodes]
        if leaving:
            with module.graph.inserting_after(node):
                back = emit(module, FROM_EXPERTS, (node, *how), node)
            back.meta["own_order"] = "rows"
            name_after(back, "from_experts")
            for user in leaving:
                user.replace_input_with(node, back)


_PRODUCT = "n !k, e !k !m, e -> n !m"


def _rows_taken(node: fx.Node, axis: MeshAxis) -> list[fx.Node]:
    """The operands that an op takes as a rank's own rows."""
    if is_grouped(node.target):
        return operands(node)[:1]
    layouts = own_order_choice(node, axis).operands
    return [operand for operand, layout in zip(operands(node), layouts, strict=True) if isinstance(layout, Shard)]
