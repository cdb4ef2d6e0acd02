"""The last step before a compiler takes a graph: replaces collectives with PyTorch's functional ones.

    before    gather_begun = begin_gather(linear, 1, [2, 8], "model")
              gather       = wait(gather_begun)
    after     gather_begun = all_gather_into_tensor(linear, 2, "7")
              wait_tensor  = wait_tensor(gather_begun)
          ...                                                           computes on the received slices
              gather       = cat(...)

Compilers, profilers and `CommDebugMode` know these operators (`torch.ops._c10d_functional`), but
not ours. A kernel's computations before and after its collective become nodes of the graph. Values
keep their names and layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from torchshard.core.conversions import source_and_target
from torchshard.custom_ops.fx_types import Argument
from torchshard.ir.editing import name_after
from torchshard.ir.fake_values import faking
from torchshard.ir.graph import fake_mode, placeholders, results_of
from torchshard.ops import OPS, Begin, communicates, is_collective, kernels
from torchshard.passes.nodes import node_arg, replace_node
from torchshard.passes.segment_keys import value_type

# `_c10d_functional`: compilers know these operators, which have no public namespace (PyTorch 2.13.0).
WAIT = torch.ops._c10d_functional.wait_tensor.default
Traced = dict[object, fx.Graph]
"""(collective, its arguments, type of its operand) -> the graph of its computation."""


def lower(module: fx.GraphModule) -> bool:
    """Lowers the collectives of a rank's scheduled graph, for a real process group."""
    graph, traced = module.graph, Traced()
    with faking(fake_mode(graph)):
        for node in list(graph.nodes):
            if isinstance(node.target, Begin):
                (waiting,) = node.users
                _inline(_traced(node, node.target.op, traced), node, waiting)
            elif node.target in OPS and OPS[node.target].kernel == "none":
                # values are never changed in place, so the result may share its operand's memory
                node.replace_all_uses_with(node_arg(node))
                graph.erase_node(node)
            elif node.target is torch.ops.aten.sym_numel.default:
                node.target = torch.numel  # of operators that return a number, Dynamo accepts only `sym_size`
            elif is_collective(node.target):
                _inline(_traced(node, node.target, traced), node, node)
    return True


def _traced(node: fx.Node, op: object, traced: Traced) -> fx.Graph:
    operand = node_arg(node).meta["val"]
    key = op, str(node.args[1:]), value_type(operand)
    if key not in traced:
        traced[key] = make_fx(partial(_computed, op, node.args[1:]))(operand).graph
    return traced[key]


def _computed(op: object, args: Sequence[Argument], x: Tensor) -> list[Tensor]:
    """The computation of a collective's operator, in functional collectives."""
    group, run = args[-1], kernels()
    if op not in OPS:
        return [WAIT(run.functional_max(x, group))]
    row = OPS[op]
    under_way, result = run.functional(row.kernel, x, *source_and_target(row.name, args), group)
    return [result(WAIT(under_way) if communicates(op) else under_way)]


def _inline(computation: fx.Graph, begin: fx.Node, end: fx.Node) -> None:
    """Replaces a collective with its computation, at `begin` and, where it needs received data, at `end`."""
    graph, copies = begin.graph, dict(zip(placeholders(computation), [node_arg(begin)], strict=True))
    (result,) = results_of(computation)
    known = {key: begin.meta[key] for key in ("module", "source") if key in begin.meta}
    received: set[fx.Node] = set()
    for node in computation.nodes:
        if node.op != "call_function":
            continue
        if node.target is WAIT or not received.isdisjoint(node.all_input_nodes):
            received.add(node)
        with graph.inserting_before(end if node in received else begin):
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = known | {"val": node.meta["val"]}
        if node.target is WAIT and begin is not end:
            name_after(copies[node.all_input_nodes[0]], begin.name)
    made = copies[result]
    if made.op == "call_function" and made is not node_arg(begin):
        made.meta = end.meta | {"lowered": made.meta["val"]}
        replace_node(end, made)
    else:
        end.replace_all_uses_with(made)
        graph.erase_node(end)
    if begin is not end:
        graph.erase_node(begin)
