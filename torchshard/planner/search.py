"""The exact optimum of a network of costs, under a budget of bytes.

By default the weights (parameters of two dims or more) of all ranks together take at most `WEIGHT_SLACK` more bytes
than the fewest possible, and the step is the fastest that this allows. Strictly fewest bytes would split every router
and norm, and send activations for it. A weight stays whole only where that saves time worth its bytes
(`WHOLE_WEIGHT_GAIN`); in calls without gradients a quarter of that time will do, for a weight is then held alone.

A budget is met by a price per byte (a Lagrange multiplier): the optimum at each price is exact, and the prices at which
it changes are found one after the other. Between two of them there may be a better plan that fits; it can't be better
than the line between the two optima allows, which is the gap that is reported. With a limit of memory the layers of a
run may differ: as many as fit are planned as they would be with more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from torchshard.core.errors import PlanError
from torchshard.core.layouts import I, Layout
from torchshard.core.notation import Choice
from torchshard.ir.graph import is_tensor_op, is_weight, nbytes, where
from torchshard.planner.build import build
from torchshard.planner.constants import EPSILON, FORBIDDEN, MAX_PRICE, TRAINING_COPIES, WEIGHT_SLACK, WHOLE_WEIGHT_GAIN
from torchshard.planner.costs import CostModel
from torchshard.planner.network import Network, name_of
from torchshard.planner.prune import keep_shared_whole, prune
from torchshard.planner.solver import Solution, Solver
from torchshard.planner.states import GraphConstraints

Excess = Callable[[Mapping[str, Choice], Mapping[str, Layout]], float]
"""How many bytes more a plan of these choices and layouts takes than it may; none, or fewer: it is allowed."""


@dataclass(frozen=True)
class SearchResult:
    """The decisions of a search."""

    choices: Mapping[str, Choice]
    parameters: Mapping[str, Layout]
    gap: float
    """Optimality gap in seconds: no plan that fits is faster by more; 0 = proven optimal."""
    fits: bool = True
    """Whether it is within the budget; if not, it is the plan with the least memory."""


def search(
    graph: fx.Graph,
    model: CostModel,
    constraints: GraphConstraints,
    excess: Excess | None = None,
    *,
    fold: bool = True,
) -> SearchResult:
    """The fastest plan that is allowed.

    Args:
        excess: says whether a plan is; by default, the bytes of its weights do.
        fold: whether repeated blocks are planned once; the result costs the same.

    Raises:
        PlanError: an op can't run as it is pinned.
    """
    network = build(graph, model, constraints, fold=fold)
    impossible = prune(network)
    if impossible is not None:
        raise _no_way(network, impossible)
    solver = Solver(network)
    if not solver.exact and network.chains and excess is not None:
        keep_shared_whole(network)
        prune(network)
        solver = Solver(network)
    if not solver.exact and network.chains:
        return search(graph, model, constraints, excess, fold=False)
    smallest = solver.best(MAX_PRICE)
    if smallest.seconds == FORBIDDEN:
        raise _no_way(network, None)
    if excess is None:
        most = most_weights(graph, network, smallest)
        gain = WHOLE_WEIGHT_GAIN if constraints.trains else WHOLE_WEIGHT_GAIN / TRAINING_COPIES
        solution, gap, _ = solve_within_budget(solver, lambda _: most, smallest, gain)
        return SearchResult(*expand_to_all_layers(graph, network, solution), gap)

    def too_much(solution: Solution) -> float:
        return excess(*expand_to_all_layers(graph, network, solution))

    sweep = sweep_prices(solver, lambda solution: too_much(solution) <= 0, smallest)
    sweep = replace(sweep, best=mix_layers(solver, too_much, sweep))
    return SearchResult(*expand_to_all_layers(graph, network, sweep.best), sweep.gap(float("inf")), sweep.fits)


def most_weights(graph: fx.Graph, network: Network, smallest: Solution) -> float:
    """The most bytes of weights that a plan may have: given that with the fewest, a little more of what it splits."""
    layouts = expand_to_all_layers(graph, network, smallest)[1]
    whole = sum(nbytes(n.meta["val"]) for n in graph.nodes if is_weight(n) and layouts.get(n.meta["path"]) == I)
    return smallest.nbytes + WEIGHT_SLACK * (smallest.nbytes - whole)


def _no_way(network: Network, decision: str | None) -> PlanError:
    place = None if decision is None else network.graph.nodes[decision]["position"]
    return PlanError(
        "no legal way to run an op as the plan requires it and its neighbours",
        where=where(network.folded.nodes[place]) if place is not None else "the plan",
        why="each of its choices requires an operand, or gives a result, that the pins around it rule out",
        attempt="unpin one of the modules around it",
    )


@dataclass(frozen=True)
class PriceSweep:
    """The optima at the prices that were tried."""

    best: Solution
    """The optimum at the least price at which it fits, or the smallest plan if none fits."""
    fits: bool
    optima: list[tuple[float, Solution]]
    """(price, the optimum at it), the least price first."""
    prices: tuple[float, float]
    """The highest price found at which the optimum does not fit, and the lowest at which it does."""

    def gap(self, max_bytes: float) -> float:
        """No other solution of so many bytes at most costs less, at the least price, by more than this."""
        least = self.optima[0][0]
        bound = max(s.bound - ((price - least) * max_bytes if price > least else 0.0) for price, s in self.optima)
        cost = self.best.seconds + least * self.best.nbytes
        return cost - bound if cost - bound > EPSILON * cost else 0.0


def sweep_prices(
    solver: Solver, fits: Callable[[Solution], bool], smallest: Solution, price: float = 0.0
) -> PriceSweep:
    """Finds the optimum at the least price at which it fits, from this price on.

    Args:
        fits: whether a solution does.
        smallest: the optimum at `MAX_PRICE`.
        price: seconds per byte.
    """
    fast, small = solver.best(price), smallest
    optima = [(price, fast), (MAX_PRICE, small)]
    too_low, high = price, MAX_PRICE
    if fits(fast):
        return PriceSweep(fast, True, optima, (too_low, high))
    if not fits(small):
        return PriceSweep(small, False, optima, (too_low, high))
    while True:
        # the price at which both cost the same: any other optimum between the two is cheaper there
        price = (small.seconds - fast.seconds) / max(fast.nbytes - small.nbytes, 1.0)
        between = solver.best(price)
        optima.append((price, between))
        cost, known = (s.seconds + price * s.nbytes for s in (between, fast))
        if cost >= known * (1 - EPSILON) or not small.nbytes < between.nbytes < fast.nbytes:
            return PriceSweep(small, True, optima, (too_low, high))
        if fits(between):
            small, high = between, price
        else:
            fast, too_low = between, price


def mix_layers(solver: Solver, excess: Callable[[Solution], float], sweep: PriceSweep) -> Solution:
    """The best solution of a sweep, or a faster one that fits too: equal layers may be planned in different ways.

    At the price that decides, all layers of a run change at once. As many of them as fit are planned as at the lower
    price, beside the rest of the model at the one price and at the other.
    """
    best, layers = sweep.best, max((chain.count for chain in solver.network.chains), default=0)
    fastest_fits = sweep.best is sweep.optima[0][1]
    if not layers or not sweep.fits or fastest_fits:
        return best
    too_low, high = sweep.prices

    def mixed(rest: float, count: int) -> Solution:
        return solver.mixed(rest, high, too_low, count / layers)

    def too_much(rest: float, count: int) -> float:
        return excess(mixed(rest, count))

    for rest, most in ((high, layers), (too_low, layers - 1)):
        fitting = last_allowed(partial(too_much, rest), most)
        if fitting >= 0:
            best = min(best, mixed(rest, fitting), key=lambda s: s.seconds)
    return best


def last_allowed(excess: Callable[[int], float], last: int) -> int:
    """The greatest number up to `last` whose excess is not positive; -1 if there is none.

    The excess grows with the number, about evenly, so that few are tried: each one is where the line through those that
    enclose the place crosses zero, and an end that stays counts half the next time (regula falsi, "Illinois").
    """
    low, high = 0, last
    below, above = excess(low), excess(high)
    if below > 0 or above <= 0:
        return -1 if below > 0 else last
    while high - low > 1:
        crossing = low + int((high - low) * below / (below - above))
        tried = min(max(crossing, low + 1), high - 1)
        found = excess(tried)
        if found <= 0:
            low, below, above = tried, found, above / 2
        else:
            high, above, below = tried, found, below / 2
    return low


def solve_within_budget(
    solver: Solver, budget: Callable[[float], float], smallest: Solution, gain: float = WHOLE_WEIGHT_GAIN
) -> tuple[Solution, float, float]:
    """The best solution found within a budget of bytes, its optimality gap in seconds, and the price of a byte.

    Args:
        budget: from the fewest bytes possible to the most allowed.
        smallest: the optimum at `MAX_PRICE`.
        gain: the part of the time that makes up for as large a part of the bytes.
    """
    max_bytes = budget(smallest.nbytes)
    price = min(gain * smallest.seconds / smallest.nbytes if smallest.nbytes else 0.0, MAX_PRICE)
    sweep = sweep_prices(solver, lambda solution: solution.nbytes <= max_bytes, smallest, price)
    return sweep.best, sweep.gap(max_bytes), price


def expand_to_all_layers(
    graph: fx.Graph, network: Network, solution: Solution
) -> tuple[dict[str, Choice], dict[str, Layout]]:
    """The choices and layouts of all nodes: each block takes those of the planned block that represents it."""
    folded, states = network.folded, network.states

    def state(name: str, position: int) -> Any:
        for chain, inner in zip(network.chains, solution.inner, strict=True):
            block = chain.run.block_of(position)
            if 2 <= block < chain.run.count - 1:
                return states[name][inner[block - 2][name]]
        return states[name][solution.states[name]]

    ops = [(i, n) for i, n in enumerate(folded.nodes) if is_tensor_op(n)]
    choices = {n.name: state(name_of("op", folded.planned_node(n)), i) for i, n in ops}
    layouts: dict[str, Layout] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            name = name_of("stored", folded.planned_placeholder(node))
            layout = state(name, folded.first_use(node)[0]) if name in states else I
            if node.meta["kind"] in ("parameter", "buffer") or layout != I:
                layouts[node.meta["path"]] = layout
    return choices, layouts
