"""Model, plan and example inputs in; the planned graph with its collectives out, for any rank.

This is the whole way of a model on one screen: capture, normalize, plan, rewrite.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from torchshard.capture import Captured, capture
from torchshard.conversions import route
from torchshard.errors import InputError, PlanError
from torchshard.graph import is_tensor_op, layout_of, mark_needs_grad, node_row, operands, where
from torchshard.layouts import I, Layout, Shard, parts_of, parts_size
from torchshard.notation import Choice
from torchshard.passes import normalize, rewrite
from torchshard.passes.annotate import legal_choices
from torchshard.planner.costs import CostModel
from torchshard.planner.machine import Machine, read_machine
from torchshard.planner.network import Asked
from torchshard.planner.plan import Costs, Plan, Stored
from torchshard.planner.predict import predict
from torchshard.planner.search import search
from torchshard.planner.styles import Style, check_matches, pins_of

PlanLike = Mapping[str, Any] | Plan | str | os.PathLike[str]
"""A dict of module globs and styles, a Plan, or a Plan's JSON: a path or the text itself."""


@dataclass(frozen=True)
class Program:
    """A captured model with its plan, ready to be made any rank's."""

    captured: Captured
    """The normalized graph, unsharded, and how to call it."""
    plan: Plan
    graph: fx.GraphModule
    """The graph with its collectives, global sizes."""


def program(
    model: nn.Module,
    plan: PlanLike,
    world_size: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Layout] | None = None,
    machine: Machine | str | None = None,
) -> Program:
    """Captures, plans and rewrites one call of a model.

    Args:
        parameters: layouts that are fixed already, by name.
        machine: what costs are reckoned for.

    Raises:
        CaptureError, InputError, PlanError: see each.
    """
    wanted = read_plan(plan, world_size)
    modules = [name for name, _ in model.named_modules()]
    chosen = check_matches(wanted, modules) if isinstance(wanted, Mapping) else {}
    with torch.enable_grad():
        captured = capture(model, args, kwargs)
    normalize(captured.graph)
    _mark_trainable(captured, model)
    asked = _asked(captured, wanted, chosen, model, parameters or {})
    found = plan_of(captured.graph.graph, model, CostModel(read_machine(machine), world_size), asked)
    graph = rewrite(captured.graph, found)
    _warn_missing_rules(captured.graph, graph, world_size)
    return Program(captured, found, graph)


def _asked(
    captured: Captured,
    wanted: Mapping[str, Any] | Plan,
    chosen: Mapping[str, tuple[str, Style]],
    model: nn.Module,
    parameters: Mapping[str, Layout],
) -> Asked:
    """What the user's plan, and the parameters' layouts where they are fixed already, leave to the search."""
    if isinstance(wanted, Plan):
        check_layouts(model, wanted.parameters)
        return Asked(_given_options(captured, wanted), {}, {**wanted.parameters, **parameters})
    return Asked({}, pins_of(captured.graph.graph, chosen), parameters)


def plan_of(graph: fx.Graph, model: nn.Module, costs: CostModel, asked: Asked) -> Plan:
    """The best plan of a normalized graph, with what it costs."""
    found = search(graph, costs, asked)
    collectives, compute = predict(graph, costs, found.choices, found.parameters)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    stored = {name: Stored(tuple(t.shape), t.dtype.itemsize) for name, t in tensors.items()}
    predicted = Costs(costs.machine.name, compute, tuple(collectives), found.gap)
    return Plan(costs.world, found.parameters, found.choices, stored, model_fingerprint(model), predicted)


def model_fingerprint(model: nn.Module) -> str:
    """Equal for models whose parameters and buffers have the same names and shapes."""
    shapes = {name: tuple(t.shape) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]


def check_examples(example_inputs: Any, example_kwargs: Any) -> None:
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


def check_world_size(world_size: Any) -> None:
    """A number of ranks.

    Raises:
        InputError: it is none.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise InputError(
            f"{world_size!r} is no number of ranks", where="world_size=", why="it is an int of 1 or more", attempt="2"
        )


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
        plan = Plan.from_json(text if text.lstrip().startswith("{") else _read_file(text))
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


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise PlanError(
            f"the plan {path!r} can't be read",
            where="the plan",
            why=str(error),
            attempt="the path of a file that Plan.to_json() wrote, a dict, or a Plan",
        ) from None


def _mark_trainable(captured: Captured, model: nn.Module) -> None:
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    inputs = [n for n in captured.graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    mark_needs_grad(captured.graph, trainable + [n.meta["path"] for n in inputs if n.meta["val"].requires_grad])


def _given_options(captured: Captured, plan: Plan) -> dict[fx.Node, list[Choice]]:
    """The plan's choices for the ops that it names; what it does not name is found anew."""
    given: dict[fx.Node, list[Choice]] = {}
    for node in captured.graph.graph.nodes:
        choice = plan.choices.get(node.name) if is_tensor_op(node) else None
        if choice is None:
            continue
        legal = [
            c
            for c in legal_choices(node, node_row(node), plan.world_size, choice)
            if (c.name, c.operands, c.results) == (choice.name, choice.operands, choice.results)
        ]
        if not legal:
            raise PlanError(
                f"the plan's choice {choice.name!r} is not legal for an op",
                where=where(node),
                why=f"its operands would lie as {', '.join(map(str, choice.operands))}",
                attempt="make the plan anew for this model",
            )
        given[node] = legal
    return given


def _warn_missing_rules(before: fx.GraphModule, after: fx.GraphModule, world: int) -> None:
    """One warning per op without a rule that had to have its operands gathered, with the bytes that cost."""
    originals = {n.name: n for n in after.graph.nodes}
    missing: dict[str, tuple[float, fx.Node]] = {}
    for node in before.graph.nodes:
        if not is_tensor_op(node) or node_row(node) is not None:
            continue
        spent = sum(_whole_bytes(originals[n.name], world) for n in operands(node) if n.name in originals)
        if spent:
            total = missing.get(str(node.target), (0.0, node))[0]
            missing[str(node.target)] = (total + spent, node)
    for target, (spent, node) in missing.items():
        warnings.warn(
            f"{target} has no sharding rule: it runs whole on every rank, which gathers {spent / 1024:.1f} KiB "
            f"per step ({where(node)}). A rule of a few lines, @torchshard.rule({target}), would keep it split.",
            stacklevel=2,
        )


def _whole_bytes(node: fx.Node, world: int) -> float:
    needs_grad = bool(node.meta.get("needs_grad"))
    steps = route(layout_of(node), I, needs_grad=needs_grad) or []
    return 0.0 * len(steps)
