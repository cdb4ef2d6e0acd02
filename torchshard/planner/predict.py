"""Prices a plan: each collective, and the computation of each module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import fx

from torchshard.core.conversions import ConversionStep, Steps
from torchshard.core.layouts import I, Layout, is_whole
from torchshard.core.rows import Choice
from torchshard.ir.axes import typed_as
from torchshard.ir.gathered_again import dims_gathered_again
from torchshard.ir.graph import before_collectives, consumers, node_row
from torchshard.ir.segments import parts_between
from torchshard.ir.sizes import Names, size_names
from torchshard.planner.conversions import Demand, demands_of
from torchshard.planner.costs import NOTHING, CostModel
from torchshard.planner.kernels import fusion_of
from torchshard.planner.properties import Op, Value
from torchshard.plans.costs import Collective, Costs, Sent


def predict(
    graph: fx.Graph,
    model: CostModel,
    choices: Mapping[str, Choice],
    parameters: Mapping[str, Layout],
    conversions: Mapping[str, Steps],
) -> Costs:
    """Returns the collectives of a step, in the order of their first consumers, and its seconds of computation."""
    sizes = size_names(graph)
    collectives: list[Collective] = []
    compute, products = dict[str, float](), 0.0
    # layers repeat: equal calls under equal choices are priced once
    known: dict[object, tuple[Op, float, list[tuple[str, str, Sent, Sent]]]] = {}
    for node in consumers(graph):
        choice = choices.get(node.name)
        if choice is not None:
            key = (
                id(node_row(node) or node),
                id(choice),
                _flows(node),
                fusion_of(node),
                model.is_recomputed(node),
            )
            if key not in known:
                op = Op.of(node)
                known[key] = (op, model.seconds(op, choice), model.inside(op, choice))
            op, seconds, inside = known[key]
            products += seconds if op.products else 0.0
            module = node.meta.get("module", "")
            compute[module] = compute.get(module, 0.0) + seconds
            collectives += [_within(node, *one) for one in inside]
    begun, segments = set[object](), segment_numbers(graph, choices, parameters, conversions)
    for demand in demands_of(graph, choices, parameters):
        collectives += _conversions(model, demand, conversions.get(demand.node.name, ()), sizes, begun, segments)
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    collectives.sort(key=lambda c: (position[c.consumers[0]], c.is_inside))  # operands come first
    return Costs(model.machine.name, compute, tuple(collectives), products=products)


def in_messages(
    value: Value, step: ConversionStep, sent: tuple[Sent, Sent, Sent], begun: set[object], segment: int
) -> tuple[Sent, Sent, Sent]:
    """Counts each message of a conversion (forward, backward, again) once among all conversions that share it.

    Args:
        begun: the messages that earlier conversions are part of; this one's are added.
        segment: the number of the segment that converts the value; segments do not share messages.
    """
    if not value.is_bucketed(step):
        return sent
    # gathers that backward repeats have messages of their own; gradients share messages in any case
    ways = ("forward", bool(sent[2].nbytes)), ("backward",), ("again",)
    forward, backward, again = (
        _once(each, (value.bucket, segment, way), begun) for each, way in zip(sent, ways, strict=True)
    )
    return forward, backward, again


def segment_numbers(
    graph: fx.Graph, choices: Mapping[str, Choice], parameters: Mapping[str, Layout], conversions: Mapping[str, Steps]
) -> dict[str, int]:
    """Returns op name -> number of its segment (see `ir.segments`) in a rank's graph.

    A result that is converted only for the caller does not end a segment: other results read the unconverted value.
    """
    results = set[fx.Node]()
    for demand in demands_of(graph, choices, parameters):
        given = [layout for consumer, layout in demand.consumers if consumer.op == "output"]
        converted = {step.target for step in conversions.get(demand.node.name, ())}
        taken = [layout for consumer, layout in demand.consumers if consumer.op != "output"]
        if any(layout not in converted or layout in taken for layout in given):
            results.add(demand.node)
    return {node.name: number for number, part in enumerate(parts_between(graph, results)) for node in part}


def _once(sent: Sent, message: object, begun: set[object]) -> Sent:
    """Returns the cost as one message if it is the first part of `message`, else as zero messages."""
    if not sent.nbytes:
        return sent
    times = int(message not in begun)
    begun.add(message)
    return dataclasses.replace(sent, times=times)


def _flows(node: fx.Node) -> tuple[bool, ...]:
    """Returns whether a gradient flows back through an op, and through each of its operands."""
    return tuple(bool(n.meta.get("needs_grad")) for n in (node, *node.all_input_nodes))


def _conversions(
    model: CostModel, demand: Demand, steps: Steps, sizes: Names, begun: set[object], segments: Mapping[str, int]
) -> list[Collective]:
    """Returns the collectives of one value.

    Args:
        begun: the messages that earlier conversions are part of; this value's are added.
        segments: see `segment_numbers`.
    """
    node, value = demand.node, Value.converted(demand.node)
    into = {step.target: step for step in steps}
    served: dict[Layout, list[fx.Node]] = {}
    for consumer, layout in demand.consumers:
        at = layout if layout in into or value.needs_grad else I
        while at in into:
            served.setdefault(at, []).append(consumer)
            at = into[at].source
    made = []
    for step in steps:
        dims = dims_gathered_again(node, served[step.target])
        forward, backward, again = model.sent(dataclasses.replace(value, gathered_again=dims), step)
        forward, backward, again = in_messages(
            value, step, (forward, backward, again), begun, segments.get(served[step.target][0].name, 0)
        )
        names = tuple(dict.fromkeys(consumer.name for consumer in served[step.target]))
        first = served[step.target][0]
        beside = first if is_whole(step.source) or node.op == "placeholder" else node
        origin = "" if _is_given(node) else node.meta.get("module", "")
        place = origin, first.meta.get("module", ""), beside.meta.get("source", "")
        held, becomes = (typed_as(node, model.axis, layout, sizes) for layout in (step.source, step.target))
        of_step = step.name, step.source, step.target
        made.append(Collective(node.name, *of_step, names, *place, held, becomes, forward, backward, again))
    return made


def _is_given(node: fx.Node) -> bool:
    """Returns whether a value is a parameter or an input, possibly after collectives of earlier axes."""
    return before_collectives(node).op == "placeholder"


def _within(node: fx.Node, name: str, text: str, forward: Sent, backward: Sent) -> Collective:
    """Returns a collective inside an op's local computation, with the example inputs' sizes."""
    module = node.meta.get("module", "")
    place = module, module, node.meta.get("source", "")
    return Collective(node.name, name, I, I, (node.name,), *place, text, text, forward, backward, NOTHING)
