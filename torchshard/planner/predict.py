"""What a plan costs: the collectives that its choices make necessary, one by one, and each module's computation."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from torchshard.core.layouts import I, Layout, is_whole, type_text
from torchshard.core.notation import Choice
from torchshard.ir.graph import consumers, demands, is_tensor_op, node_row, operands
from torchshard.planner.costs import CostModel, Op, Value
from torchshard.plans.data import Collective, Sent


def predict(
    graph: fx.Graph, model: CostModel, choices: Mapping[str, Choice], parameters: Mapping[str, Layout]
) -> tuple[list[Collective], dict[str, float]]:
    """The collectives of a step, in the order in which they are first needed, and module -> seconds of computation."""
    wanted: dict[fx.Node, list[tuple[fx.Node, Layout]]] = {}
    found: list[Collective] = []
    compute: dict[str, float] = {}
    known: dict[Any, tuple[float, list[Any]]] = {}  # layers are alike: equal calls under equal choices cost the same
    for node in consumers(graph):
        choice = choices.get(node.name)
        for value, layout in demands(node, choice):
            wanted.setdefault(value, []).append((node, layout))
        if choice is not None:
            key = (id(node_row(node) or node), id(choice), _flows(node))
            if key not in known:
                op = Op.of(node)
                known[key] = (model.seconds(op, choice), model.inside(op, choice))
            seconds, inside = known[key]
            module = node.meta.get("module", "")
            compute[module] = compute.get(module, 0.0) + seconds
            found += [_within(node, *one) for one in inside]
    for value, takers in wanted.items():
        given = _given(value, choices, parameters)
        if any(layout != given for _, layout in takers):
            found += _conversions(model, value, given, takers)
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda c: position[c.consumers[0]]), compute


def _flows(node: fx.Node) -> tuple[bool, ...]:
    """Whether a gradient flows back through an op, and through each of its operands."""
    return tuple(bool(n.meta.get("needs_grad")) for n in (node, *node.all_input_nodes))


def _given(value: fx.Node, choices: Mapping[str, Choice], parameters: Mapping[str, Layout]) -> Layout:
    """How a value lies where it is made."""
    if value.op == "placeholder":
        return parameters.get(value.meta["path"], I)
    if is_tensor_op(value):
        return choices[value.name].results[0]
    source: Any = value.args[0]
    assert value.target is operator.getitem
    return choices[source.name].results[value.args[1]]  # type: ignore[index]


def _conversions(
    model: CostModel, node: fx.Node, given: Layout, takers: list[tuple[fx.Node, Layout]]
) -> list[Collective]:
    value = Value.of(node)
    steps = model.links(value, given, [layout for _, layout in takers]) or ()
    into = {link.target: link for link in steps}
    served: dict[Layout, list[fx.Node]] = {}
    for taker, layout in takers:
        at = layout if layout in into or value.needs_grad else I
        while at in into:
            served.setdefault(at, []).append(taker)
            at = into[at].source
    found = []
    for link in steps:
        forward, backward = model.link(value, link)
        names = tuple(dict.fromkeys(taker.name for taker in served[link.target]))
        first = served[link.target][0]
        beside = first if is_whole(link.source) or node.op == "placeholder" else node
        place = node.meta.get("module", ""), first.meta.get("module", ""), beside.meta.get("source", "")
        text = type_text(node.meta["val"].dtype, node.meta["val"].shape)
        found.append(Collective(node.name, link.name, link.source, link.target, names, *place, text, forward, backward))
    return found


def _within(node: fx.Node, name: str, forward: Sent, backward: Sent) -> Collective:
    """A collective inside an op's local computation."""
    value = operands(node)[0].meta["val"]
    place = (node.meta.get("module", ""),) * 2
    text = type_text(value.dtype, value.shape)
    return Collective(node.name, name, I, I, (node.name,), *place, node.meta.get("source", ""), text, forward, backward)
