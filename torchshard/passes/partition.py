"""Cuts a joint graph into the forward and the backward that a rank runs.

    forward     (state, inputs) -> (results, saved values)
    backward    (saved values, gradients of the results) -> the gradients of state and inputs, unsummed parts

Forward saves the same values as autograd, so memory is the same; but views of a saved value are
computed again.

Backward recomputes the values of a marked region from the region's inputs (see
`torch.utils.checkpoint`; T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
Received and random values are saved: random numbers are not drawn again, and collectives are not
repeated, except gathers of a split sequence (see `ir.gathered_again`).

PyTorch's partitioners (`torch/_functorch/partitioners.py`, PyTorch 2.13) cut AOTAutograd's joint
graph, by its names of inputs and outputs. This one cuts the graph of `differentiate`, and adds the
unsummed parts of gradients to the results of backward. It could go together with `differentiate`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import sympy
import torch
from torch import fx
from torch.fx.node import Argument

from torchshard.ir.editing import drop_dead_code, empty_module
from torchshard.ir.effects import is_view, only_looks, uses_rng, writes, written_state
from torchshard.ir.graph import is_tensor, results_of, values
from torchshard.ops import communicates
from torchshard.passes.nodes import behind_needs, node_arg, read_by
from torchshard.passes.record import Gradients
from torchshard.passes.segment_keys import sizes_found
from torchshard.passes.unsummed import Part

aten = torch.ops.aten


@dataclass(frozen=True)
class Partition:
    """The two graphs of a rank's step."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    given: Gradients
    """For each result, whether backward takes its gradient."""
    saved: tuple[str, ...]
    """Names of the values that forward passes to backward, tensors first; sizes by their expression."""
    saved_tensors: int
    """The number of tensors among them."""
    parts: tuple[Part, ...] = ()
    """The results of backward after the gradients of state and inputs."""


def partition(joint: fx.GraphModule, kept: Collection[str] = ()) -> Partition:
    """Cuts a joint graph at its first node of the backward, which `differentiate` has marked.

    Args:
        kept: the names of values that forward saves in any case.
    """
    _tidy(joint)
    results, gradients = results_of(joint.graph)
    forward, backward, given = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    for node in joint.graph.nodes:
        if _is_gradient(node):
            given += [node] * node.meta["is_given"]
        elif node.op != "output":
            (backward if _is_of_backward(node) else forward).append(node)
    needed, again = _needed(joint, forward, backward, kept)
    saved = [n for n in forward if n in needed and n not in again]
    tensors = [n for n in saved if is_tensor(n)]
    saved = [*tensors, *(n for n in saved if not is_tensor(n))]
    found = sizes_found(joint.graph)
    return Partition(
        _part(joint, forward, [*results, *saved]),
        _part(joint, [*saved, *given, *_when_needed(again, backward)], gradients, arguments={*saved, *given}),
        joint.meta["given"],
        tuple(_saved_name(node, found) for node in saved),
        len(tensors),
        joint.meta.get("parts", ()),
    )


def _is_gradient(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["kind"] == "gradient"


def _is_of_backward(node: fx.Node) -> bool:
    """Whether backward runs a node.

    Forward reads the sizes of its own values, so that backward does not keep a value for its size.
    """
    if node.target in (aten.sym_size.int, aten.sym_numel.default):
        (value,) = node.all_input_nodes
        return bool(value.meta.get("is_backward")) or _is_gradient(value)
    return bool(node.meta.get("is_backward"))


def _needed(
    joint: fx.GraphModule, forward: Sequence[fx.Node], backward: Sequence[fx.Node], kept: Collection[str]
) -> tuple[set[fx.Node], Sequence[fx.Node]]:
    """The forward's values that backward needs, and those that it recomputes, in order."""
    _, gradients = results_of(joint.graph)
    needed = {n for node in backward for n in node.all_input_nodes} | {n for n in gradients if isinstance(n, fx.Node)}
    outside = {n for node in backward for n in node.all_input_nodes if _region(node) != _region(n)}
    """values that a region other than their own needs"""
    unsteady = {n for state in written_state(joint.graph) for reader in state.users for n in read_by(reader)}
    again, costs_nothing = list[fx.Node](), partial(_costs_nothing, needed=needed, kept=kept)
    for node in reversed(forward):
        if node not in needed or node.op == "placeholder":  # arguments are kept anyway, gathered or not
            continue
        in_region = _region(node) and node not in outside and node not in unsteady and _gives_the_same(node)
        if in_region or node.meta.get("gathered_again"):
            outside.update(n for n in node.all_input_nodes if _region(n) != _region(node))
        elif not is_view(node) or not all(map(costs_nothing, node.all_input_nodes)):
            continue
        again.append(node)
        needed.update(node.all_input_nodes)
    return needed, again[::-1]


def _region(node: fx.Node) -> str:
    """The region that recomputes a node's values, or ''; placeholders belong to no region."""
    return "" if node.op == "placeholder" else str(node.meta.get("recompute", ""))


def _gives_the_same(node: fx.Node) -> bool:
    """Whether an op computes the same if it runs again, without side effects."""
    if node.target is operator.getitem:
        return _gives_the_same(node.all_input_nodes[0])
    return not (_is_size(node) or communicates(node.target) or _is_drawn(node) or writes(node))


def _is_drawn(node: fx.Node) -> bool:
    """Whether a value is random, or a copy of part of a random one: then the rest can be freed."""
    if node.target not in (aten.clone.default, aten.cat.default):
        return uses_rng(node)
    sources = node.all_input_nodes
    while sources and all(map(only_looks, sources)):
        sources = [source for n in sources for source in n.all_input_nodes]
    return bool(sources) and all(map(uses_rng, sources))


def _when_needed(again: Sequence[fx.Node], backward: Sequence[fx.Node]) -> list[fx.Node]:
    """The ops of backward, each right after those that recompute its operands, to save memory."""
    place = {node: i for i, node in enumerate(again)}
    return behind_needs([*backward, *again], lambda node: place.keys() & set(node.all_input_nodes), place)


def _saved_name(node: fx.Node, found: Mapping[sympy.Symbol, sympy.Symbol]) -> str:
    """The name of a saved value, independent of which gradients backward receives.

    Sizes are named by their expression.
    """
    value = node.meta["val"]
    if isinstance(value, torch.SymInt):
        return str(value.node.expr.xreplace(found))
    return str(value) if _is_size(node) else node.name


def _is_size(node: fx.Node) -> bool:
    """Whether a value is a number, not a tensor or a tuple of tensors, such as a split's result."""
    return not any(isinstance(value, torch.Tensor) for value in values(node))


def _costs_nothing(node: fx.Node, needed: set[fx.Node], kept: Collection[str]) -> bool:
    """Whether saving a value takes no additional memory."""
    is_there = node.op == "placeholder" or node in needed or node.name in kept or node.meta.get("gathered_again")
    return is_there or _is_size(node)


def _part(
    joint: fx.GraphModule, nodes: Sequence[fx.Node], results: Sequence[Argument], arguments: Iterable[fx.Node] = ()
) -> fx.GraphModule:
    """A graph of some nodes of the joint graph."""
    module, copies = empty_module(joint.meta), dict[fx.Node, fx.Node]()
    graph = module.graph
    for node in nodes:
        if node in arguments:
            copies[node] = graph.placeholder(node.name)
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].name = node.name
        copies[node].meta = {"kind": "saved", "path": node.name} | node.meta
    graph.output(fx.map_arg(tuple(results), lambda n: copies[n]))
    drop_dead_code(module)
    return module


def _tidy(joint: fx.GraphModule) -> None:
    """Removes nodes that autograd repeats: equal views and sizes, double transposes, detaches."""
    seen: dict[object, fx.Node] = {}
    # two results of the model stay two tensors: otherwise changing one in place would change the
    # other
    results = set(joint.graph.find_nodes(op="output")[0].all_input_nodes)
    for node in list(joint.graph.nodes):
        same = _same_as(node, seen)
        if same is not None and not (node in results and same in results):
            if node in results:
                results.add(same)
            if same.meta.get("is_backward"):  # one may be known as a gradient, the other not
                same.meta = node.meta | same.meta
            node.replace_all_uses_with(same)
            joint.graph.erase_node(node)


def _same_as(node: fx.Node, seen: dict[object, fx.Node]) -> fx.Node | None:
    """An earlier node with the same value."""
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
