"""From a graph and what is asked of it to a Plan: the exact optimum of the network of costs, under a budget of bytes.

By default the weights (parameters of two dims or more) of all ranks together take at most `SLACK` more bytes than the
fewest possible, and the step is the fastest that this allows: a weight whose splitting would cost a collective and save
next to nothing stays whole, nothing is sent to split a vector, nor to make slices equal. A weight stays whole only
where that saves time worth its bytes (`WORTH`).

A budget is met by a price per byte (a Lagrange multiplier): for each price the optimum is exact, and the prices at
which it changes are found one after the other. Between two of them there may be a plan that is better and fits; it
can't be better than the line between the two allows, which is the gap that is told. With a limit of memory the layers
of a run may differ: as many as fit are as they would be with more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from torchshard.core.errors import PlanError
from torchshard.core.layouts import I, Layout
from torchshard.core.notation import Choice
from torchshard.ir.graph import is_tensor_op, is_weight, nbytes, where
from torchshard.planner.costs import CostModel
from torchshard.planner.network import FORBIDDEN, GraphConstraints, Network, build
from torchshard.planner.prune import prune
from torchshard.planner.solver import Solution, Solver

SLACK = 0.1
"""How much more than the fewest bytes of weights the ranks may hold, in terms of these; without those of weights that
can't be split, or are pinned whole."""
WORTH = 0.5
"""What a weight that stays whole must save: so many percent of the step's time for a percent more bytes."""
EPSILON = 1e-9
"""Costs that differ by less, relatively, are equal but for rounding."""
STEEP = 1e-3
"""Seconds for a byte: more than any byte is worth."""


Fits = Callable[[Mapping[str, Choice], Mapping[str, Layout]], bool]
"""Whether a plan of these choices and layouts is allowed."""


@dataclass(frozen=True)
class SearchResult:
    """What a search decided."""

    choices: Mapping[str, Choice]
    parameters: Mapping[str, Layout]
    gap: float
    """Seconds by which a plan that fits might be faster, at most."""
    fits: bool = True
    """Whether it is within what was allowed; if not it is the leanest found."""


def search(
    graph: fx.Graph,
    model: CostModel,
    constraints: GraphConstraints,
    fits: Fits | None = None,
    *,
    fold: bool = True,
) -> SearchResult:
    """The fastest plan that is allowed.

    Args:
        fits: whether a plan of these choices and layouts is; by default, by the bytes of its weights.
        fold: whether repeated blocks are planned once; the result costs the same.

    Raises:
        PlanError: an op can't run as it is pinned.
    """
    network = build(graph, model, constraints, fold=fold)
    impossible = prune(network)
    if impossible is not None:
        raise _no_way(network, impossible)
    solver = Solver(network)
    if not solver.exact and network.chains:
        return search(graph, model, constraints, fits, fold=False)
    small = solver.best(STEEP)
    if small.seconds == FORBIDDEN:
        raise _no_way(network, None)
    if fits is None:
        fixed = _whole_bytes(graph, stamped(graph, network, small)[1])
        found, gap, _ = within(solver, lambda fewest: fewest + SLACK * (fewest - fixed), small)
        return SearchResult(*stamped(graph, network, found), gap)

    def allowed(solution: Solution) -> bool:
        return fits(*stamped(graph, network, solution))

    tried = fastest(solver, allowed, small)
    tried = replace(tried, found=filled(solver, allowed, tried))
    return SearchResult(*stamped(graph, network, tried.found), tried.gap(float("inf")), tried.fits)


def _whole_bytes(graph: fx.Graph, layouts: Mapping[str, Layout]) -> float:
    """The bytes of the weights that are not split."""
    return sum(nbytes(n.meta["val"]) for n in graph.nodes if is_weight(n) and layouts.get(n.meta["path"]) == I)


def _no_way(network: Network, variable: int | None) -> PlanError:
    place = next((position for (_, position, _), v in network.keys.items() if v == variable), None)
    return PlanError(
        "no legal way to run an op as the plan wants it and its neighbours",
        where=where(network.folded.nodes[place]) if place is not None else "the plan",
        why="each of its choices wants an operand, or gives a result, that what is pinned around it rules out",
        attempt="unpin one of the modules around it",
    )


@dataclass(frozen=True)
class Tried:
    """The solutions at the prices that were tried."""

    found: Solution
    """The cheapest at the least price that fits, or the leanest if none does."""
    fits: bool
    solved: list[tuple[float, Solution]]
    """(price, the best at it), the least price first."""
    prices: list[float]
    """The highest price found at which the best does not fit, and the lowest at which it does."""

    def gap(self, most: float) -> float:
        """By how much another solution of at most so many bytes may cost less at the least price: no more than this."""
        least = self.solved[0][0]
        bound = max(s.bound - ((price - least) * most if price > least else 0.0) for price, s in self.solved)
        return max(self.found.seconds + least * self.found.nbytes - bound, 0.0)


def fastest(solver: Solver, fits: Callable[[Solution], bool], small: Solution, price: float = 0.0) -> Tried:
    """The cheapest solution at a price that fits: at this price if that does, else at the least higher one.

    Args:
        fits: whether a solution does.
        small: the best at the price `STEEP`.
        price: seconds for a byte.
    """
    fast = solver.best(price)
    solved = [(price, fast), (STEEP, small)]
    prices = [price, STEEP]
    if fits(fast):
        return Tried(fast, True, solved, prices)
    if not fits(small):
        return Tried(small, False, solved, prices)
    while True:
        price = (small.seconds - fast.seconds) / max(fast.nbytes - small.nbytes, 1.0)
        between = solver.best(price)
        solved.append((price, between))
        cost, known = (s.seconds + price * s.nbytes for s in (between, fast))
        if cost >= known * (1 - EPSILON) or not small.nbytes < between.nbytes < fast.nbytes:
            return Tried(small, True, solved, prices)
        if fits(between):
            small, prices[1] = between, price
        else:
            fast, prices[0] = between, price


def filled(solver: Solver, fits: Callable[[Solution], bool], tried: Tried) -> Solution:
    """The solution found, or a faster one that fits too: layers that are alike need not all be planned alike.

    At the price that decides, all of a run's layers change at once. As many of them as fit are taken as they are at the
    lower price, beside the rest of the model at the one price and at the other.
    """
    best, runs = tried.found, max((chain.count for chain in solver.network.chains), default=0)
    fastest_fits = tried.found is tried.solved[0][1]
    if not tried.fits or fastest_fits:
        return best
    fast, lean = tried.prices
    for rest, fitting, too_many in ((lean, 0, runs + 1), (fast, -1, runs)):
        while too_many - fitting > 1:
            count = (fitting + too_many) // 2
            mixed = solver.mixed(rest, lean, fast, count / runs)
            if not fits(mixed):
                too_many = count
            else:
                fitting = count
                best = min(best, mixed, key=lambda s: s.seconds)
    return best


def within(solver: Solver, budget: Callable[[float], float], least: Solution) -> tuple[Solution, float, float]:
    """The best solution found within a budget of bytes: (it, by how much another may be better, the price of a byte).

    Args:
        budget: from the fewest bytes possible to the most allowed.
        least: the best at the price `STEEP`.
    """
    most = budget(least.nbytes)
    price = min(WORTH * least.seconds / least.nbytes if least.nbytes else 0.0, STEEP)
    tried = fastest(solver, lambda solution: solution.nbytes <= most, least, price)
    return tried.found, tried.gap(most), price


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
