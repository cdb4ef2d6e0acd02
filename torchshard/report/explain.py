"""Explains a plan as text: a table of modules, the collectives with their reasons, or the listing of ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol, get_args

from torch import fx

from torchshard.compiler.program import Program
from torchshard.compiler.what_if import program_of, solutions_of
from torchshard.core.columns import paragraph
from torchshard.core.errors import InputError
from torchshard.ir.listing import is_within, shown_nodes
from torchshard.plans.plan import Plan
from torchshard.plans.table import batch_text
from torchshard.report.folding import folded_lines
from torchshard.report.step import step_graph, step_told
from torchshard.report.why import expensive_pins, told

Level = Literal["table", "node", "step"]
LEVELS = get_args(Level)


class Planned(Protocol):
    """Anything with a plan: a `Program`, or a `ShardedModule` that has been called."""

    @property
    def plan(self) -> Plan: ...


def explain(model: Planned | Plan, module: str = "", level: Level = "table", rank: int = 0) -> str:
    """Explains which collectives were inserted, and why.

    Args:
        module: the path of a module, to list only that part.
        level: "table", a row per module and below it each kind of collective: its reason, the
            user's line, its source and target layout, bytes, time, and the next best plan without
            it; in between, expensive pins, and ops that values are gathered for, the most expensive
            first; then the collectives of further mesh axes. Or "node", the listing of the graph.
            Or "step", the forward and backward of a rank in execution order: where each collective
            begins and is waited for, and which values are saved or recomputed. Of
            equal layers, the first one is listed.
        rank: the rank with the graph and step to list, numbered over all mesh axes.

    Raises:
        InputError: the level, the module or the rank does not exist, the plan was loaded without a
            graph to list, or the step lacks a backward graph.
    """
    if level not in LEVELS:
        raise InputError(
            f"invalid level {level!r}", where="level=", why=f"levels are {', '.join(LEVELS)}", attempt=repr(LEVELS[0])
        )
    plan = plan_in(model)
    if level == "step":
        step = step_of(plan, rank)
        if not any(is_within(node, module) for node in step.graph.nodes):
            raise _no_op_of(module)
        return "\n".join(step_told(step, rank, module))
    if module or level == "node":
        found = folded_lines(shown_nodes(graph_of(plan, rank), module))
        if module and not found:
            raise _no_op_of(module)
        return found
    solved = solutions_of(plan)
    first, *others = (problem for _, problem in solved) if solved else (None for _ in plan.axes)
    notes = [*([] if first is None else expensive_pins(plan, first)), *map(str, plan.costs.whole)]
    lines = [*([""] if notes else []), *notes, "", *told(plan, 0, first)]
    for number, (each, problem) in enumerate(zip(plan.across, others, strict=True), 1):
        lines += ["", batch_text(each), *told(plan, number, problem)]
    return "\n".join([str(plan), *map(paragraph, lines)])


def plan_in(model: Planned | Plan) -> Plan:
    """A given plan, or the plan of a model's latest graph.

    A loaded plan gets its graph back, if its file contains it.

    Raises:
        InputError: `model` is not a plan, and lacks one.
    """
    found = getattr(model, "plan", model)
    if not isinstance(found, Plan):
        raise InputError(
            f"a {type(model).__name__} has no plan",
            where="explain, draw",
            why="what is shown is a plan and its graph with collectives, which sharding makes",
            attempt="what torchshard.shard or torchshard.plan returned",
        )
    program = program_of(found)
    return found if program is None else replace(found, source=program)


def graph_of(plan: Plan, rank: int = 0) -> fx.GraphModule:
    """A rank's graph with the collectives of all mesh axes, before its split over the last axis.

    Raises:
        InputError: the rank does not exist, or the plan lacks a graph: see `program_of`.
    """
    return _program(plan, rank).graph_of(rank)


def step_of(plan: Plan, rank: int) -> fx.GraphModule:
    """A training step of a rank, over all mesh axes.

    Raises:
        InputError: the rank or the plan's graph does not exist, or the model lacks a backward, or
            one that can be a graph.
    """
    return step_graph(rank_graph(plan, rank))


def rank_graph(plan: Plan, rank: int = 0) -> fx.GraphModule:
    """Returns a rank's graph, with local sizes and the collectives of all mesh axes.

    Raises:
        InputError: as `graph_of`.
    """
    return _program(plan, rank).local_graph_of(rank)


def _no_op_of(module: str) -> InputError:
    return InputError(
        f"no op of the graph belongs to {module!r}",
        where="module=",
        why="a module is named by its path in the model; one that computes nothing has no ops",
        attempt="explain(model, level='node'), which lists all",
    )


def _program(plan: Plan, rank: int) -> Program:
    program = program_of(plan)
    if program is None:
        raise InputError(
            "the plan has no graph",
            where="explain, draw",
            why="its file does not hold the graph that it was made for",
            attempt="torchshard.plan(model, plan, ...), and what it returns",
        )
    ranks = program.mesh.size
    if not isinstance(rank, int) or not 0 <= rank < ranks:
        raise InputError(f"there is no rank {rank!r} of {ranks}", where="rank=", attempt=f"rank=0 to {ranks - 1}")
    return program
