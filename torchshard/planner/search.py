"""The exact optimum of a network of costs, under a budget of bytes.

By default the plan is the fastest in which the weights (parameters of two dims or more) of all ranks together take at
most `WEIGHT_SLACK` more bytes than the minimum. The strict minimum would split every router and norm, and send
activations to do so. A weight stays replicated only if that saves enough time for its bytes (`WHOLE_WEIGHT_GAIN`).
Without gradients a quarter of that time suffices, because a rank then stores a weight only once.

A budget is met by a price per byte (a Lagrange multiplier). The optimum at each price is exact, and the prices at which
it changes are found one after the other. A better plan that fits may exist between two prices: the line between their
optima bounds its advantage, and the plan reports this bound as its gap. Under a memory limit the layers of a run may
differ: the largest possible number of layers is planned as with more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from torchshard.core.errors import PlanError
from torchshard.core.layouts import I, Layout
from torchshard.core.rows import Choice
from torchshard.ir.fake_values import nbytes
from torchshard.ir.graph import is_tensor_op, is_weight, where
from torchshard.planner.build import build
from torchshard.planner.constants import EPSILON, FORBIDDEN, MAX_PRICE, TRAINING_COPIES, WEIGHT_SLACK, WHOLE_WEIGHT_GAIN
from torchshard.planner.costs import CostModel
from torchshard.planner.network import Network, name_of
from torchshard.planner.prune import keep_shared_whole, prune
from torchshard.planner.solver import Solution, Solver
from torchshard.planner.states import GraphConstraints

Excess = Callable[[Mapping[str, Choice], Mapping[str, Layout]], float]
"""Returns the bytes by which a plan of these choices and layouts exceeds the limit; 0 or less if it fits."""


@dataclass(frozen=True)
class SearchResult:
    """The plan that a search found."""

    choices: Mapping[str, Choice]
    parameters: Mapping[str, Layout]
    gap: float
    """Optimality gap in seconds: no plan that fits is faster by more; 0 = proven optimal."""
    fits: bool = True
    """Whether the plan is within the budget; if not, it is the plan with the least memory."""
    fastest: SearchResult | None = None
    """The fastest plan without the limit that the search had."""


def search(
    graph: fx.Graph, model: CostModel, constraints: GraphConstraints, excess: Excess | None = None, *, fold: bool = True
) -> SearchResult:
    """Returns the fastest plan within the budget, or the smallest plan if none fits.

    Args:
        excess: returns the bytes by which a plan exceeds a limit; by default the bytes of weights are limited.
        fold: whether repeated blocks are planned once; the result costs the same.

    Raises:
        PlanError: no plan is legal under the pins.
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
    fastest = SearchResult(*expand_to_all_layers(graph, network, sweep.optima[0][1]), 0.0)
    best = expand_to_all_layers(graph, network, sweep.best)
    return SearchResult(*best, sweep.gap(float("inf")), sweep.fits, fastest)


def most_weights(graph: fx.Graph, network: Network, smallest: Solution) -> float:
    """Returns the byte budget for weights: the minimum, plus `WEIGHT_SLACK` of the bytes that can be split."""
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
    """The optima at the prices that a sweep tried."""

    best: Solution
    """The optimum at the lowest price at which it fits, or the smallest plan if none fits."""
    fits: bool
    optima: list[tuple[float, Solution]]
    """(price, optimum at this price), the lowest price first; the others are unordered."""
    prices: tuple[float, float]
    """The highest price found at which the optimum does not fit, and the lowest at which it does."""

    def gap(self, max_bytes: float) -> float:
        """Bounds the advantage, at the lowest price, of any other solution of at most `max_bytes`."""
        least = self.optima[0][0]
        bound = max(s.bound - ((price - least) * max_bytes if price > least else 0.0) for price, s in self.optima)
        cost = self.best.seconds + least * self.best.nbytes
        return cost - bound if cost - bound > EPSILON * cost else 0.0


def sweep_prices(
    solver: Solver, fits: Callable[[Solution], bool], smallest: Solution, price: float = 0.0
) -> PriceSweep:
    """Finds the lowest price at which the optimum fits.

    Args:
        fits: whether a solution fits.
        smallest: the optimum at `MAX_PRICE`.
        price: the lowest price to try, in seconds per byte.
    """
    fast, small = solver.best(price), smallest
    optima = [(price, fast), (MAX_PRICE, small)]
    too_low, high = price, MAX_PRICE
    if fits(fast):
        return PriceSweep(fast, True, optima, (too_low, high))
    if not fits(small):
        return PriceSweep(small, False, optima, (too_low, high))
    while True:
        # at this price both cost the same, so any other optimum between them is cheaper
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
    """Returns the best solution of a sweep, or a faster one that fits and plans equal layers differently.

    At the deciding price, all layers of a run change at once. Here only the largest number of layers that fits takes
    the lower price; the rest of the model is tried at both prices.
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
    """Returns the largest number up to `last` without a positive excess, or -1.

    The excess grows about linearly with the number, so few numbers are tried. Each is the zero of the line through the
    two ends of the interval; the excess of an end that stays is halved (regula falsi, "Illinois").
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
    """Returns the best solution found within a byte budget, its optimality gap in seconds, and the price of a byte.

    Args:
        budget: maps the minimum of bytes to the maximum allowed.
        smallest: the optimum at `MAX_PRICE`.
        gain: the percentage of the step's time that is worth one percent of the bytes.
    """
    max_bytes = budget(smallest.nbytes)
    price = min(gain * smallest.seconds / smallest.nbytes if smallest.nbytes else 0.0, MAX_PRICE)
    sweep = sweep_prices(solver, lambda solution: solution.nbytes <= max_bytes, smallest, price)
    return sweep.best, sweep.gap(max_bytes), price


def expand_to_all_layers(
    graph: fx.Graph, network: Network, solution: Solution
) -> tuple[dict[str, Choice], dict[str, Layout]]:
    """Returns the choices and layouts of all nodes; each block copies the planned block that represents it."""
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
