"""The fastest plan within a memory limit: more is split, or backward recomputes layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import sympy
from torch import fx

from torchshard.compiler.memory import memory_of
from torchshard.compiler.shortened import Shortened, shortened
from torchshard.core.layouts import Layout
from torchshard.core.paths import layer_of, outermost
from torchshard.core.rows import Choice
from torchshard.ir.editing import duplicate, in_example_sizes
from torchshard.ir.effects import growing_sizes
from torchshard.ir.fake_values import size_expr, sizes_as
from torchshard.ir.graph import is_tensor, multiples_of, placeholders
from torchshard.passes import localized, rewrite
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.planner.problem import PlanningProblem
from torchshard.planner.search import SearchResult, last_allowed, search
from torchshard.plans.data import AxisPlan
from torchshard.plans.optimizers import Optimizer

MOST_TOKENS = 1 << 30
"""Longer contexts, and larger batches, than this are not searched."""


def _batch_sizes(graph: fx.Graph) -> set[sympy.Symbol]:
    """The size of the first dim of a call's first tensor, if it is dynamic."""
    values = [n.meta["val"] for n in placeholders(graph) if n.meta["kind"] == "input" and is_tensor(n)]
    sizes = [size_expr(value.shape[0]) for value in values if value.ndim][:1]
    return {size for size in sizes if isinstance(size, sympy.Symbol)}


@dataclass(frozen=True)
class Limit:
    """The most memory that a step may take on a rank."""

    module: fx.GraphModule
    costs: CostModel
    nbytes: float
    optimizer: Optimizer
    slices: int = 1
    """Number of slices that later axes, which split the batch, cut each weight's local shard into."""
    keeps_gathered: bool = False
    """Whether a weight gathered from these slices is kept until backward has used it."""
    _known: dict[object, dict[str, float]] = field(default_factory=dict, compare=False, repr=False)
    """Cached estimates, by plan."""

    def estimate(self, plan: AxisPlan) -> dict[str, float]:
        """The memory of a plan by kind; see `memory_of`."""
        key = tuple(tuple(given.items()) for given in (plan.choices, plan.layouts, plan.conversions)), plan.recompute
        if key not in self._known:
            self._known[key] = self._memory(self._of_rank(plan, in_example_sizes))
        return self._known[key]

    def largest_calls(self, plan: AxisPlan) -> tuple[int | None, int | None]:
        """The most tokens, in carried values and in the call itself, and the largest batch that still fit.

        Each with all other sizes as in the example inputs; None if carried values do not grow, or
        the batch is of one size.
        """
        local = self._of_rank(plan, duplicate)
        graph = local.module.graph
        return self._largest(local, growing_sizes(graph)), self._largest(local, _batch_sizes(graph))

    def _largest(self, local: Shortened, symbols: Collection[sympy.Symbol]) -> int | None:
        """The largest number for some sizes with which a call fits."""

        def excess(more: int) -> float:
            with sizes_as(dict.fromkeys(symbols, 1 + more)):
                return self._memory(local)["peak"] - self.nbytes

        return 1 + last_allowed(excess, MOST_TOKENS - 1) if symbols else None

    def _memory(self, local: Shortened) -> dict[str, float]:
        return memory_of(local, self.optimizer, self.slices, keeps_gathered=self.keeps_gathered)

    def _of_rank(self, plan: AxisPlan, copied: Callable[[fx.GraphModule], fx.GraphModule]) -> Shortened:
        """The graph of the first rank, which stores the most.

        Args:
            copied: copies the graph, with dynamic sizes or without.
        """

        def local(module: fx.GraphModule) -> fx.GraphModule:
            return localized(copied(rewrite(module, plan)), plan.axis.simulated()[0])

        short = shortened(self.module, self._keys(plan))
        return replace(short, module=local(short.module), full=lambda: local(self.module))

    def _keys(self, plan: AxisPlan) -> dict[fx.Node, object]:
        """What the layouts of a layer's ops and values are in a plan."""
        layouts = plan.layouts
        return {
            node: (plan.choices.get(node.name), plan.conversions.get(node.name), self.costs.is_recomputed(node))
            if node.op == "call_function"
            else (layouts.get(str(node.meta.get("path"))), plan.conversions.get(node.name))
            for node in self.module.graph.nodes
        }

    def __call__(self, choices: Mapping[str, Choice], layouts: Mapping[str, Layout]) -> float:
        """Bytes by which a plan of these choices and layouts exceeds the limit."""
        conversions = conversions_of(self.module.graph, self.costs, choices, layouts)
        plan = AxisPlan(self.costs.axis, layouts, choices, conversions, recompute=self.costs.recompute)
        return self.estimate(plan)["peak"] - self.nbytes


def search_within(problem: PlanningProblem, limit: Limit) -> tuple[SearchResult, PlanningProblem]:
    """The fastest plan found that fits, and its problem; splits dynamic sizes only if that helps."""
    found, solved = _search(problem, limit)
    if (found.fits and not found.gap) or problem.constraints.dynamic or not multiples_of(problem.graph):
        return found, solved
    more = replace(problem, constraints=replace(problem.constraints, dynamic=True))
    other, solved_by_other = _search(more, limit)
    is_better = (not other.fits, _seconds(other, solved_by_other)) < (not found.fits, _seconds(found, solved))
    return (other, solved_by_other) if is_better else (found, solved)


def _search(problem: PlanningProblem, limit: Limit) -> tuple[SearchResult, PlanningProblem]:
    """The fastest plan found that fits, and its problem with the layers that it recomputes.

    Three ways are compared: no additional recomputing; the fastest plan, with the fewest recomputed
    layers that make it fit; and the fastest plan that fits if all layers are recomputed, again with
    the fewest. The first layers are recomputed, because backward reaches them last, when the memory
    of the others is free.
    """
    graph, constraints = problem.graph, problem.constraints

    def recomputing(layers: Sequence[str]) -> PlanningProblem:
        model = replace(problem.model, recompute=outermost([*problem.model.recompute, *layers]))
        return replace(problem, model=model, excess=replace(limit, costs=model))

    found = search(graph, problem.model, constraints, limit)
    layers = _layers(problem)
    if not layers or (found.fits and not found.gap):
        return found, problem
    fewer = [recomputing(layers[:count]) for count in range(len(layers), 0, -1)]
    fastest = found.fastest
    assert fastest is not None
    fastest_of_all = search(graph, fewer[0].model, constraints, fewer[0].excess)
    ways = [(found, problem)] * found.fits
    for result in (fastest, fastest_of_all):
        fewest = last_allowed(partial(_excess, result, fewer), len(fewer) - 1)
        ways += [(result, fewer[fewest])] if fewest >= 0 else []
    if not ways:
        return fastest_of_all, fewer[0]
    result, chosen = min(ways, key=lambda way: _seconds(*way))
    return replace(result, gap=max(_seconds(result, chosen) - _seconds(fastest, problem), 0.0)), chosen


def _excess(result: SearchResult, problems: Sequence[PlanningProblem], number: int) -> float:
    excess = problems[number].excess
    return 0.0 if excess is None else excess(result.choices, result.parameters)


def _seconds(result: SearchResult, problem: PlanningProblem) -> float:
    return problem.costs_of(result.choices, result.parameters).seconds


def _layers(problem: PlanningProblem) -> list[str]:
    """The layers that are not recomputed yet, in forward order."""
    trained = (node for node in problem.graph.nodes if node.op == "call_function" and node.meta.get("needs_grad"))
    kept = (layer_of(node.meta.get("module", "")) for node in trained if not problem.model.is_recomputed(node))
    return [*dict.fromkeys(layer for layer in kept if layer is not None)]
