"""Draws random legal plans: the cheapest plan under random prices, so not only plans that a cost model prefers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from torchshard.capture.facts import ModelFacts
from torchshard.compiler.plan_checks import stored
from torchshard.core.conversions import ConversionStep
from torchshard.core.layouts import I, Layout, canonical
from torchshard.core.mesh import MeshAxis
from torchshard.core.rows import Choice
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.planner.properties import Op, Value
from torchshard.planner.search import search
from torchshard.planner.states import GraphConstraints
from torchshard.plans.costs import Sent
from torchshard.plans.data import AxisPlan
from torchshard.plans.machine import Machine
from torchshard.plans.machines import MACHINES
from torchshard.plans.plan import Plan


@dataclass(frozen=True)
class _Prices(CostModel):
    """Random prices, reproducible by a seed; split ops are cheaper."""

    seed: int = 0

    def _drawn(self, *of: object) -> float:
        return random.Random(f"{self.seed} {of}").random()

    def seconds(self, op: Op, choice: Choice) -> float:
        return self._drawn(op.node.name, choice.name, choice.operands) + (0.0 if choice.factors else 0.7)

    def sent(self, value: Value, step: ConversionStep) -> tuple[Sent, Sent, Sent]:
        sent = Sent("none", 0.0, self._drawn(value.shape, step) / 2)
        return sent, sent, Sent("none", 0.0, 0.0)


def random_plan(graph: fx.GraphModule, model: nn.Module, ranks: int, seed: int) -> Plan:
    """Returns a legal plan that stores some parameters in random slices."""
    prices, draw = _Prices(MACHINES["cpu-gloo"], MeshAxis(ranks), seed), random.Random(seed)
    layouts = {name: _layout(p.shape, ranks, draw) for name, p in model.named_parameters() if draw.random() < 0.5}
    asked = GraphConstraints({}, {}, layouts, all_axes=True)
    found = search(graph.graph, prices, asked, lambda *_: 0.0, fold=False)
    facts, axis = ModelFacts.of(model), MeshAxis(ranks)
    conversions = conversions_of(graph.graph, CostModel(Machine(), axis), found.choices, found.parameters)
    plan = AxisPlan(axis, found.parameters, found.choices, conversions, static=True)
    return Plan((plan,), stored(facts), facts.signature)


def _layout(shape: Sequence[int], ranks: int, draw: random.Random) -> Layout:
    """Returns a layout that splits a random dim of a parameter, as one segment or as two halves."""
    if not shape:
        return I
    dim = draw.randrange(len(shape))
    half = shape[dim] // 2
    parts = [(half, 1), (shape[dim] - half, 1)] if half and draw.random() < 0.4 else [(shape[dim], 1)]
    return canonical(dim, parts, ranks)
