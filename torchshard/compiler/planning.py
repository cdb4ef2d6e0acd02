"""Turns a captured graph and constraints into a Plan: checks a given plan, searches all other choices."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from torchshard.capture.facts import ModelFacts
from torchshard.compiler.constraints import Constraints, does_not_fit, more_slices
from torchshard.compiler.limit import Limit, search_within
from torchshard.compiler.plan_checks import stored
from torchshard.core.choices import choices
from torchshard.core.errors import PlanError
from torchshard.core.layouts import SEQUENCE, Layout, Shard
from torchshard.core.mesh import MeshAxis
from torchshard.core.rows import Choice
from torchshard.custom_ops.carry import CARRY
from torchshard.ir.editing import duplicate
from torchshard.ir.graph import is_tensor_op, node_row, passes_on_weight, placeholders
from torchshard.passes import own_order_choice, send_to_experts, sends_to_experts
from torchshard.passes.annotate import planned_choice
from torchshard.planner.beside import beside_ops
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.planner.kernels import note_fusion
from torchshard.planner.pins import pins_of
from torchshard.planner.predict import predict
from torchshard.planner.problem import PlannedAxis, PlanningProblem
from torchshard.planner.search import SearchResult, search
from torchshard.planner.states import GraphConstraints
from torchshard.planner.styles import parameter_layouts
from torchshard.planner.timeline import seconds_of_step
from torchshard.planner.unsplit import unsplit
from torchshard.plans.costs import Costs
from torchshard.plans.data import AxisPlan
from torchshard.plans.optimizers import OPTIMIZERS


def plan_graph(
    module: fx.GraphModule, facts: ModelFacts, constraints: Constraints, *, is_first: bool = True
) -> PlannedAxis:
    """The best plan of a normalized graph, with the problem that it solves.

    Args:
        is_first: whether the graph is unsplit over all other axes, so that fewer ranks can be
            compared.

    Raises:
        PlanError: the constraints do not fit the graph, or every plan exceeds the memory limit.
    """
    given, machine = constraints.plan, constraints.aim.machine
    if given is not None and constraints.aim.any_machine:
        machine = given.machine
    note_fusion(module.graph)
    aim, limit = constraints.aim, None
    model = CostModel(machine, constraints.axis, recompute=constraints.recompute, compiled=aim.compiles)
    if aim.memory is not None:
        slices, keeps = constraints.slices, constraints.keeps_gathered
        limit = Limit(module, model, aim.memory, OPTIMIZERS[aim.optimizer], slices, keeps)
    problem = PlanningProblem(module.graph, model, _graph_constraints(module.graph, constraints), limit)
    if given is not None and all(n in problem.constraints.options for n in module.graph.nodes if is_tensor_op(n)):
        result = _as_given(problem, given, constraints)
        conversions = given.conversions
        pins = pins_of(module.graph, constraints.pins)  # to compare alternatives; only a plan from a file has pins here
        fixed = replace(problem.constraints, options={}, pins=pins, parameters=constraints.fixed)
        problem = replace(problem, constraints=fixed)
    else:
        result, problem = _searched(problem, limit)
        conversions = {}
        idle = _idle_layouts(module.graph, facts, constraints)
        result = replace(result, parameters={**result.parameters, **idle, **constraints.fixed})
    of_model = stored(facts)
    taken = [node.meta["path"] for node in placeholders(module.graph) if node.meta["kind"] == "input"]
    plan = AxisPlan(
        constraints.axis,
        {name: layout for name, layout in result.parameters.items() if name in of_model},
        result.choices,
        conversions_of(module.graph, model, result.choices, result.parameters, conversions),
        {name: result.parameters[name] for name in taken if name in result.parameters},
        machine=machine,
        static=constraints.is_static,
        recompute=problem.model.recompute,
    )
    costs = _costs(problem, plan, constraints, result.gap, limit)
    if is_first and not constraints.mesh.across:  # otherwise fewer ranks would each have a part of the batch
        costs = _step_costs(problem, replace(plan, costs=costs))
    return PlannedAxis(replace(plan, costs=costs), problem)


def _memory_within(limit: Limit, plan: AxisPlan, constraints: Constraints) -> dict[str, float]:
    """The memory of a plan by kind.

    Raises:
        PlanError: it exceeds the limit.
    """
    memory = limit.estimate(plan)
    if memory["peak"] <= limit.nbytes:
        return memory
    attempt = "a smaller batch, or weights of fewer bytes"
    if constraints.plan is not None:
        raise does_not_fit("the plan does not fit", "it", memory, limit.nbytes, f"another plan, {attempt}")
    what, attempt = f"no plan for {plan.world_size} ranks fits", f"{more_slices(constraints)}, {attempt}"
    raise does_not_fit(what, "the leanest", memory, limit.nbytes, attempt)


def best_plan(
    module: fx.GraphModule, facts: ModelFacts, constraints: Constraints, *, is_last: bool, is_first: bool = True
) -> PlannedAxis:
    """The best plan of a graph, which gathers sliced experts' weights or sends rows to the experts.

    Args:
        is_last: whether this axis is the last to split the graph. Rows sent to a rank's experts
            have a count that further axes could not divide.
        is_first: as in `plan_graph`.
    """
    if constraints.plan is not None:
        return plan_graph(graph_for(module, constraints.plan), facts, constraints, is_first=is_first)
    gathering = plan_graph(module, facts, constraints, is_first=is_first)
    holds_slices = constraints.data in ("shard", "shard_grad_op") and is_last and not constraints.aim.compiles
    sending = _sending(module, constraints.axis) if holds_slices else None
    if sending is None:
        return gathering
    other = plan_graph(sending, facts, constraints, is_first=is_first)
    return min(gathering, other, key=lambda solution: seconds_of_step([solution]))


def graph_for(module: fx.GraphModule, plan: AxisPlan) -> fx.GraphModule:
    """The graph that a plan is for, which may send rows to experts."""
    return (_sending(module, plan.axis) if sends_to_experts(plan) else None) or module


def _sending(module: fx.GraphModule, axis: MeshAxis) -> fx.GraphModule | None:
    """A copy of a graph that sends rows to experts, if it has rows to send."""
    sending = duplicate(module)
    return sending if send_to_experts(sending, axis) else None


def _searched(problem: PlanningProblem, limit: Limit | None) -> tuple[SearchResult, PlanningProblem]:
    """The best plan, and the problem it solves: a memory limit may add layers to recompute."""
    if limit is None:
        return search(problem.graph, problem.model, problem.constraints), problem
    return search_within(problem, limit)


def _graph_constraints(graph: fx.Graph, constraints: Constraints) -> GraphConstraints:
    """The constraints for the search that follow from the user's plan and from fixed layouts."""
    common = GraphConstraints(
        all_axes=constraints.aim.split == "all",
        dynamic=constraints.splits_sequence or constraints.data is not None,
        weights=not constraints.data or constraints.axis.dim == SEQUENCE,  # attention may split heads instead
        divides=constraints.data is not None,
        optimizer=None if constraints.aim.memory is None else OPTIMIZERS[constraints.aim.optimizer],
        slices=constraints.slices,
        trains=constraints.aim.trains,
        steady=constraints.steady,
    )
    only, fixed = _carried_options(graph, constraints), constraints.fixed
    only |= {n: [own_order_choice(n, constraints.axis)] for n in graph.nodes if "own_order" in n.meta}
    if constraints.plan is None:
        return replace(common, pins=pins_of(graph, constraints.pins), options=only, parameters=fixed)
    given = {**_given_options(graph, constraints.plan), **only}
    return replace(common, options=given, parameters={**constraints.plan.parameters, **fixed})


def _carried_options(graph: fx.Graph, constraints: Constraints) -> dict[fx.Node, list[Choice]]:
    """Fixes the layouts of carried values that are split already: later calls then run the same graph."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=CARRY):
        place, row = node.meta["place"], node_row(node)
        layout = constraints.left.get(place, constraints.inputs.get(place))
        if layout is not None and row is not None:
            states = choices(row, constraints.axis.size, [(0, layout)] if isinstance(layout, Shard) else [])
            found[node] = [choice for choice in states if choice.results[0] == layout]
    return found


def _given_options(graph: fx.Graph, plan: AxisPlan) -> dict[fx.Node, list[Choice]]:
    """The plan's choices for the ops that it names; those for other ops are searched.

    Raises:
        PlanError: a choice is not legal. In a different kind of call than the plan's, such as a
            prompt for a decode step's plan, an op of the same name may differ; then its choice is
            searched. So are the choices of an op with a size that is not divisible in this call,
            and of an op that passes on a weight's slice with fewer rows than another rank's.
    """
    ops = [node for node in graph.nodes if is_tensor_op(node)]
    is_same_call = {node.name for node in ops} == plan.choices.keys()
    found = {}
    for node in ops:
        if node.name in plan.choices:
            try:
                found[node] = [planned_choice(node, plan)]
            except PlanError:
                if is_same_call and not plan.choices[node.name].splits_dynamic and not passes_on_weight(node):
                    raise
    return found


def _as_given(problem: PlanningProblem, given: AxisPlan, constraints: Constraints) -> SearchResult:
    chosen = {node.name: choice for node, (choice,) in problem.constraints.options.items()}
    return SearchResult(chosen, {**given.parameters, **constraints.fixed}, given.costs.gap)


def _idle_layouts(graph: fx.Graph, facts: ModelFacts, constraints: Constraints) -> dict[str, Layout]:
    """The layouts of pinned parameters that this call does not compute with, by their module's type.

    The call may read only their sizes, or a different kind of call may use them.
    """
    if constraints.plan is not None:
        return {}
    used = {n.meta["path"] for n in graph.nodes if n.op == "placeholder" and any(map(is_tensor_op, n.users))}
    layouts = parameter_layouts(facts, constraints.pins)
    return {name: layout for name, layout in layouts.items() if name not in used}


def _costs(
    problem: PlanningProblem, plan: AxisPlan, constraints: Constraints, gap: float, limit: Limit | None
) -> Costs:
    """The costs of a plan, with its memory if that is limited.

    Raises:
        PlanError: it exceeds the limit.
    """
    graph, model = problem.graph, problem.model
    costs = replace(predict(graph, model, plan.choices, plan.layouts, plan.conversions), gap=gap)
    if constraints.aim.trains:
        costs = replace(costs, optimizer=constraints.aim.optimizer)
    if limit is not None:
        costs = replace(costs, memory=_memory_within(limit, plan, constraints))
    if limit is not None and not constraints.aim.trains:
        context, batch = limit.largest_calls(plan)
        costs = replace(costs, context=context, batch=batch)
    if plan.data:
        return costs  # replicated weights are expected here
    pinned = [node for node, pin in problem.constraints.pins.items() if not pin.axes]
    return replace(costs, whole=unsplit(graph, model, plan.choices, plan.layouts, costs, pinned))


def _step_costs(problem: PlanningProblem, plan: AxisPlan) -> Costs:
    """Adds the seconds beside the ops to a plan's costs, and a step's seconds with the same choices on fewer ranks."""
    kernels, seconds = problem.kernels(), dict[int, float]()
    for ranks in (2**i for i in range((plan.world_size - 1).bit_length())):
        fewer = replace(problem, model=problem.model.on(ranks))
        costs = replace(fewer.costs_of(plan.choices, plan.layouts), optimizer=plan.costs.optimizer)
        of_fewer = PlannedAxis(replace(plan, axis=fewer.model.axis, costs=costs), fewer)
        seconds[ranks] = costs.seconds + sum(beside_ops([of_fewer], costs.seconds, kernels).values())
    beside = beside_ops([PlannedAxis(plan, problem)], plan.costs.seconds, kernels)
    return replace(plan.costs, fewer=seconds, beside=beside)
