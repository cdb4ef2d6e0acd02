"""A solved planning problem, kept with its Plan so that it can be solved again under other constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import sympy
from torch import fx

from torchshard.core.errors import PlanError
from torchshard.core.layouts import Layout
from torchshard.core.rows import Choice
from torchshard.ir.fake_values import other_sizes, sizes_as
from torchshard.ir.graph import consumers, is_tensor_op
from torchshard.planner.build import build
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.planner.kernels import kernels_of
from torchshard.planner.network import Network
from torchshard.planner.predict import predict
from torchshard.planner.properties import Op
from torchshard.planner.search import Excess, search
from torchshard.planner.states import GraphConstraints
from torchshard.plans.costs import Costs
from torchshard.plans.data import AxisPlan


@dataclass(frozen=True)
class Alternative:
    """The layouts and costs of an alternative plan, for comparison."""

    parameters: Mapping[str, Layout]
    costs: Costs


class Price(NamedTuple):
    """The cost of an op on the rank with the most work: seconds, FLOPs and bytes."""

    forward: float
    backward: float
    """Seconds in backward, including recomputation."""
    flops: float
    """FLOPs of the op's products in forward."""
    nbytes: float
    """Bytes that the op reads and writes in forward."""


@dataclass(frozen=True)
class PlanningProblem:
    """The inputs of the search for one mesh axis' plan."""

    graph: fx.Graph
    model: CostModel
    constraints: GraphConstraints
    excess: Excess | None = None
    """Returns the bytes by which a plan exceeds the memory limit; None without a limit."""
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=other_sizes)
    """Dynamic sizes to use instead of the example inputs', such as the size of a batch shard."""

    def prices(self, choices: Mapping[str, Choice]) -> dict[fx.Node, Price]:
        """Returns the price of each op under these choices, in the order of the graph."""
        with sizes_as(self.sizes):
            return {n: self._price(n, choices[n.name]) for n in consumers(self.graph) if n.name in choices}

    def _price(self, node: fx.Node, choice: Choice) -> Price:
        op = Op.of(node)
        model = self.model
        return Price(*model.ways(op, choice), model.flops(op, choice), model.traffic(op, choice))

    def kernels(self) -> int:
        """Returns the kernels that the host starts in a step, if the device may wait for it: on any number of ranks."""
        if self.model.compiled or not self.model.machine.host_overhead:
            return 0
        with sizes_as(self.sizes):
            return sum(self._kernels(Op.of(node)) for node in self.graph.nodes if is_tensor_op(node))

    def _kernels(self, op: Op) -> int:
        ahead, back = kernels_of(op, compiled=self.model.compiled)
        return ahead * (1 + self.model.is_recomputed(op.node)) + back

    def network(self) -> Network:
        """Returns the decisions and their costs, before any state is removed."""
        with sizes_as(self.sizes):
            return build(self.graph, self.model, self.constraints)

    def solve(self, constraints: GraphConstraints) -> Alternative:
        """Returns the best plan under other constraints.

        Raises:
            PlanError: no plan is legal, or even the smallest exceeds the memory limit.
        """
        with sizes_as(self.sizes):
            result = search(self.graph, self.model, constraints, self.excess)
        if not result.fits:
            raise PlanError("nothing fits", where="memory=")
        return Alternative(result.parameters, self.costs_of(result.choices, result.parameters))

    def costs_of(self, choices: Mapping[str, Choice], parameters: Mapping[str, Layout]) -> Costs:
        """Returns the costs of these choices and layouts, with the fastest conversions."""
        with sizes_as(self.sizes):
            conversions = conversions_of(self.graph, self.model, choices, parameters)
            return predict(self.graph, self.model, choices, parameters, conversions)


class PlannedAxis(NamedTuple):
    """The plan of one mesh axis, and the problem that it solves."""

    plan: AxisPlan
    problem: PlanningProblem
