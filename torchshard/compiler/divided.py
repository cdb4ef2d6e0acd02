"""Splits a batch across the ranks of an axis: marks its sizes in a graph, and plans each rank's shard."""

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
from torchshard.core.layouts import BATCH, SEQUENCE, I, Layout, Shard
from torchshard.core.user_files import warn
from torchshard.ir.effects import carried_results
from torchshard.ir.fake_values import Size, hint, size_expr, sizes_as
from torchshard.ir.graph import is_tensor, passes_on_weight, placeholders, results_of, where
from torchshard.passes import for_next_axis, keep_own_order, rewrite
from torchshard.planner.problem import PlannedAxis
from torchshard.plans.data import AxisPlan


@dataclass(frozen=True)
class DividedBatch:
    """An axis that splits the batch or the sequence, for a graph that is already split over other axes."""

    constraints: Constraints
    """The constraints over this axis, with layouts of parameters, buffers and batched tensors."""
    inputs: frozenset[str]
    """The names of the call's tensors that have the dim that this axis splits."""
    results: tuple[Layout, ...]
    """The layouts over this axis of the call's results."""
    facts: ModelFacts
    parts: int
    """How many parts the remaining mesh axes cut this rank's part of the dim into."""

    @property
    def dim(self) -> int:
        """The dim of the call's tensors that this axis splits."""
        return self.constraints.axis.dim

    def sizes(self, graph: fx.GraphModule) -> dict[sympy.Symbol, int]:
        """Maps the dynamic sizes of a graph that this axis splits to the example inputs' sizes."""
        return batch_sizes(graph, self.inputs, self.dim)

    def solve(self, local: fx.GraphModule, first: AxisPlan | None = None) -> PlannedAxis:
        """Plans this axis for a rank of the earlier axes, like the rank that it follows where that is legal.

        Slices may differ in size, so each rank could find a plan of its own. A collective of an earlier axis would then
        add a full value on one rank to a partial sum on another. A rank with an empty slice may have to compute it
        replicated, and then runs collectives that other ranks do not.

        Args:
            first: the plan of the rank that this one follows, if any.

        Raises:
            PlanError: the ranks of an earlier axis' collective would have its operand in different layouts.
        """
        graph, constraints = self._whole(local), replace(self.constraints, plan=first)
        sizes = {size: number // self.parts for size, number in self.sizes(graph).items()}
        with without_garbage_collection(), sizes_as(sizes):
            solution = best_plan(graph, self.facts, constraints, is_last=self.parts == 1, is_first=False)
        if first is not None:
            _check_settled(graph.graph, solution.plan, first)
        return solution

    def split(self, local: fx.GraphModule, plan: AxisPlan) -> fx.GraphModule:
        """Inserts this axis' collectives into the graph of a rank of the earlier axes; sizes stay global over it."""
        with without_garbage_collection():
            return rewrite(graph_for(self._whole(local), plan), plan)

    def _whole(self, local: fx.GraphModule) -> fx.GraphModule:
        graph = for_next_axis(local)
        # a static batch size is left out: other sizes may be equal to it by chance
        sizes = {size for size in sizes_in(graph, self.inputs, self.dim) if isinstance(size, sympy.Expr)}
        divide_batch(graph, sizes, self.results, self.constraints)
        return graph


def _check_settled(graph: fx.Graph, plan: AxisPlan, first: AxisPlan) -> None:
    """Checks that all ranks of an earlier axis' collectives have its operand in the layout of the first rank.

    Weights are exempt: they are the same on all of these ranks.

    Raises:
        PlanError: a layout differs.
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
    """The layouts of carried values over an axis that divides the batch: a part of the batch, or replicated.

    Raises:
        InputError: a value has the batch in a dim other than the first, where the next call would look for it.
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


def check_splits_sequence(captured: Captured, inputs: Collection[str]) -> None:
    """Checks that a call's sequence can be split.

    Raises:
        InputError: forward fixes its length, or leaves values in its arguments, such as a cache.
    """
    carried = [value.meta["place"] for value in carried_results(captured.graph.graph)]
    if carried:
        raise InputError(
            "forward leaves values in its arguments, and the ranks divide the sequence",
            where=f"argument {carried[0]!r}",
            why="a later call could not tell a part of a cache from a full one",
            attempt="a call without a cache, such as use_cache=False; or a mesh that divides the batch or the weights",
        )
    if not batch_sizes(captured.graph, inputs, SEQUENCE):
        raise InputError(
            "forward fixes the length of the sequence, so the ranks can't divide it",
            where=f"argument {next(iter(inputs))!r}",
            why="it reads the length as a number, or adds a tensor of that length, such as a table of positions",
            attempt="a forward for any length, as by positions[: x.shape[1]]; or a mesh that divides the batch",
        )


def result_layouts_of(graph: fx.GraphModule, batches: Collection[int | sympy.Expr]) -> tuple[Layout, ...]:
    """The layouts of results over an axis that divides the batch: a part of the batch, or replicated.

    Args:
        batches: the dynamic sizes of the batch; or its number, if its size is static.
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
    """The dim of a value with the size of the batch, if it has one."""
    sizes = map(size_expr, value.meta["val"].shape)
    return next((dim for dim, size in enumerate(sizes) if size in batches), None)


def batch_sizes(graph: fx.GraphModule, batches: Collection[str], dim: int = BATCH) -> dict[sympy.Symbol, int]:
    """Maps the dynamic sizes of the batch, or of another dim, to the example inputs' sizes.

    Carried values have a batch size of their own, because a call may write them in another size.
    """
    split = batches_of(graph, batches, dim).values()
    return {expr: hint(size) for size in split if isinstance(expr := size_expr(size), sympy.Symbol)}


def batches_of(graph: fx.GraphModule, batches: Collection[str], dim: int = BATCH) -> dict[str, Size]:
    """Maps the names of the call's batched tensors to their batch size, or the size of another dim."""
    return {n.meta["path"]: n.meta["val"].shape[dim] for n in placeholders(graph.graph) if n.meta["path"] in batches}


def sizes_in(graph: fx.GraphModule, batches: Collection[str], dim: int = BATCH) -> set[int | sympy.Expr]:
    """The batch sizes of these tensors, or their sizes of another dim."""
    return set(map(size_expr, batches_of(graph, batches, dim).values()))


def sizes_of_dim(graph: fx.GraphModule, dim: int) -> set[int | sympy.Expr]:
    """All sizes of the call's tensors in a dim."""
    shapes = [n.meta["val"].shape for n in placeholders(graph.graph) if n.meta["kind"] == "input" and is_tensor(n)]
    return {size_expr(shape[dim]) for shape in shapes if dim < len(shape)}


def divide_batch(
    graph: fx.GraphModule, batches: Collection[sympy.Expr], results: tuple[Layout, ...], constraints: Constraints
) -> None:
    """Marks in a graph the sizes that ranks split, and the layouts of parameters, buffers and results."""
    graph.meta["multiples"] = frozenset(batches)
    for node in placeholders(graph.graph):
        if node.meta["path"] in constraints.layouts:
            node.meta["layouts"] = (constraints.layouts[node.meta["path"]],)
            node.meta["gathered_once"] = constraints.data == "shard_grad_op"

    graph.graph.output_node().meta["layouts"] = results
    keep_own_order(graph)


def rank_before(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the rank that a rank's plans follow: the first one on the last axis where this rank is not the first.

    Args:
        numbers: the rank's number on each axis.

    Returns:
        the numbers of the rank that it follows; () for the very first rank.
    """
    last = max((i for i, number in enumerate(numbers) if number), default=-1)
    return () if last < 0 else (*numbers[:last], 0, *numbers[last + 1 :])
