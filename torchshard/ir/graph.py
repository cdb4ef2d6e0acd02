"""Reads `fx.GraphModule`, the graph type of all passes. Facts about a node are meta keys:

val          fake tensor (or tuple, or SymInt) with the global shape; after `localize` the local one
kind, path   of a placeholder: 'parameter', 'buffer', 'constant' or 'input', and its dotted name;
             'names': all its names
holds        of an op: the names of a parameter that forward has written this result to
module       of an op: the path of the module that called it; 'source': the user's file and line
autocast     of an op: the autocast state of its call, until the casts are explicit
global_shapes   the global shape of each result, set by `localize`, which makes 'val' local
inside       of a node of a replacement: the op that it is a part of
layouts      one Layout per result; of the output, one per result of the graph, if some are split
choice, row  of an op: the planned rows.Choice, and the Row that allows it
needs_grad   whether a gradient flows back through the value
fused        of an op that a compiler may fuse: its kernel (see `planner.kernels`)
note         of a collective: its consumers
recompute    of an op: the region that backward recomputes instead of saving its values
gathered_once   of a parameter: whether backward reuses what forward gathered from its slices
gathered_again  of a collective: whether backward repeats it instead of saving its result
own_order    of an op on rows in a rank's own order, which no other rank has: the kind of its result
             (see `passes.own_order`)
counts_all   of an op that returns ends of such rows: whether all rows precede the last end
at_experts   of an op: its rows are at the ranks that have their experts (see `passes.to_experts`)
memory_orders   of an op that reads its operands' memory: operand number -> its dims in the order of
             memory, for operands where that is not 0, 1, 2, ...
settled      of a collective, or an op that contains some: it is over an earlier mesh axis
earlier      the Layouts of its results over each earlier mesh axis, by axis name
whole_shapes the shape of each result before any axis split it, if there are earlier axes
is_backward  of a node of a joint graph: whether it belongs to the backward
origin       of a node of a recorded segment: the number of the op that it comes from

The module's meta: 'axis', the mesh axis that the graph is split over; 'earlier_axes', those that it
was split over before; 'group', the process group that a rank's collectives over 'axis' name;
'multiples', the dynamic sizes that are multiples of the number of its ranks; and 'recordings', the
segments with a recorded backward (see `passes.record`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeGuard

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Target

from torchshard.core.layouts import I, Layout
from torchshard.core.rows import Choice, Row
from torchshard.custom_ops.carry import CARRY
from torchshard.custom_ops.fx_types import Argument
from torchshard.custom_ops.whole import WholeCall
from torchshard.ir.fake_values import Mode, Size, plain_shape, size_expr
from torchshard.ops import is_collective
from torchshard.rules import Call, TensorType, row_of
from torchshard.rules.pointwise import CASTS

ORIGIN = ("module", "source", "needs_grad", "recompute", "is_backward", "origin")
"""Facts about an op that its replacement inherits."""
OF_EARLIER_AXES = ("earlier", "whole_shapes")
"""Facts about a value that its conversions inherit."""
_COPY = torch.ops.torchshard.copy.default


def op_name(node: fx.Node) -> str:
    """Returns the short name of a node's op: 'linear', 'view'."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name.split("::")[1])
    return str(getattr(node.target, "__name__", node.target))


def tensor_type(value: Tensor) -> TensorType:
    """Returns the type of a fake tensor that rules are called with."""
    return TensorType(tuple(size_expr(size) for size in value.shape), value.dtype)


def is_tensor(node: object) -> TypeGuard[fx.Node]:
    """Returns whether an argument is a node with one tensor as its result."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


_SIZES = {operator.getitem, torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default}
"""Ops that select a result or read a size; sizes are global in every layout."""


def is_tensor_op(node: fx.Node) -> bool:
    """Returns whether a node is an op that takes or returns tensors.

    Collectives over the graph's axis don't count.
    """
    if node.op != "call_function" or node.target in _SIZES or is_own_collective(node):
        return False
    return any(isinstance(v, Tensor) for v in values(node)) or any(is_tensor(n) for n in node.all_input_nodes)


def is_own_collective(node: fx.Node) -> bool:
    """Returns whether a node is a collective over the axis that its graph is split over."""
    return is_collective(node.target) and "settled" not in node.meta


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Returns the arguments of a graph, in order."""
    return graph.find_nodes(op="placeholder")


def results_of(graph: fx.Graph) -> list[Any]:
    """Returns the results of a graph, in order; most are nodes."""
    (output,) = graph.find_nodes(op="output")
    (results,) = output.args
    return list(results)


def is_weight(node: fx.Node) -> bool:
    """Returns whether a node is a parameter of two dims or more."""
    return node.op == "placeholder" and node.meta["kind"] == "parameter" and node.meta["val"].ndim > 1


def values(node: fx.Node) -> list[Any]:
    """Returns a node's results as a list; [] for an op without results."""
    val = node.meta.get("val")
    if val is None:
        return []
    return list(val) if isinstance(val, (list, tuple)) else [val]


def bound_args(node: fx.Node) -> dict[str, Argument]:
    """Returns a node's arguments with defaults, by name in the op's schema, else by position."""
    if isinstance(node.target, WholeCall):
        return node.target.bound(node.args)
    defaults = _defaults(node.target)
    if defaults is None:
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    return defaults | dict(zip(defaults, node.args, strict=False)) | dict(node.kwargs)


@functools.lru_cache(maxsize=4096)
def _defaults(target: Target) -> dict[str, Argument] | None:
    """Returns {argument name: default} in the order of an op's schema; None if it has no schema."""
    schema = getattr(target, "_schema", None)
    return None if schema is None else {a.name: a.default_value for a in schema.arguments}


def operands(node: fx.Node) -> list[fx.Node]:
    """Returns an op's tensor operands in the order of its schema, by which rules number them."""
    return [n for value in bound_args(node).values() for n in _nodes_in(value) if is_tensor(n)]


def _nodes_in(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)


def _rule_argument(argument: object) -> object:
    """Returns an argument for a rule: types instead of tensors, expressions for dynamic sizes."""
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        return tensor_type(value) if isinstance(value, Tensor) else size_expr(value)
    if isinstance(argument, (list, tuple)):
        return [_rule_argument(item) for item in argument]
    return argument


def consumers(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that take tensors: ops and the output."""
    return [node for node in graph.nodes if node.op == "output" or is_tensor_op(node)]


def is_carried(value: fx.Node) -> bool:
    """Returns whether a graph's result is a carried value, which may stay split between calls."""
    return value.target is CARRY


def required_layouts(node: fx.Node, choice: Choice | None) -> list[tuple[fx.Node, Layout]]:
    """Returns (value, required layout) for each operand of an op, or for each result of the graph.

    Args:
        choice: the op's choice; None for the output, where carried values may have any layout.
    """
    if choice is None:
        results = zip(results_of(node.graph), result_layouts(node.graph), strict=True)
        return [(n, layout) for n, layout in results if is_tensor(n) and not is_carried(n)]
    return list(zip(operands(node), choice.operands, strict=True))


def result_layouts(graph: fx.Graph) -> tuple[Layout, ...]:
    """Returns the layout of each result: replicated, or split along a batch that ranks split."""
    layouts: tuple[Layout, ...] = graph.output_node().meta.get("layouts") or (I,) * len(results_of(graph))
    return layouts


def before_casts(node: fx.Node) -> fx.Node:
    """Returns the value before casts (autocast, `weight.to(x.dtype)`) and detach (no_grad).

    It also skips `copy` over another mesh axis, which passes its operand on. A value without any of
    these is returned as it is.
    """
    while node.target in CASTS or node.target in (torch.ops.aten.detach.default, _COPY):
        node = operands(node)[0]
    return node


def before_collectives(node: fx.Node) -> fx.Node:
    """Returns the value before the collectives that converted it; the node itself without any."""
    while is_collective(node.target):
        node = node.all_input_nodes[0]
    return node


def passes_on_weight(node: fx.Node) -> bool:
    """Returns whether an op casts a weight, or copies it for a sum over another mesh axis."""
    return node.op == "call_function" and is_weight(before_casts(node))


def call_of(node: fx.Node) -> Call:
    """Returns an op node's call in the form that rules take."""
    args = {name: _rule_argument(value) for name, value in bound_args(node).items()}
    assert callable(node.target)
    results = tuple(tensor_type(v) for v in values(node) if isinstance(v, Tensor))
    return Call(node.target, args, results, multiples_of(node.graph))


def multiples_of(graph: fx.Graph) -> frozenset[sympy.Expr]:
    """Returns the dynamic sizes that are multiples of the number of ranks."""
    module = graph.owning_module
    return frozenset() if module is None else module.meta.get("multiples", frozenset())


def node_row(node: fx.Node) -> Row | None:
    """Returns the row of an op node.

    None if rules don't support the op, or can't split its sparse operands or results. The row is
    stored in the node, because the operands' global shapes never change.
    """
    if "row" not in node.meta:
        tensors = (v for n in (node, *operands(node)) for v in values(n) if isinstance(v, Tensor))
        node.meta["row"] = row_of(call_of(node)) if all(t.layout == torch.strided for t in tensors) else None
    return node.meta["row"]


def whole_choice(node: fx.Node) -> Choice:
    """Returns the choice in which every rank does the same work; it is legal for any op."""
    return Choice("I", (I,) * len(operands(node)), (I,) * len(values(node)))


def layout_of(node: fx.Node) -> Layout:
    """Returns the layout of a one-tensor node."""
    return node.meta.get("layouts", (I,))[0]


def global_shape(node: fx.Node) -> tuple[int, ...]:
    """Returns the global shape, with static sizes as ints, before and after `localize`."""
    known = node.meta.get("global_shapes")
    return (known and known[0]) or plain_shape(node.meta["val"])


def whole_shapes(node: fx.Node) -> Sequence[Sequence[Size] | None]:
    """Returns each result's shape before any mesh axis split it, or None if it has no shape."""
    known: Sequence[Sequence[Size] | None] = node.meta.get("whole_shapes", ())
    return known or [v.shape if isinstance(v, Tensor) else None for v in values(node)]


def is_float(value: object) -> TypeGuard[Tensor]:
    """Returns whether a value is a floating or complex tensor: one that may have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def fake_mode(graph: fx.Graph) -> Mode:
    """Returns the fake mode of a graph's values."""
    for node in graph.nodes:
        for value in values(node):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return nullcontext()


def where(node: fx.Node) -> str:
    """Returns a node's description for errors: 'node add, module blocks.0, mlp.py:12'."""
    parts = [f"node {node.name}", node.meta.get("module") and f"module {node.meta['module']}", node.meta.get("source")]
    return ", ".join(p for p in parts if p)
