"""Cuts a joint graph in two: what a rank runs forward, and what it runs when the gradients of the results have come.

    forward     (state, inputs) -> (results, saved values)
    backward    (saved values, gradients of the results) -> the gradients of state and inputs

What autograd saves is saved, so that memory is the same; but of a value that is saved, views are made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.fx.node import Argument

from torchshard.ir.graph import (
    drop_dead_code,
    emit,
    is_tensor,
    is_view,
    results_of,
    written_buffers,
)
from torchshard.passes.differentiate import Gradients
from torchshard.passes.functionalize import functionalize
from torchshard.passes.nodes import node_arg

aten = torch.ops.aten


@dataclass(frozen=True)
class Partition:
    """The two graphs of a rank's step."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    given: Gradients
    """For which results backward takes gradients."""
    saved: tuple[str, ...]
    """The names of the values that pass from one to the other, tensors first; of sizes, what they are."""
    saved_tensors: int
    """How many of them are tensors."""


def partition(joint: fx.GraphModule) -> Partition:
    """Cuts a joint graph at its first node of the backward, which `differentiate` has marked.

    Raises:
        CaptureError: a gradient is computed by writes that have no functional form.
    """
    functionalize(joint, keep_stores=True)
    _tidy(joint)
    _keep_before_writes(joint)
    results, gradients = results_of(joint.graph)
    forward, backward, given = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    for node in joint.graph.nodes:
        if node.op == "placeholder" and node.meta["kind"] == "gradient":
            given += [node] * node.meta["is_given"]
        elif node.op != "output":
            (backward if node.meta.get("is_backward") else forward).append(node)
    needed = {n for node in backward for n in node.all_input_nodes} | {n for n in gradients if isinstance(n, fx.Node)}
    again: list[fx.Node] = []
    for node in reversed(forward):
        if node in needed and is_view(node) and all(_costs_nothing(n, needed) for n in node.all_input_nodes):
            again.append(node)
            needed.update(node.all_input_nodes)
    saved = [n for n in forward if n in needed and n not in again]
    tensors = [n for n in saved if is_tensor(n)]
    saved = [*tensors, *(n for n in saved if not is_tensor(n))]
    return Partition(
        _part(joint, forward, [*results, *saved]),
        _part(joint, [*saved, *given, *reversed(again), *backward], gradients, arguments={*saved, *given}),
        joint.meta["given"],
        tuple(map(_saved_name, saved)),
        len(tensors),
    )


def _saved_name(node: fx.Node) -> str:
    return node.name if is_tensor(node) else str(node.meta["val"])


def _costs_nothing(node: fx.Node, needed: set[fx.Node]) -> bool:
    """Whether saving a value takes no memory that is not taken anyway."""
    return node.op == "placeholder" or node in needed or not is_tensor(node)


def _part(
    joint: fx.GraphModule, nodes: Sequence[fx.Node], results: Sequence[Argument], arguments: Iterable[fx.Node] = ()
) -> fx.GraphModule:
    """A graph of some of the nodes of another."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node in arguments:
            copies[node] = graph.placeholder(node.name)
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].name = node.name
        copies[node].meta = {"kind": "saved", "path": node.name} | node.meta
    graph.output(fx.map_arg(tuple(results), lambda n: copies[n]))
    module = fx.GraphModule(nn.Module(), graph)
    module.meta = dict(joint.meta)
    drop_dead_code(module)
    return module


def _tidy(joint: fx.GraphModule) -> None:
    """Leaves out what autograd does twice: equal views and sizes, transposes of transposes, detached values."""
    seen: dict[object, fx.Node] = {}
    # two results of the model stay two tensors, or a change of one in place would change the other
    results = set(joint.graph.find_nodes(op="output")[0].all_input_nodes)
    for node in list(joint.graph.nodes):
        same = _same_as(node, seen)
        if same is not None and not (node in results and same in results):
            if node in results:
                results.add(same)
            node.replace_all_uses_with(same)
            joint.graph.erase_node(node)


def _same_as(node: fx.Node, seen: dict[object, fx.Node]) -> fx.Node | None:
    """An earlier node that has the value of this one."""
    if node.op != "call_function":
        return None
    if node.target is aten.detach.default:
        return node_arg(node)
    if node.target is aten.t.default and node_arg(node).target is aten.t.default:
        return node_arg(node_arg(node))
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        first = seen.setdefault(value.node.expr, node)
    elif is_view(node):
        first = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
    else:
        return None
    return first if first is not node else None


def _keep_before_writes(joint: fx.GraphModule) -> None:
    """Backward gets the values that buffers had before forward wrote to them."""
    for buffer in written_buffers(joint.graph):
        readers = [user for user in buffer.users if user.meta.get("is_backward")]
        if readers:
            with joint.graph.inserting_before(next(n for n in joint.graph.nodes if n.op != "placeholder")):
                kept = emit(joint, aten.clone.default, (buffer,), buffer)
            for reader in readers:
                reader.replace_input_with(buffer, kept)
