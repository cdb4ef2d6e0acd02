"""A captured graph and what the user asks for -> a Plan: a plan that was given is checked, all else is searched."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from torchshard.compiler.memory import OPTIMIZER_STATES, predicted_memory
from torchshard.core.conversions import Steps
from torchshard.core.errors import PlanError
from torchshard.core.layouts import I, Layout, Shard, parts_of, parts_size
from torchshard.core.mesh import MeshAxis
from torchshard.core.notation import Choice
from torchshard.ir.graph import is_tensor_op, node_row
from torchshard.passes import rewrite
from torchshard.passes.annotate import planned_choice
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.planner.network import Asked
from torchshard.planner.predict import predict
from torchshard.planner.search import Found, search
from torchshard.planner.styles import check_matches, parameter_layouts, pins_of
from torchshard.planner.unsplit import unsplit
from torchshard.plans.data import Costs, Stored
from torchshard.plans.machine import Machine, Objective, size_text
from torchshard.plans.plan import Plan
from torchshard.report.why import Question

PlanLike = Mapping[str, Any] | Plan | str | os.PathLike[str]
"""A dict of module globs and styles, "auto" (an empty one), a Plan, or a Plan's JSON: a path or the text itself."""


def plan_graph(
    module: fx.GraphModule,
    model: nn.Module,
    wanted: Mapping[str, Any] | Plan,
    axis: MeshAxis,
    objective: Objective,
    parameters: Mapping[str, Layout],
) -> Plan:
    """The best plan of a normalized graph.

    Args:
        wanted: what the user pins, or a plan that was made before.
        parameters: layouts that are fixed already, by name.

    Raises:
        PlanError: what is wanted does not fit the model, or nothing fits the memory.
    """
    if isinstance(wanted, Plan) and objective.any_machine:
        objective = dataclasses.replace(objective, machine=wanted.machine)
    costs = CostModel(objective.machine, axis)
    asked = _asked(module.graph, model, wanted, parameters)
    asked = dataclasses.replace(asked, all_axes=objective.all_axes)
    limit = None
    given: Mapping[str, Steps] = {}
    if objective.memory is not None:
        limit = _Limit(module, costs, objective.memory)
        asked = dataclasses.replace(asked, per_parameter=2.0 + OPTIMIZER_STATES)
    question = Question(module.graph, costs, asked, limit)
    if isinstance(wanted, Plan) and all(n.name in wanted.choices for n in module.graph.nodes if is_tensor_op(n)):
        choices = {node.name: choice for node, (choice,) in asked.options.items()}
        found = Found(choices, {**wanted.parameters, **parameters}, wanted.costs.gap)
        given = wanted.conversions
        question = dataclasses.replace(question, asked=dataclasses.replace(asked, options={}, parameters=parameters))
    else:
        found = search(module.graph, costs, asked, limit)
        if isinstance(wanted, Mapping):
            idle = _idle_layouts(module.graph, model, wanted)
            found = dataclasses.replace(found, parameters={**found.parameters, **idle, **parameters})
    conversions = conversions_of(module.graph, costs, found.choices, found.parameters, given)
    memory = limit.taken(found.choices, found.parameters, conversions) if limit else {}
    if limit and memory["peak"] > limit.nbytes:
        if isinstance(wanted, Plan):
            raise _does_not_fit("the plan does not fit", "it", memory, limit.nbytes)
        raise _does_not_fit(f"no plan for {axis.size} ranks fits", "the leanest", memory, limit.nbytes)
    collectives, compute = predict(module.graph, costs, found.choices, found.parameters, conversions)
    fewer = _with_fewer(module.graph, objective.machine, axis, found)
    told = Costs(objective.machine.name, compute, tuple(collectives), found.gap, memory, fewer=fewer)
    pinned = [node for node, pin in asked.pins.items() if not pin.axes]
    whole = unsplit(module.graph, costs, found.choices, found.parameters, told, pinned)
    return Plan(
        axis.size,
        found.parameters,
        found.choices,
        conversions,
        stored=stored_shapes(model),
        fingerprint=fingerprint(model),
        costs=dataclasses.replace(told, whole=whole),
        machine=objective.machine,
        static=is_static(wanted, objective),
        question=question,
    )


def _with_fewer(graph: fx.Graph, machine: Machine, axis: MeshAxis, found: Found) -> dict[int, float]:
    """What a step would take on fewer ranks, with the same choices: 1, 2, 4, ... of them."""
    seconds = {}
    for ranks in (2**i for i in range((axis.size - 1).bit_length())):
        costs, decided = CostModel(machine, MeshAxis(ranks)), (found.choices, found.parameters)
        collectives, compute = predict(graph, costs, *decided, conversions_of(graph, costs, *decided))
        seconds[ranks] = Costs(compute=compute, collectives=tuple(collectives)).seconds
    return seconds


def _idle_layouts(graph: fx.Graph, model: nn.Module, wanted: Mapping[str, Any]) -> dict[str, Layout]:
    """How pinned parameters lie that no op of this call takes: they may be looked at for their sizes, or be another
    call's. They are stored as the pin says, where the type of their module tells how."""
    chosen = check_matches(wanted, [name for name, _ in model.named_modules()])
    layouts = parameter_layouts(model, {path: style for path, (_, style) in chosen.items()})
    taken = {n.meta["path"] for n in graph.nodes if n.op == "placeholder" and any(map(is_tensor_op, n.users))}
    return {name: layout for name, layout in layouts.items() if name not in taken}


@dataclass(frozen=True)
class _Limit:
    """Of what a training step takes on a rank."""

    module: fx.GraphModule
    costs: CostModel
    nbytes: float

    def taken(
        self, choices: Mapping[str, Choice], layouts: Mapping[str, Layout], conversions: Mapping[str, Steps]
    ) -> dict[str, float]:
        """What a plan takes; see `predicted_memory`."""
        made = Plan(self.costs.axis.size, layouts, choices, conversions)
        return predicted_memory(rewrite(self.module, made), made)

    def __call__(self, choices: Mapping[str, Choice], layouts: Mapping[str, Layout]) -> bool:
        """Whether a plan is within it."""
        conversions = conversions_of(self.module.graph, self.costs, choices, layouts)
        return self.taken(choices, layouts, conversions)["peak"] <= self.nbytes


def check_memory(model: nn.Module, axis: MeshAxis, memory: float | None) -> None:
    """Refuses at once what no plan can fit, before a model is captured.

    Raises:
        PlanError: an even share of the parameters, gradients and optimizer states is more than a rank may hold.
    """
    if memory is None:
        return
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    rest = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    parts = {"parameters": trained + rest, "gradients": trained, "optimizer": OPTIMIZER_STATES * trained}
    shares = {name: size / axis.size for name, size in parts.items()}
    taken = shares | {"peak": sum(shares.values())}
    if taken["peak"] > memory:
        raise _does_not_fit(f"no plan for {axis.size} ranks fits", "an even share of the parameters", taken, memory)


def is_static(wanted: Mapping[str, Any] | Plan, objective: Objective) -> bool:
    """Whether the plan is for one batch and sequence size alone, and the graph is to be captured so."""
    return wanted.static if isinstance(wanted, Plan) else objective.all_axes


def _does_not_fit(what: str, which: str, memory: Mapping[str, float], most: float) -> PlanError:
    shown = ", ".join(f"{name} {size_text(size)}" for name, size in memory.items() if name != "peak")
    peak = memory["peak"]
    return PlanError(
        f"{what} {size_text(most)}: {which} takes {size_text(peak)}, {size_text(peak - most)} too much",
        where="memory=",
        why=f"per rank: {shown}",
        attempt="more ranks, a smaller batch, or weights of fewer bytes",
    )


def stored_shapes(model: nn.Module) -> dict[str, Stored]:
    """The shape of each parameter and buffer, under its first name."""
    tied: dict[int, list[str]] = {}
    for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        tied.setdefault(id(t), []).append(name)
    return {
        n: Stored(tuple(t.shape), t.dtype.itemsize, _kind(model, n.rpartition(".")[0]), tuple(tied[id(t)][1:]))
        for n, t in (*model.named_parameters(), *model.named_buffers())
    }


def _kind(model: nn.Module, path: str) -> str:
    """The class of a module, or which of PyTorch's it is one of."""
    module = model.get_submodule(path)
    return next(
        (kind.__name__ for kind in (nn.Linear, nn.Embedding) if isinstance(module, kind)), type(module).__name__
    )


def fingerprint(model: nn.Module) -> str:
    """Equal for models whose parameters and buffers have the same names and shapes."""
    shapes = {name: tuple(t.shape) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]


def _asked(
    graph: fx.Graph, model: nn.Module, wanted: Mapping[str, Any] | Plan, parameters: Mapping[str, Layout]
) -> Asked:
    """What the user's plan, and the parameters' layouts where they are fixed already, leave to the search."""
    if isinstance(wanted, Plan):
        _check_same_model(model, wanted)
        check_layouts(model, wanted.parameters)
        return Asked(_given_options(graph, wanted), {}, {**wanted.parameters, **parameters})
    chosen = check_matches(wanted, [name for name, _ in model.named_modules()])
    return Asked({}, pins_of(graph, chosen), parameters)


def _given_options(graph: fx.Graph, plan: Plan) -> dict[fx.Node, list[Choice]]:
    """The plan's choices for the ops that it names; what it does not name is found anew."""
    named = (node for node in graph.nodes if is_tensor_op(node) and node.name in plan.choices)
    return {node: [planned_choice(node, node_row(node), plan)] for node in named}


# --- plans that were given -------------------------------------------------------------------------------------------


def _check_same_model(model: nn.Module, plan: Plan) -> None:
    if not plan.fingerprint or plan.fingerprint == fingerprint(model):
        return
    ours, theirs = stored_shapes(model), plan.stored
    name = next((n for n in sorted(ours.keys() | theirs.keys()) if _shape(ours, n) != _shape(theirs, n)), "?")
    raise PlanError(
        "the plan was made for another model",
        where=f"parameter {name!r}",
        why=f"it has shape {_shape(ours, name)} here, and {_shape(theirs, name)} in the plan's model",
        attempt="make the plan anew for this model",
    )


def _shape(stored: Mapping[str, Stored], name: str) -> object:
    return stored[name].shape if name in stored else "(there is none)"


def check_layouts(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Layouts fit the parameters and buffers that they are for.

    Raises:
        PlanError: a name is unknown, or a layout splits a dim that is not there or has another size.
    """
    shapes = {name: t.shape for name, t in (*model.named_parameters(), *model.named_buffers())}
    split = {name: layout for name, layout in layouts.items() if layout != I}
    strangers = sorted(split.keys() - shapes.keys())
    if strangers:
        raise PlanError(
            f"the plan splits {len(strangers)} parameters that the model does not have",
            where=f"parameter {strangers[0]!r}",
            why="the plan was made for another model",
            attempt="make the plan anew for this model",
        )
    for name, layout in split.items():
        if not _divides(layout, shapes[name]):
            raise PlanError(
                f"the plan's layout {layout} does not fit a parameter",
                where=f"parameter {name!r}",
                why=f"it has shape {tuple(shapes[name])}; the plan was made for another model",
                attempt="make the plan anew for this model",
            )


def _divides(layout: Layout, shape: Sequence[int]) -> bool:
    if not isinstance(layout, Shard) or layout.dim >= len(shape):
        return False
    return parts_size(parts_of(shape[layout.dim], layout)) == shape[layout.dim]


def read_plan(plan: PlanLike, world_size: int) -> Mapping[str, Any] | Plan:
    """A plan in any of its forms, as a dict of styles or a Plan.

    Raises:
        PlanError: it can't be read, or was made for another number of ranks.
    """
    if isinstance(plan, str) and plan == "auto":
        return {}
    if isinstance(plan, (str, os.PathLike)):
        text = str(plan)
        plan = Plan.from_json(text) if text.lstrip().startswith("{") else Plan.load(text)
    if not isinstance(plan, (Plan, Mapping)):
        raise PlanError(
            f"a {type(plan).__name__} is no plan",
            where="the plan",
            why=f"got {plan!r:.80}",
            attempt="a dict of module globs and styles, a Plan, or the path of a Plan's JSON",
        )
    if isinstance(plan, Plan) and plan.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, the group has {world_size}",
            where="Plan.world_size",
            why="slices of parameters and collectives are planned for one number of ranks",
            attempt=f"a plan made with world_size={world_size}, or {plan.world_size} ranks",
        )
    return plan
