"""Turns a model, constraints and a call into a `Program`: the planned graph with its collectives, for any rank.

`program` runs the compiler: capture and normalize (`prepare`), plan (`planning`), rewrite (`passes`). If further axes
split the batch (`divided`), a rank's graph is planned and rewritten again for each axis.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import sympy
from torch import Tensor, fx, nn

from torchshard.capture import Captured
from torchshard.capture.carried import Changes
from torchshard.capture.facts import ModelFacts
from torchshard.capture.signature import Leaves
from torchshard.compiler.batches import SplitDims, over
from torchshard.compiler.constraints import Constraints
from torchshard.compiler.divided import (
    DividedBatch,
    batch_sizes,
    batches_of,
    check_splits_sequence,
    divide_batch,
    left_layouts,
    rank_before,
    result_layouts_of,
    sizes_in,
    sizes_of_dim,
)
from torchshard.compiler.memory import memory_of_rank
from torchshard.compiler.plan_checks import stored
from torchshard.compiler.planning import best_plan, graph_for
from torchshard.compiler.prepare import prepared, timed
from torchshard.compiler.question import Question
from torchshard.compiler.slice_costs import priced_as_slices
from torchshard.core.garbage import without_garbage_collection
from torchshard.core.layouts import SEQUENCE, I, Layout
from torchshard.core.mesh import Coordinate, Mesh, MeshAxis
from torchshard.core.sharding import Sharding
from torchshard.core.user_files import warn
from torchshard.ir.fake_values import Size, guards, hint, size_expr, sizes_as
from torchshard.ir.graph import fake_mode, is_tensor, placeholders, result_layouts
from torchshard.ir.sizes import call_sizes, equal_sizes
from torchshard.passes import localized, rewrite
from torchshard.planner.beside import beside_ops
from torchshard.planner.problem import PlannedAxis, PlanningProblem
from torchshard.planner.timeline import seconds_of_step
from torchshard.planner.unsplit import OWN_CHOICE
from torchshard.plans.plan import Plan


@dataclass(frozen=True)
class Program:
    """A captured model with its plan; `passes.localized` gives the graph one rank's sizes."""

    captured: Captured
    """The normalized, unsharded graph, and the form of its calls."""
    plan: Plan
    graph: fx.GraphModule
    """The graph with global sizes and its collectives."""
    divided: bool = False
    """Whether a call's sequence, or batch, must be divisible by the number of ranks exactly if the example's is."""
    batches: tuple[DividedBatch, ...] = ()
    """The axes that split the batch, without the graph's own axis; outermost first."""
    asked: Question | None = None
    """The question that the plan answers."""
    problems: tuple[PlanningProblem, ...] = ()
    """The planning problem of the first rank for each of `axes`; only for the first axis before `priced`."""
    assumed: tuple[sympy.Basic, ...] = ()
    """Guards on sizes that passes have added since the capture; a call that breaks one needs another graph."""

    @property
    def axis(self) -> MeshAxis:
        """The mesh axis that `graph` is split over."""
        return self.graph.meta["axis"]

    @property
    def mesh(self) -> Mesh:
        """The mesh of its ranks, outermost axis first."""
        return Mesh((*(divided.constraints.axis for divided in self.batches), self.axis))

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """The mesh axes in the order in which the graph is split over them: the last one first."""
        return (self.axis, *(divided.constraints.axis for divided in self.batches))

    @property
    def held(self) -> dict[str, Sharding]:
        """The shardings of parameters, buffers and the call's tensors, by name."""
        axes = [(self.axis, self.plan.last.held), *((d.constraints.axis, d.constraints.fixed) for d in self.batches)]
        names = dict.fromkeys(name for _, layouts in axes for name in layouts)
        return {name: Sharding.of(*((axis, layouts.get(name, I)) for axis, layouts in axes)) for name in names}

    def sharding_of_results(self, local: fx.GraphModule) -> list[Sharding]:
        """The sharding of each result of a rank's graph over the axes that split inputs."""
        axes = [(divided.constraints.axis, divided.results) for divided in self.batches]
        axes = axes or [(self.axis, result_layouts(local.graph))]
        numbers = range(len(axes[0][1]))
        return [Sharding.of(*((axis, layouts[i]) for axis, layouts in axes)) for i in numbers]

    def question(self) -> Mapping[str, object]:
        """The question that the plan answers, as data that JSON can write."""
        return {} if self.asked is None else self.asked.data()

    def assumes(self, values: Sequence[Tensor | int]) -> bool:
        """Returns whether tensors and numbers satisfy the graph's assumptions about sizes."""
        return self.captured.assumes(values, divided=self.divided, more=self.assumed)

    def graph_of(self, number: int) -> fx.GraphModule:
        """Returns a rank's graph with the collectives of all axes, and local sizes over all but the last one."""
        return self.along(self._coordinates(number)).graph

    def local_graph_of(self, number: int) -> fx.GraphModule:
        """The graph that a rank runs, over simulated groups."""
        return localized(self.graph_of(number), self._coordinates(number)[-1])

    def memory_of(self, number: int) -> dict[str, float]:
        """The bytes that a step takes on a rank, by kind (see `memory_of_rank`)."""
        return memory_of_rank(self.local_graph_of(number), self.plan.optimizer)

    def _coordinates(self, number: int) -> list[Coordinate]:
        place = self.mesh.place(number)
        return [_simulated(axis, place[axis.name]) for axis in self.axes]

    def along(self, rank: Sequence[Coordinate]) -> RankGraph:
        """The graph of a rank, given its place on each of `axes`, split over all of them."""
        followed = self._followed(rank)
        graphs, of_first = [self.graph] * len(followed), list[PlannedAxis]()
        for i, divided in enumerate(self.batches):
            local = [localized(graph, each[i]) for graph, each in zip(graphs, followed, strict=True)]
            solved = list[PlannedAxis]()
            for graph in local:
                solved.append(divided.solve(graph, solved[-1].plan if solved else None))
            of_first.append(solved[0])
            kept = slice(-1, None) if divided is self.batches[-1] else slice(None)
            graphs = [divided.split(graph, plan) for graph, (plan, _) in zip(local[kept], solved[kept], strict=True)]
        return RankGraph(graphs[-1], of_first)

    def _followed(self, rank: Sequence[Coordinate]) -> list[Sequence[Coordinate]]:
        """The ranks from the first to this one; each follows the one before, and differs from it on one axis."""
        found, numbers = [rank], tuple(place.rank for place in rank[:-1])
        while numbers := rank_before(numbers):
            before = [place if number else _simulated(place.axis) for place, number in zip(rank, numbers, strict=False)]
            found.insert(0, [*before, rank[-1]])
        return found

    def priced(self, *, with_memory: bool) -> Plan:
        """The plan of all axes, for the first rank, with the seconds of a step.

        Args:
            with_memory: whether to estimate the memory of a step too.
        """
        first = self._coordinates(0)
        graph, of_batch = self.along(first)
        solved = priced_as_slices([PlannedAxis(self.plan.last, self.problems[0]), *of_batch])
        plans = [plan for plan, _ in solved]
        if with_memory:
            memory = memory_of_rank(localized(graph, first[-1]), self.plan.optimizer)
            plans[-1] = replace(plans[-1], costs=replace(plans[-1].costs, memory=memory))
        if plans[-1].data:
            step = seconds_of_step(solved)
            beside = beside_ops(solved, step, solved[0].problem.kernels())
            plans[0] = replace(plans[0], costs=replace(plans[0].costs, step=step, beside=beside))
        plan, problems = replace(self.plan, axes=(*plans[1:], plans[0])), tuple(problem for _, problem in solved)
        return replace(self, plan=plan, problems=problems).with_source().plan

    def with_source(self) -> Program:
        """Returns a copy of this program; the copy is the source of its plan."""
        made = replace(self)
        object.__setattr__(made, "plan", replace(self.plan, source=made))  # each refers to the other
        return made


class RankGraph(NamedTuple):
    """A rank's graph with its collectives."""

    graph: fx.GraphModule
    """A graph with global sizes over the axis that is split last."""
    of_first: list[PlannedAxis]
    """The first rank's plan of each axis that splits the batch."""


def _simulated(axis: MeshAxis, rank: int = 0) -> Coordinate:
    """A rank's place on an axis, in a simulated group."""
    return axis.simulated(axis.name)[rank]


def program(
    model: nn.Module,
    constraints: Constraints,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    inputs: Mapping[str, Layout] | None = None,
    batches: SplitDims | None = None,
    numbers: Collection[str] = (),
    replaced: Collection[str] = (),
    repeating: bool = False,
) -> Program:
    """Captures, plans and rewrites one call of a model.

    Args:
        inputs: the layouts of tensors in the arguments that earlier calls wrote, by name; all others are replicated.
        batches: the dims of the call's tensors that the mesh splits, by name.
        numbers: the places of integers in the arguments that earlier calls changed.
        replaced: the names of the call's tensors that the call is known to replace by others.
        repeating: as in `capture`.

    Raises:
        CaptureError, InputError, PlanError: the model can't be captured, the arguments do not fit, or no plan does.
    """
    captured = prepared(
        model,
        args,
        kwargs,
        dynamic=not constraints.is_static,
        repeating=repeating,
        inputs=inputs or {},
        numbers=numbers,
        replaced=replaced,
        trains=constraints.aim.trains,
        divided=constraints.divided,
    )
    # read for each capture, because a model may be cast or moved between two
    graph, facts = captured.graph, ModelFacts.of(model)
    known = graph.meta["multiples"], inputs or {}, batches or {}, equal_sizes(graph)
    return answered(captured, Question(graph, facts, constraints, *known))


def answered(captured: Captured, question: Question) -> Program:
    """Plans a captured call and inserts the collectives.

    Raises:
        InputError, PlanError: the arguments do not fit, or no plan does.
    """
    made = _answered(captured, question)
    assumed = guards(fake_mode(captured.graph.graph))[captured.guards :]
    return replace(made, asked=question, assumed=tuple(assumed)).with_source()


def asked_again(question: Question) -> Program:
    """Plans a question loaded from a file. The result can be listed and drawn; it lacks a model to call."""
    nothing = Leaves((), (), ("", ()), lambda *_: None)
    captured = Captured(question.graph, (), {}, nothing, Changes(), lambda *_, **__: False)
    return answered(captured, question)


def _answered(captured: Captured, question: Question) -> Program:
    graph, facts, constraints = question.graph, question.facts, question.constraints
    multiples, inputs, batches = question.multiples, question.inputs, question.batches
    sizes = dict[sympy.Symbol, int]()
    for dim in constraints.mesh.parts_of_dims:
        sizes |= batch_sizes(graph, [name for name, dims in batches.items() if dim in dims], dim)
    if constraints.splits_sequence and not constraints.data and not multiples.difference(sizes):
        _warn_of_whole_sequences(captured, constraints.axis.size)
    split = constraints.with_inputs(inputs)
    if not constraints.batch_parts:
        return _planned(captured, facts, split)
    parts = constraints.mesh.parts_of_dims
    left, over_axes, of_parts = dict(parts), list[DividedBatch](), dict[sympy.Symbol, int]()
    for each in constraints.of_batch:
        dim = each.axis.dim
        left[dim] //= each.axis.size
        divided = _divided(captured, facts, each, batches, left[dim])
        of_parts |= {size: number // parts[dim] for size, number in divided.sizes(graph).items()}
        over_axes.append(divided)
    if not constraints.mesh.across:
        (only,) = over_axes
        divide_batch(graph, only.sizes(graph).keys(), only.results, only.constraints)
        return _planned(captured, facts, only.constraints)
    # the ranks of the last axis may split the sequence if no other axis does, but not the batch
    graph.meta["multiples"] = (multiples & sizes_of_dim(graph, SEQUENCE)).difference(sizes)
    with sizes_as(of_parts):
        made = _planned(captured, facts, split)  # priced for one rank's shard of the batch
    return replace(made, divided=True, batches=tuple(over_axes))


def _assume_equal(sizes: Iterable[Size]) -> None:
    """Adds the assumption that dynamic sizes are equal: rows of ids and labels, joined, have the same blocks."""
    first, *others = [*sizes] or [0]
    for size in others:
        bool(first == size)


def _divided(
    captured: Captured, facts: ModelFacts, constraints: Constraints, batches: SplitDims, parts: int
) -> DividedBatch:
    axis, graph = constraints.axis, captured.graph
    layouts = over(axis, batches)
    if axis.dim == SEQUENCE:
        check_splits_sequence(captured, layouts)
        _assume_equal(batches_of(graph, layouts, axis.dim).values())
    sizes = batch_sizes(graph, layouts, axis.dim)
    left = left_layouts(captured, sizes)
    constraints = constraints.with_layouts(constraints.first_layouts(facts)).with_inputs(layouts, left)
    split = batches_of(graph, layouts, axis.dim).items()
    results = result_layouts_of(graph, sizes.keys() or sizes_in(graph, layouts, axis.dim))
    names = frozenset(path for path, size in split if size_expr(size) in sizes)
    return DividedBatch(constraints, names, results, facts, parts)


def _warn_of_whole_sequences(captured: Captured, ranks: int) -> None:
    inputs = [n for n in placeholders(captured.graph.graph) if n.meta["kind"] == "input" and is_tensor(n)]
    lengths = sorted({hint(n.meta["val"].shape[SEQUENCE]) for n in inputs if n.meta["val"].ndim > SEQUENCE})
    warn(
        f"the sequence is not split in calls like this one: a length of {' and '.join(map(str, lengths)) or '?'} is "
        f"no multiple of {ranks} ranks, or gives each one element, or is the only one of the graph; pad to a multiple"
    )


def planned(captured: Captured, model: nn.Module, constraints: Constraints) -> Program:
    """Plans a captured call that each rank runs on the full batch, and inserts the collectives."""
    return _planned(captured, ModelFacts.of(model), constraints).with_source()


def _planned(captured: Captured, facts: ModelFacts, constraints: Constraints) -> Program:
    with without_garbage_collection():
        with timed("plan"):
            plan, problem = best_plan(captured.graph, facts, constraints, is_last=True)
        with timed("rewrite"):
            graph = rewrite(graph_for(captured.graph, plan), plan)
    for gathered in plan.costs.whole:
        if gathered.why != OWN_CHOICE:
            warn(str(gathered))
    divided = constraints.splits_sequence or constraints.data is not None or plan.splits_dynamic
    across = math.prod(axis.size for axis in constraints.mesh.across)
    title = ", ".join([facts.modules[""].__name__, *call_sizes(captured.graph, across)])
    made = Plan((plan,), stored(facts), facts.signature, title)
    return Program(captured, made, graph, divided, problems=(problem,))
