"""From a graph and what is asked of it to a Plan: the exact optimum of the network of costs, under a budget of bytes.

By default the parameters of a rank take at most `SLACK` more bytes than the fewest possible, and the step is the
fastest that this allows: a weight whose splitting would cost a collective and save next to nothing stays whole.

A budget is met by a price per byte (a Lagrange multiplier): for each price the optimum is exact, and the prices at
which it changes are found one after the other. Between two of them there may be a plan that is faster and fits; it
can't be faster than the line between the two allows, which is the gap that is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchshard.errors import PlanError
from torchshard.graph import is_tensor_op, where
from torchshard.layouts import I, Layout
from torchshard.notation import Choice
from torchshard.planner.costs import CostModel
from torchshard.planner.network import Asked, Network, build
from torchshard.planner.prune import prune
from torchshard.planner.solver import Solution, Solver

SLACK = 0.1
"""How much more than the fewest bytes of parameters a rank may hold, in terms of these."""
EPSILON = 1e-9
"""Costs that differ by less, relatively, are equal but for rounding."""
STEEP = 1e-3
"""Seconds for a byte: more than any byte is worth."""


@dataclass(frozen=True)
class Found:
    """What a search decided."""

    choices: Mapping[str, Choice]
    parameters: Mapping[str, Layout]
    gap: float
    """Seconds by which a plan that fits might be faster, at most."""


def search(graph: fx.Graph, model: CostModel, asked: Asked, *, fold: bool = True) -> Found:
    """The best plan for what is asked.

    Args:
        fold: whether repeated blocks are planned once; the result costs the same.

    Raises:
        PlanError: an op can't run as it is pinned.
    """
    network = build(graph, model, asked, fold=fold)
    impossible = prune(network)
    if impossible is not None:
        raise _no_way(network, impossible)
    found, gap = within(Solver(network), lambda fewest: fewest * (1 + SLACK))
    choices, parameters = stamped(graph, network, found)
    return Found(choices, parameters, gap)


def _no_way(network: Network, variable: int) -> PlanError:
    (_, position, _) = next(key for key, v in network.keys.items() if v == variable)
    return PlanError(
        "no legal way to run an op as the plan wants it and its neighbours",
        where=where(network.folded.nodes[position]),
        why="each of its choices wants an operand, or gives a result, that what is pinned around it rules out",
        attempt="unpin one of the modules around it",
    )


def within(solver: Solver, budget: Callable[[float], float]) -> tuple[Solution, float]:
    """The fastest solution found within a budget of bytes, and by how many seconds another may beat it, at most.

    Args:
        budget: from the fewest bytes possible to the most allowed.
    """
    fast, small = solver.best(), solver.best(STEEP)
    most = budget(small.nbytes)
    if fast.nbytes <= most or small.nbytes > most:
        found = fast if fast.nbytes <= most else small
        return found, found.seconds - fast.bound
    bound = fast.bound
    while True:
        price = (small.seconds - fast.seconds) / (fast.nbytes - small.nbytes)
        between = solver.best(price)
        bound = max(bound, between.bound - price * most)
        cost, known = (s.seconds + price * s.nbytes for s in (between, fast))
        if cost >= known * (1 - EPSILON) or between.nbytes in (fast.nbytes, small.nbytes):
            return small, max(small.seconds - bound, 0.0)
        fast, small = (fast, between) if between.nbytes <= most else (between, small)


def stamped(graph: fx.Graph, network: Network, found: Solution) -> tuple[dict[str, Choice], dict[str, Layout]]:
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
    layouts: dict[str, Layout] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["kind"] in ("parameter", "buffer"):
            home, slot = folded.home(node)
            layouts[node.meta["path"]] = state("stored", home, slot) if home >= 0 else I
    return choices, layouts
