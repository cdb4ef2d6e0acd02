"""Explains a plan as text: a table of modules, the collectives with their reasons, or the listing of ops."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from torch import fx

from torchshard.core.errors import InputError
from torchshard.ir.listing import listing
from torchshard.plans.plan import Plan
from torchshard.report.step import step_graph, step_told
from torchshard.report.why import expensive_pins, told

Level = Literal["table", "node", "step"]
LEVELS = get_args(Level)


class Planned(Protocol):
    """Anything with a plan and its graph: a `Program`, or a `ShardedModule` that has been called."""

    @property
    def plan(self) -> Plan: ...

    @property
    def graph(self) -> fx.GraphModule: ...


def explain(model: Planned | Plan, module: str = "", level: Level = "table", rank: int = 0) -> str:
    """What was inserted and why.

    Args:
        module: the path of a module, for the listing of that part alone.
        level: "table", a row per module and below it each kind of collective: why it is there, the user's line, from
            and to which layout, bytes, time, and the next best plan without it; between them expensive pins, and
            ops for which values are gathered, the most expensive first. Or "node", the listing of the graph. Or "step",
            the forward and backward of a rank as they run: when collectives begin and when they are waited for, what is
            saved, what is computed again.
        rank: whose step is listed.

    Raises:
        InputError: the level, the module or the rank is none, the plan was loaded and has no graph to list, or the step
            has no graph of its backward.
    """
    if level not in LEVELS:
        raise InputError(
            f"invalid level {level!r}", where="level=", why=f"levels are {', '.join(LEVELS)}", attempt=repr(LEVELS[0])
        )
    if level == "step":
        axis = plan_in(model).axis
        return "\n".join(step_told(step_graph(graph_of(model), axis, rank), axis, rank, module))
    if module or level == "node":
        found = listing(graph_of(model), within=module)
        if module and not found:
            raise InputError(
                f"no op of the graph belongs to {module!r}",
                where="module=",
                why="a module is named by its path in the model; one that computes nothing has no ops",
                attempt="explain(model, level='node'), which lists all",
            )
        return found
    plan = plan_in(model)
    notes = list(expensive_pins(plan, plan.problem)) if plan.problem is not None else []
    notes += map(str, plan.costs.whole)
    return "\n".join([str(plan), *([""] if notes else []), *notes, "", *told(plan, plan.problem)])


def plan_in(model: Planned | Plan) -> Plan:
    """A plan, or that of a model's latest graph.

    Raises:
        InputError: it is neither.
    """
    found = getattr(model, "plan", model)
    if not isinstance(found, Plan):
        raise InputError(
            f"a {type(model).__name__} has no plan",
            where="explain, draw",
            why="what is shown is a plan and its graph with collectives, which sharding makes",
            attempt="what torchshard.shard or torchshard.plan returned",
        )
    return found


def graph_of(model: Planned | Plan) -> fx.GraphModule:
    """The graph with its collectives of a model or plan.

    Raises:
        InputError: it has none: it is no sharded model, or a plan that was loaded.
    """
    found = getattr(model, "graph", None)
    if not isinstance(found, fx.GraphModule):
        plan_in(model)
        raise InputError(
            "the plan has no graph",
            where="explain, draw",
            why="it was loaded: a file holds layouts and choices, not the model",
            attempt="torchshard.plan(model, loaded_plan, ...), and what it returns",
        )
    return found
