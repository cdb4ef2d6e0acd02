"""From a graph and pins to a Plan: the exact optimum of the network of costs, under a budget of bytes.

By default the parameters of a rank take at most `SLACK` more bytes than the fewest possible, and the step is the
fastest that this allows: a weight whose splitting would cost a collective and save next to nothing stays whole.

A budget is met by a price per byte (a Lagrange multiplier): for each price the optimum is exact, and the prices at which
it changes are found one after the other. Between two such prices there may be a plan that is faster and fits; it can't
be faster than the line between the two allows, which is the gap that is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchshard.graph import is_tensor_op
from torchshard.layouts import I, Layout
from torchshard.notation import Choice
from torchshard.planner.costs import Costs
from torchshard.planner.network import Asked, Network, build
from torchshard.planner.solver import Solution, Solver
from torchshard.planner.styles import Pin

SLACK = 0.1
"""How much more than the fewest bytes of parameters a rank may hold."""
EPSILON = 1e-9
"""Relative differences of costs below this are rounding."""


@dataclass(frozen=True)
class Found:
    """What a search decided."""

    choices: Mapping[str, Choice]
    parameters: Mapping[str, Layout]
    seconds: float
    nbytes: float
    gap: float
    """Seconds by which a plan that fits might be faster, at most."""


def search(graph: fx.Graph, costs: Costs, asked: Asked, keys: Mapping[fx.Node, Any], *, fold: bool = True) -> Found:
    """The plan for what is asked.

    Raises:
        PlanError: an op can't run as it is pinned.
    """
    network = build(graph, costs, asked, keys, fold=fold)
    solver = Solver(network)
    found, gap = within(solver, lambda fewest: fewest * (1 + SLACK))
    choices, parameters = _stamped(graph, network, found)
    return Found(choices, parameters, found.seconds, found.nbytes, gap)


def within(solver: Solver, budget: Any) -> tuple[Solution, float]:
    """The fastest solution found within a budget of bytes, and by how many seconds a faster one might beat it.

    Args:
        budget: from the fewest bytes possible to the most allowed.
    """
    fast = solver.best()
    dear = max(fast.seconds, EPSILON) / max(_least_difference(solver), 1.0) * 1e3
    small = solver.best(dear)
    most = budget(small.nbytes)
    if fast.nbytes <= most:
        return fast, fast.seconds - fast.bound
    if small.nbytes > most:
        return small, float("inf")
    bound = fast.seconds
    while True:
        price = (small.seconds - fast.seconds) / (fast.nbytes - small.nbytes)
        between = solver.best(price)
        bound = max(bound, between.bound - price * most)
        cost = between.seconds + price * between.nbytes
        if cost >= (fast.seconds + price * fast.nbytes) * (1 - EPSILON) or between.nbytes in (
            fast.nbytes,
            small.nbytes,
        ):
            return small, max(small.seconds - bound, 0.0)
        if between.nbytes <= most:
            small = between
        else:
            fast = between


def _least_difference(solver: Solver) -> float:
    """The fewest bytes by which a choice of one parameter's layout differs from another."""
    return 1.0


def _stamped(graph: fx.Graph, network: Network, found: Solution) -> tuple[dict[str, Choice], dict[str, Layout]]:
    """The choices and layouts of all nodes: those of the planned blocks for the blocks that they stand for."""
    folded = network.folded

    def state(kind: str, position: int, slot: int) -> Any:
        variable = network.keys[kind, folded.stand_in(position), slot]
        for chain, inner in zip(network.chains, found.inner, strict=True):
            block = chain.run.block_of(position)
            if 2 <= block < chain.run.count - 1:
                return network.states[variable][inner[block - 2][variable]]
        return network.states[variable][found.states[variable]]

    choices = {n.name: state("op", i, 0) for i, n in enumerate(folded.nodes) if is_tensor_op(n)}
    stored = [n for n in graph.nodes if n.op == "placeholder" and n.meta["kind"] in ("parameter", "buffer")]
    homes = {n: folded.home(n) for n in stored}
    layouts = {n.meta["path"]: state("stored", *homes[n]) if homes[n][0] >= 0 else I for n in stored}
    return choices, layouts


# --- pins ------------------------------------------------------------------------------------------------------------


def pinned_options(pins: Mapping[fx.Node, Pin], world: int) -> dict[fx.Node, list[Choice]]:
    raise NotImplementedError
