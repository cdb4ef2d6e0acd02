"""Reads what ops and graphs do besides computing results.

Ops write to operands, draw random numbers, and share or read memory. Graphs write to buffers and
parameters, and carry values to the next call.
"""

from __future__ import annotations

import operator

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from torchshard.core.layouts import I, Shard
from torchshard.custom_ops.store import STORE
from torchshard.custom_ops.whole import WholeCall
from torchshard.ir.fake_values import size_expr
from torchshard.ir.graph import (
    bound_args,
    is_carried,
    is_tensor_op,
    layout_of,
    placeholders,
    result_layouts,
    results_of,
)
from torchshard.rules import is_random, writes_statistics


def uses_rng(node: fx.Node) -> bool:
    """Returns whether an op draws random numbers with these arguments."""
    return is_tensor_op(node) and is_random(node.target) and bound_args(node).get("dropout_p", 1.0) > 0


_OF_MEMORY = frozenset([
    torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default, torch.ops.aten.view.dtype,
    torch.ops.aten.view_as_complex.default,
])  # fmt: skip


def reads_memory(node: fx.Node) -> bool:
    """Returns whether results may depend on the operands' strides, which collectives change.

    Custom ops count: only their authors know whether they read strides or assume contiguous memory.
    """
    target = node.target
    is_foreign = isinstance(target, OpOverload) and target.namespace not in ("aten", "prims", "torchshard")
    return is_tensor_op(node) and (isinstance(target, WholeCall) or is_foreign or target in _OF_MEMORY)


def writes(node: fx.Node) -> bool:
    """Returns whether an op has a side effect: it writes to an operand, or asserts."""
    if node.op != "call_function":
        return False
    return bool(node.is_impure(impure_random=False)) or writes_statistics(node.target, bound_args(node))


def is_inplace(node: fx.Node) -> bool:
    """Returns whether a node calls an op that writes to an argument."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def is_view(node: fx.Node) -> bool:
    """Returns whether a node's result shares its operand's memory, so it costs only the call."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    # its schema declares no alias, but its result shares memory
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    returned = [r.alias_info for r in node.target._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def only_looks(node: fx.Node) -> bool:
    """Returns whether a node computes nothing: it takes one of several results, or views one."""
    return node.target is operator.getitem or is_view(node)


def written_state(graph: fx.Graph) -> list[fx.Node]:
    """Returns the buffers and parameters that a graph's ops may write to."""
    return [node for node in placeholders(graph) if any(_may_write_to(node, user) for user in node.users)]


def _may_write_to(state: fx.Node, user: fx.Node) -> bool:
    if state.meta["kind"] == "parameter":
        return user.target is STORE and user.args[0] is state
    return state.meta["kind"] == "buffer" and writes(user)


def is_kept_split(value: fx.Node) -> bool:
    """Returns whether a carried value stays split between calls, other than along the batch."""
    if not is_carried(value) or not isinstance(layout_of(value), Shard):
        return False
    results = results_of(value.graph)
    return result_layouts(value.graph)[results.index(value)] == I


def carried_results(graph: fx.Graph) -> list[fx.Node]:
    """Returns the carried values: results that a call writes into its arguments."""
    return [value for value in results_of(graph) if isinstance(value, fx.Node) and is_carried(value)]


def carried_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Returns the placeholders of values that earlier calls carried to this one."""
    places = {value.meta["place"] for value in carried_results(graph)}
    return [node for node in placeholders(graph) if node.meta["kind"] == "input" and node.meta["path"] in places]


def growing_sizes(graph: fx.Graph) -> set[sympy.Symbol]:
    """Returns the dynamic sizes of carried values that a call grows or creates, without dim 0."""
    before = {node.meta["path"]: node.meta["val"].shape for node in carried_inputs(graph)}
    found: set[sympy.Symbol] = set()
    for value in carried_results(graph):
        now = [size_expr(size) for size in value.meta["val"].shape]
        had = [size_expr(size) for size in before.get(value.meta["place"], ())]
        for dim, size in enumerate(now):
            if dim and not isinstance(size, int) and (not had or size != had[dim]):
                found |= size.free_symbols
    return found
