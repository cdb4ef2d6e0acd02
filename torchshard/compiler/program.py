"""Model, plan and example inputs in; the planned graph with its collectives out, for any rank.

The whole compiler on one screen: capture, normalize, plan, rewrite.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy
from torch import Tensor, fx, nn

from torchshard.capture import Captured, capture
from torchshard.capture.carried import Changes
from torchshard.capture.facts import ModelFacts
from torchshard.capture.signature import Leaves
from torchshard.compiler.constraints import Constraints, stored
from torchshard.compiler.memory import memory_of_rank
from torchshard.compiler.planning import plan_graph
from torchshard.compiler.question import Question
from torchshard.compiler.slice_costs import priced_as_slices
from torchshard.core.errors import InputError, PlanError
from torchshard.core.garbage import without_garbage_collection
from torchshard.core.layouts import I, Layout, Shard
from torchshard.core.mesh import Coordinate, Mesh, MeshAxis
from torchshard.core.sharding import Sharding
from torchshard.core.user_files import warn
from torchshard.ir.data import equal_sizes
from torchshard.ir.graph import (
    Size,
    carried_results,
    duplicate,
    fake_mode,
    guards,
    hint,
    is_tensor,
    mark_needs_grad,
    passes_on_weight,
    placeholders,
    results_of,
    size_expr,
    sizes_as,
    where,
)
from torchshard.ir.sizes import call_sizes, name_sizes
from torchshard.passes import (
    carry,
    for_next_axis,
    keep_own_order,
    localized,
    normalize,
    rewrite,
    send_to_experts,
    sends_to_experts,
)
from torchshard.planner.problem import PlannedAxis, PlanningProblem
from torchshard.planner.styles import BATCH, SEQUENCE
from torchshard.planner.timeline import seconds_of_step
from torchshard.planner.unsplit import OWN_CHOICE
from torchshard.plans.data import AxisPlan
from torchshard.plans.plan import Plan

log = logging.getLogger("torchshard.compiler.program")


@dataclass(frozen=True)
class Program:
    """A captured model with its plan; `passes.localized` makes it one rank's."""

    captured: Captured
    """The normalized graph, unsharded, and how to call it."""
    plan: Plan
    graph: fx.GraphModule
    """The graph with its collectives, global sizes."""
    divided: bool = False
    """Whether calls belong to it by whether their sequences, or batches, divide."""
    batches: tuple[DividedBatch, ...] = ()
    """How the ranks divide the batch over the axes across the plan's, outermost first."""
    asked: Question | None = None
    """What the plan is the answer to."""
    problems: tuple[PlanningProblem, ...] = ()
    """What was solved for each of `axes`, on the first rank; only that of the first one before `priced`."""
    assumed: tuple[sympy.Basic, ...] = ()
    """Guards on sizes that passes have added since the capture; a call that breaks one needs another graph."""

    @property
    def axis(self) -> MeshAxis:
        """That of the plan."""
        axis: MeshAxis = self.graph.meta["axis"]
        return axis

    @property
    def mesh(self) -> Mesh:
        """The axes of its ranks."""
        return Mesh((*(divided.constraints.axis for divided in self.batches), self.axis))

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """The same in the order in which the graph is split over them."""
        return (self.axis, *(divided.constraints.axis for divided in self.batches))

    @property
    def held(self) -> dict[str, Sharding]:
        """What each rank holds of parameters, buffers and the call's tensors."""
        axes = [(self.axis, self.plan.last.held)]
        axes += [(divided.constraints.axis, divided.constraints.fixed) for divided in self.batches]
        names = dict.fromkeys(name for _, layouts in axes for name in layouts)
        return {name: Sharding.of(*((axis, layouts.get(name, I)) for axis, layouts in axes)) for name in names}

    @property
    def solutions(self) -> list[PlannedAxis]:
        """The plans of a priced program, those that divide the batch included, with what was solved for each."""
        return [PlannedAxis(plan, problem) for plan, problem in zip(self.plan.in_order, self.problems, strict=True)]

    def question(self) -> Mapping[str, object]:
        """What the plan is the answer to, as data that JSON can hold."""
        return {} if self.asked is None else self.asked.data()

    def assumes(self, values: Sequence[Tensor | int]) -> bool:
        """Whether tensors, and numbers, satisfy the graph's assumptions about sizes."""
        return self.captured.assumes(values, divided=self.divided, more=self.assumed)

    def graph_of(self, number: int) -> fx.GraphModule:
        """The graph of a rank with the collectives of all axes, its own sizes over all but the last one."""
        return self.along(self._coordinates(number)).graph

    def local_graph_of(self, number: int) -> fx.GraphModule:
        """The graph of a rank as it runs it, by groups of no processes."""
        return localized(self.graph_of(number), self._coordinates(number)[-1])

    def memory_of(self, number: int) -> dict[str, float]:
        """The bytes that a step takes on a rank, by kind (see `memory_of_rank`)."""
        return memory_of_rank(self.local_graph_of(number))

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
            needed = slice(-1, None) if divided is self.batches[-1] else slice(None)
            graphs = [
                divided.split(graph, plan) for graph, (plan, _) in zip(local[needed], solved[needed], strict=True)
            ]
        return RankGraph(graphs[-1], of_first)

    def _followed(self, rank: Sequence[Coordinate]) -> list[Sequence[Coordinate]]:
        """The ranks from the first one to this, each of which follows the plans of the last: it differs on one axis."""
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
            plans[-1] = _with_costs(plans[-1], memory=memory_of_rank(localized(graph, first[-1])))
        if plans[-1].data:
            plans[0] = _with_costs(plans[0], step=seconds_of_step(solved))
        plan, problems = replace(self.plan, axes=(*plans[1:], plans[0])), tuple(problem for _, problem in solved)
        return replace(self, plan=plan, problems=problems).with_source().plan

    def with_source(self) -> Program:
        """This program, with a plan whose source it is."""
        made = replace(self)
        object.__setattr__(made, "plan", replace(self.plan, source=made))  # each refers to the other
        return made


class RankGraph(NamedTuple):
    """A rank's graph with its collectives."""

    graph: fx.GraphModule
    """Of global sizes over the last axis."""
    of_first: list[PlannedAxis]
    """The first rank's plan of each axis that divides the batch."""


def rank_before(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The rank whose plans another follows: the first one along the last axis on which the other is not the first.

    Args:
        numbers: the other's on each axis.

    Returns:
        its numbers; none if the other is the first of all.
    """
    last = max((i for i, number in enumerate(numbers) if number), default=-1)
    return () if last < 0 else (*numbers[:last], 0, *numbers[last + 1 :])


def _simulated(axis: MeshAxis, rank: int = 0) -> Coordinate:
    """The place of a rank on an axis, in groups of no processes."""
    return axis.simulated(axis.name)[rank]


def program(
    model: nn.Module,
    constraints: Constraints,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    inputs: Mapping[str, Layout] | None = None,
    batches: Mapping[str, Layout] | None = None,
    numbers: Collection[str] = (),
    replaced: Collection[str] = (),
    repeating: bool = False,
) -> Program:
    """Captures, plans and rewrites one call of a model.

    Args:
        replaced: the call's tensors that it replaces by others, by name, as far as that is known.
        inputs: the layouts of the call's tensors that earlier calls have left, by name; all others are whole.
        batches: the layouts of those that are parts of a batch which the ranks divide.
        numbers: the places of integers in the arguments that earlier calls have changed.
        repeating: as in `capture`.

    Raises:
        CaptureError, InputError, PlanError: see each.
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
        trains=constraints.objective.trains,
        divided=constraints.divided,
    )
    # read for each capture, because a model may be cast or moved between two
    graph, facts = captured.graph, ModelFacts.of(model)
    known = graph.meta["multiples"], inputs or {}, batches or {}, equal_sizes(graph)
    return answered(captured, Question(graph, facts, constraints, *known))


def answered(captured: Captured, question: Question) -> Program:
    """The plan of a captured call, and the graph with its collectives.

    Raises:
        InputError, PlanError: as `program`.
    """
    made = _answered(captured, question)
    assumed = guards(fake_mode(captured.graph.graph))[captured.guards :]
    return replace(made, asked=question, assumed=tuple(assumed)).with_source()


def asked_again(question: Question) -> Program:
    """Plans a question loaded from a file. The result can be listed and drawn; it has no model to call."""
    nothing = Leaves((), (), ("", ()), lambda *_: None)
    captured = Captured(question.graph, (), {}, nothing, Changes(), lambda *_, **__: False)
    return answered(captured, question)


def _answered(captured: Captured, question: Question) -> Program:
    graph, facts, constraints = question.graph, question.facts, question.constraints
    multiples, inputs, batches = question.multiples, question.inputs, question.batches
    sizes = _batch_sizes(graph, batches)
    if constraints.splits_sequence and not constraints.data and not multiples.difference(sizes):
        _warn_of_whole_sequences(captured, constraints.axis.size)
    split = constraints.with_inputs(inputs)
    if not constraints.batch_parts:
        return _planned(captured, facts, split)
    left = _left_layouts(captured, sizes)
    of_batch = [
        each.with_layouts(each.first_layouts(facts)).with_inputs(batches, left) for each in constraints.of_batch
    ]
    results = _results(graph, sizes.keys() or _sizes_in(graph, batches))
    if not constraints.mesh.across:
        _divide_batch(graph, sizes.keys(), results, of_batch[0])
        return _planned(captured, facts, of_batch[0])
    # what is a multiple of the ranks of the other axis alone is none of these
    graph.meta["multiples"] = (multiples & _sizes_of(graph, SEQUENCE)).difference(sizes)
    with sizes_as({size: number // constraints.batch_parts for size, number in sizes.items()}):
        made = _planned(captured, facts, split)  # for what a rank computes
    names = frozenset(path for path, size in _batches_of(graph, batches).items() if size_expr(size) in sizes)
    parts, over_axes = constraints.batch_parts, list[DividedBatch]()
    for each in of_batch:
        parts //= each.axis.size
        over_axes.append(DividedBatch(each, names, results, facts, parts))
    return replace(made, divided=True, batches=tuple(over_axes))


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
        sizes = {size: number // self.parts for size, number in _batch_sizes(graph, self.inputs).items()}
        with without_garbage_collection(), sizes_as(sizes):
            solution = _best_plan(graph, self.facts, constraints, is_last=self.parts == 1, is_first=False)
        if first is not None:
            _check_settled(graph.graph, solution.plan, first)
        return solution

    def split(self, local: fx.GraphModule, plan: AxisPlan) -> fx.GraphModule:
        """The graph of a rank of the other axis with the collectives of this one, global sizes."""
        with without_garbage_collection():
            return rewrite(_graph_of(self._whole(local), plan), plan)

    def _whole(self, local: fx.GraphModule) -> fx.GraphModule:
        graph = for_next_axis(local)
        # a batch that is one number alone is no dynamic size, and any other size may be equal to it
        sizes = {size for size in _sizes_in(graph, self.inputs) if isinstance(size, sympy.Expr)}
        _divide_batch(graph, sizes, self.results, self.constraints)
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


def _left_layouts(captured: Captured, batches: Collection[sympy.Symbol]) -> dict[str, Layout]:
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


def _results(graph: fx.GraphModule, batches: Collection[int | sympy.Expr]) -> tuple[Layout, ...]:
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


def _batch_sizes(graph: fx.GraphModule, batches: Collection[str]) -> dict[sympy.Symbol, int]:
    """The dynamic sizes that are the batch's, and that the ranks divide -> that of the example inputs.

    That of what an earlier call has left is another one, for it may be left in another size.
    """
    split = _batches_of(graph, batches).values()
    return {expr: hint(size) for size in split if isinstance(expr := size_expr(size), sympy.Symbol)}


def _batches_of(graph: fx.GraphModule, batches: Collection[str]) -> dict[str, Size]:
    """The size of the batch in each of these tensors of the call."""
    return {n.meta["path"]: n.meta["val"].shape[BATCH] for n in placeholders(graph.graph) if n.meta["path"] in batches}


def _sizes_in(graph: fx.GraphModule, batches: Collection[str]) -> set[int | sympy.Expr]:
    """The sizes of the batch in these tensors."""
    return set(map(size_expr, _batches_of(graph, batches).values()))


def _sizes_of(graph: fx.GraphModule, dim: int) -> set[int | sympy.Expr]:
    """The sizes that the call's tensors have in a dim."""
    shapes = [n.meta["val"].shape for n in placeholders(graph.graph) if n.meta["kind"] == "input" and is_tensor(n)]
    return {size_expr(shape[dim]) for shape in shapes if dim < len(shape)}


def _divide_batch(
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


def _warn_of_whole_sequences(captured: Captured, ranks: int) -> None:
    inputs = [n for n in placeholders(captured.graph.graph) if n.meta["kind"] == "input" and is_tensor(n)]
    lengths = sorted({hint(n.meta["val"].shape[SEQUENCE]) for n in inputs if n.meta["val"].ndim > SEQUENCE})
    warn(
        f"the sequence is not split in calls like this one: a length of {' and '.join(map(str, lengths)) or '?'} is "
        f"no multiple of {ranks} ranks, or gives each one element, or is the only one of the graph; pad to a multiple"
    )


def prepared(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool = True,
    repeating: bool = False,
    inputs: Mapping[str, Layout] = MappingProxyType({}),
    numbers: Collection[str] = (),
    replaced: Collection[str] = (),
    trains: bool = True,
    divided: Mapping[int, int] = MappingProxyType({}),
) -> Captured:
    """One call of a model, in the caller's grad mode, as a graph with few kinds of nodes, ready to be planned.

    Args:
        divided: as in `capture`.
        trains: whether values may have gradients.
    """
    with without_garbage_collection(), _timed("capture"):
        left = dict.fromkeys(replaced) | _unsplit(inputs)
        captured = _captured(model, args, kwargs, left, dynamic, repeating=repeating, numbers=numbers, divided=divided)
        normalize(captured.graph)
        carry(captured.graph, captured.changes)
        name_sizes(captured.graph)
        mark_needs_grad(captured.graph, _trainable(captured, model) if trains else [])
    return captured


def _captured(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    left: dict[str, int | None],
    dynamic: bool,
    **options: Any,
) -> Captured:
    """One call of a model; what it replaces may have other sizes at the next call, as what earlier ones left."""
    captured = capture(model, args, kwargs, dynamic=dynamic, left=left, **options)
    changed = captured.changes.names if dynamic else ()
    more = {name: None for name in changed if name in captured.inputs and name not in left}
    if not more:
        return captured
    return capture(model, args, kwargs, dynamic=dynamic, left=left | more, **options)


def _unsplit(inputs: Mapping[str, Layout]) -> dict[str, int | None]:
    """Name -> the dim that is split; None if there is none."""
    return {name: layout.dim if isinstance(layout, Shard) else None for name, layout in inputs.items()}


def planned(captured: Captured, model: nn.Module, constraints: Constraints) -> Program:
    """A plan for a captured call, and the graph with its collectives, where each rank has the whole call."""
    return _planned(captured, ModelFacts.of(model), constraints).with_source()


def _planned(captured: Captured, facts: ModelFacts, constraints: Constraints) -> Program:
    with without_garbage_collection():
        with _timed("plan"):
            plan, problem = _best_plan(captured.graph, facts, constraints, is_last=True)
        with _timed("rewrite"):
            graph = rewrite(_graph_of(captured.graph, plan), plan)
    for gathered in plan.costs.whole:
        if gathered.why != OWN_CHOICE:
            warn(str(gathered))
    divided = constraints.splits_sequence or plan.splits_dynamic
    across = math.prod(axis.size for axis in constraints.mesh.across)
    title = ", ".join([facts.modules[""].__name__, *call_sizes(captured.graph, across)])
    made = Plan((plan,), stored(facts), facts.signature, title)
    return Program(captured, made, graph, divided, problems=(problem,))


def _with_costs(plan: AxisPlan, **costs: Any) -> AxisPlan:
    return replace(plan, costs=replace(plan.costs, **costs))


def _best_plan(
    module: fx.GraphModule, facts: ModelFacts, constraints: Constraints, *, is_last: bool, is_first: bool = True
) -> PlannedAxis:
    """The best plan of a graph: where ranks hold slices of experts' weights, they gather these, or send rows to them.

    Args:
        is_last: whether the graph is split over no axis after this one. What comes to a rank's experts has a number of
            rows that no other axis could divide.
        is_first: as in `plan_graph`.
    """
    if constraints.plan is not None:
        return plan_graph(_graph_of(module, constraints.plan), facts, constraints, is_first=is_first)
    gathering = plan_graph(module, facts, constraints, is_first=is_first)
    holds_slices = constraints.data in ("shard", "shard_grad_op") and is_last and not constraints.objective.compiles
    sending = _sending(module, constraints.axis) if holds_slices else None
    if sending is None:
        return gathering
    other = plan_graph(sending, facts, constraints, is_first=is_first)
    return min(gathering, other, key=lambda solution: seconds_of_step([solution]))


def _graph_of(module: fx.GraphModule, plan: AxisPlan) -> fx.GraphModule:
    """The graph that a plan is for, which may send rows to experts."""
    return (_sending(module, plan.axis) if sends_to_experts(plan) else None) or module


def _sending(module: fx.GraphModule, axis: MeshAxis) -> fx.GraphModule | None:
    """A copy of a graph that sends rows to experts; None if it has none to send."""
    sending = duplicate(module)
    return sending if send_to_experts(sending, axis) else None


STAGES = ("capture", "plan", "rewrite")
"""What is logged, at INFO: one line when each ends."""


@contextlib.contextmanager
def _timed(stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    log.info("%s: %.1f s", stage, time.perf_counter() - start)


def check_examples(example_inputs: object, example_kwargs: object) -> None:
    """Example inputs are a tuple or list of arguments, the keyword ones a dict.

    Raises:
        InputError: they are something else.
    """
    for name, given, kinds in (
        ("example_inputs", example_inputs, (tuple, list)),
        ("example_kwargs", example_kwargs, (Mapping,)),
    ):
        if given is not None and not isinstance(given, kinds):
            raise InputError(
                f"{name} is a {type(given).__name__}",
                where=f"{name}=",
                why="example_inputs holds forward's positional arguments, example_kwargs its keyword arguments by name",
                attempt='example_inputs=(x,), example_kwargs={"mask": mask}',
            )


def _trainable(captured: Captured, model: nn.Module) -> list[str]:
    """The names of the parameters and inputs that may have gradients."""
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    inputs = [n for n in placeholders(captured.graph.graph) if n.meta["kind"] == "input" and is_tensor(n)]
    return trainable + [n.meta["path"] for n in inputs if n.meta["val"].requires_grad]
