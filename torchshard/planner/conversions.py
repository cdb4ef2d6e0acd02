"""The conversions that a plan needs, from a value's produced layout to the layouts that its consumers require.

The plan stores them; `predict` prices them and `passes.insert` inserts them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from torchshard.core.conversions import Steps, are_legal
from torchshard.core.errors import PlanError
from torchshard.core.layouts import I, Layout
from torchshard.core.mesh import MeshAxis
from torchshard.core.rows import Choice
from torchshard.ir.axes import typed_as
from torchshard.ir.graph import consumers, is_tensor_op, required_layouts, where
from torchshard.ir.sizes import size_names
from torchshard.planner.costs import CostModel
from torchshard.planner.properties import Value


def element_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Returns the op that a getitem reads, and the number of the selected result."""
    source, index = node.args
    assert node.target is operator.getitem and isinstance(source, fx.Node) and isinstance(index, int)
    return source, index


@dataclass(frozen=True)
class Demand:
    """A value, and the layouts in which its consumers require it."""

    node: fx.Node
    produced: Layout
    consumers: list[tuple[fx.Node, Layout]] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        """Whether all consumers require the produced layout."""
        return all(layout == self.produced for _, layout in self.consumers)


def demands_of(graph: fx.Graph, choices: Mapping[str, Choice], parameters: Mapping[str, Layout]) -> list[Demand]:
    """Returns a Demand per value that an op or the output reads, in the order of the first consumers."""
    found: dict[fx.Node, Demand] = {}
    for consumer in consumers(graph):
        for node, layout in required_layouts(consumer, choices.get(consumer.name)):
            if node not in found:
                found[node] = Demand(node, _produced(node, choices, parameters))
            found[node].consumers.append((consumer, layout))
    return list(found.values())


def _produced(node: fx.Node, choices: Mapping[str, Choice], parameters: Mapping[str, Layout]) -> Layout:
    if node.op == "placeholder":
        return parameters.get(node.meta["path"], I)
    if is_tensor_op(node):
        return choices[node.name].results[0]
    source, index = element_of(node)
    return choices[source.name].results[index]


def conversions_of(
    graph: fx.Graph,
    model: CostModel,
    choices: Mapping[str, Choice],
    parameters: Mapping[str, Layout],
    given: Mapping[str, Steps] | None = None,
) -> dict[str, Steps]:
    """Returns the conversions of each value that needs some, by node name: the given or the fastest ones.

    Args:
        model: prices conversions that are not given.
        given: the conversions of an existing plan, by node name.

    Raises:
        PlanError: conversions to the required layouts don't exist, or the given ones don't reach them.
    """
    found: dict[str, Steps] = {}
    for demand in demands_of(graph, choices, parameters):
        if not demand.is_met:
            value, required = Value.converted(demand.node), [layout for _, layout in demand.consumers]
            steps = (given or {}).get(demand.node.name)
            if steps is None or _lacks_gradients(steps, value, demand.produced, required):
                steps = model.plan_conversions(value, demand.produced, required)
            if steps is None or not are_legal(steps, demand.produced, required, needs_grad=value.needs_grad):
                raise _no_conversions(demand, model.axis, steps)
            found[demand.node.name] = steps
    return found


def _lacks_gradients(steps: Steps, value: Value, produced: Layout, required: list[Layout]) -> bool:
    """Returns whether conversions are legal only without a gradient, because they were planned for inference."""
    legal = partial(are_legal, steps, produced, required)
    return value.needs_grad and not legal(needs_grad=True) and legal(needs_grad=False)


def _no_conversions(demand: Demand, axis: MeshAxis, steps: Steps | None) -> PlanError:
    typed = partial(typed_as, demand.node, axis, names=size_names(demand.node.graph))
    required = ", ".join(f"{typed(layout)} by {node.name}" for node, layout in demand.consumers)
    planned = "no conversions lead there" if steps is None else f"the plan's are {', '.join(s.name for s in steps)}"
    return PlanError(
        "the plan's choices for an op and its consumers do not fit together",
        where=where(demand.node),
        why=f"it is produced as {typed(demand.produced)} and required as {required}; {planned}",
        attempt="make the plan again for this model and this version of torchshard",
    )
