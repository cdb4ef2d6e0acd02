"""A batch that the ranks along an axis divide: what a graph knows of it, and how its parts are planned."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import sympy
from torch import fx

from torchshard.capture import Captured
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.constraints import Constraints
from torchshard.compiler.planning import best_plan, graph_for
from torchshard.core.errors import InputError, PlanError
from torchshard.core.garbage import without_garbage_collection
from torchshard.core.layouts import I, Layout, Shard
from torchshard.core.user_files import warn
from torchshard.ir.graph import (
    Size,
    carried_results,
    hint,
    is_tensor,
    passes_on_weight,
    placeholders,
    results_of,
    size_expr,
    sizes_as,
    where,
)
from torchshard.passes import for_next_axis, keep_own_order, rewrite
from torchshard.planner.problem import PlannedAxis
from torchshard.planner.styles import BATCH
from torchshard.plans.data import AxisPlan


@dataclass(frozen=True)
class DividedBatch:
    """How ranks that divide the batch run a graph that is split over other axes already."""

    constraints: Constraints
    """With the layouts over this axis of parameters, buffers, and the call's tensors that are parts of the batch."""
    inputs: frozenset[str]
    """The names of the latter."""
    results: tuple[Layout, ...]
    """The layouts over this axis of what the call returns."""
    facts: ModelFacts
    parts: int
    """So many parts later axes make of what this one leaves to a rank."""

    def solve(self, local: fx.GraphModule, first: AxisPlan | None = None) -> PlannedAxis:
        """Plans this axis for a rank of earlier ones: as the rank before it along one of these, if that is legal.

        Each rank would find its own, for their slices may differ in size; but what one held whole and the other as a
        part of a sum would be added up by a collective of the earlier axis. An empty slice may have to be computed
        whole, so that there are collectives which other ranks do not have.

        Args:
            first: the plan for that rank, if there is one.

        Raises:
            PlanError: what a collective of an earlier axis brings together would be held in different layouts.
        """
        graph, constraints = self._whole(local), replace(self.constraints, plan=first)
        sizes = {size: number // self.parts for size, number in batch_sizes(graph, self.inputs).items()}
        with without_garbage_collection(), sizes_as(sizes):
            solution = best_plan(graph, self.facts, constraints, is_last=self.parts == 1, is_first=False)
        if first is not None:
            _check_settled(graph.graph, solution.plan, first)
        return solution

    def split(self, local: fx.GraphModule, plan: AxisPlan) -> fx.GraphModule:
        """The graph of a rank of the other axis with the collectives of this one, global sizes."""
        with without_garbage_collection():
            return rewrite(graph_for(self._whole(local), plan), plan)

    def _whole(self, local: fx.GraphModule) -> fx.GraphModule:
        graph = for_next_axis(local)
        # a batch that is one number alone is no dynamic size, and any other size may be equal to it
        sizes = {size for size in sizes_in(graph, self.inputs) if isinstance(size, sympy.Expr)}
        divide_batch(graph, sizes, self.results, self.constraints)
        return graph


def _check_settled(graph: fx.Graph, plan: AxisPlan, first: AxisPlan) -> None:
    """What collectives of another axis bring together is divided as the first of their ranks divides it.

    A weight that they pass on is the same on all of them.

    Raises:
        PlanError: it is not.
    """
    for node in graph.nodes:
        choice = plan.choices.get(node.name)
        is_alike = choice == first.choices.get(node.name, choice) or passes_on_weight(node)
        if "settled" in node.meta and not is_alike:
            raise PlanError(
                "ranks with slices of other sizes would divide the batch in another way",
                where=where(node),
                why="what this collective brings together must be divided in one way on all of its ranks",
                attempt="a plan that splits what comes before it evenly, or keeps it whole",
            )


def left_layouts(captured: Captured, batches: Collection[sympy.Symbol]) -> dict[str, Layout]:
    """How ranks that divide the batch hold what a call leaves for the next one: a part of the batch, or all of it.

    Raises:
        InputError: the batch is not its first dim, by which the next call tells parts of the batch.
    """
    found = dict[str, Layout]()
    for value in carried_results(captured.graph.graph):
        place, dim = value.meta["place"], _batch_dim(value, batches)
        if dim:
            raise InputError(
                "what forward leaves in its arguments has the batch in another dim than the first",
                where=f"argument {place!r}, dim {dim}",
                why="the ranks divide the batch, and a call takes as parts of it the tensors that have it first",
                attempt="a cache with the batch first; or ranks that divide the weights alone",
            )
        found[place] = I if dim is None else Shard(BATCH)
    return found


def result_layouts_of(graph: fx.GraphModule, batches: Collection[int | sympy.Expr]) -> tuple[Layout, ...]:
    """How ranks that divide the batch hold what a call returns: a part of the batch, or all of it.

    Args:
        batches: the dynamic sizes that are the batch's; or the number that it is, if it has none.
    """
    dims = [_batch_dim(result, batches) if is_tensor(result) else None for result in results_of(graph.graph)]
    numbers = [size for size in batches if isinstance(size, int)]
    if numbers and any(dim is not None for dim in dims):
        warn(
            f"the graph is for a batch of {numbers[0]} alone, as where forward fixes its size: the first dim of a "
            "result that has this size is taken for the batch's, and each rank has its part of it"
        )
    return tuple(I if dim is None else Shard(dim) for dim in dims)


def _batch_dim(value: fx.Node, batches: Collection[int | sympy.Expr]) -> int | None:
    """The dim of a value that is the batch's, by its size; None if it has none."""
    sizes = map(size_expr, value.meta["val"].shape)
    return next((dim for dim, size in enumerate(sizes) if size in batches), None)


def batch_sizes(graph: fx.GraphModule, batches: Collection[str]) -> dict[sympy.Symbol, int]:
    """The dynamic sizes that are the batch's, and that the ranks divide -> that of the example inputs.

    That of what an earlier call has left is another one, for it may be left in another size.
    """
    split = batches_of(graph, batches).values()
    return {expr: hint(size) for size in split if isinstance(expr := size_expr(size), sympy.Symbol)}


def batches_of(graph: fx.GraphModule, batches: Collection[str]) -> dict[str, Size]:
    """The size of the batch in each of these tensors of the call."""
    return {n.meta["path"]: n.meta["val"].shape[BATCH] for n in placeholders(graph.graph) if n.meta["path"] in batches}


def sizes_in(graph: fx.GraphModule, batches: Collection[str]) -> set[int | sympy.Expr]:
    """The sizes of the batch in these tensors."""
    return set(map(size_expr, batches_of(graph, batches).values()))


def sizes_of_dim(graph: fx.GraphModule, dim: int) -> set[int | sympy.Expr]:
    """The sizes that the call's tensors have in a dim."""
    shapes = [n.meta["val"].shape for n in placeholders(graph.graph) if n.meta["kind"] == "input" and is_tensor(n)]
    return {size_expr(shape[dim]) for shape in shapes if dim < len(shape)}


def divide_batch(
    graph: fx.GraphModule, batches: Collection[sympy.Expr], results: tuple[Layout, ...], constraints: Constraints
) -> None:
    """Notes that the ranks divide these sizes and no others, and how they hold parameters, buffers and results."""
    graph.meta["multiples"] = frozenset(batches)
    for node in placeholders(graph.graph):
        if node.meta["path"] in constraints.layouts:
            node.meta["layouts"] = (constraints.layouts[node.meta["path"]],)
            node.meta["gathered_once"] = constraints.data == "shard_grad_op"

    graph.graph.output_node().meta["layouts"] = results
    keep_own_order(graph)
