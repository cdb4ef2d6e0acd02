"""The seconds of a step over all axes of a mesh, in which a rank computes while weights and gradients are on their way.

The rank computes op after op, forward and then backward. Beside that each axis of the batch sends one message after
another: a weight is gathered while what comes before the op that needs it computes, and a gradient is summed behind the
op that gives it, for nobody waits for it before the end of the step (`passes.schedule`). All else is waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from torchshard.distributed.ops import is_collective
from torchshard.ir.graph import before_casts, is_weight
from torchshard.planner.problem import PlanningProblem
from torchshard.plans.plan import Plan

Seconds = dict[int, float]
"""The number of an axis of the batch, the outermost first -> seconds."""


@dataclass
class Work:
    """What an op takes, in seconds, first in the forward and then in the backward."""

    computes: list[float] = field(default_factory=lambda: [0.0, 0.0])
    gathers: tuple[Seconds, Seconds] = field(default_factory=lambda: (defaultdict(float), defaultdict(float)))
    """Of its weights."""
    sums: Seconds = field(default_factory=lambda: defaultdict(float))
    """Of its weights' gradients, in the backward."""


def step(ops: Sequence[Work]) -> float:
    """The seconds of a step of these ops, in their order."""
    now, free = 0.0, Seconds()

    def sent(messages: Seconds, start: float) -> float:
        for axis in sorted(messages, reverse=True):  # slices of slices are joined and summed from the inner axis on
            start = free[axis] = max(free.get(axis, 0.0), start) + messages[axis]
        return start

    for way, order in enumerate((ops, ops[::-1])):
        before = now
        for op in order:
            if op.gathers[way]:
                before, now = now, max(now, sent(op.gathers[way], before))
            now += op.computes[way]
            if way:
                sent(op.sums, now)
    return max([now, *free.values()])


def seconds_of_step(plans: Sequence[Plan]) -> float:
    """The same for the axes of a mesh, in their order; the plans have their problems."""
    problems = [plan.problem for plan in plans if plan.problem is not None]
    work = _computation(plans[0], problems[0])
    graphs = [{node.name: node for node in problem.graph.nodes} for problem in problems]
    for axis, (plan, nodes) in enumerate(zip(plans, graphs, strict=True)):
        for c in plan.costs.collectives:
            op = work[_first_op(graphs[: axis + 1], c.consumers[0], work)]
            if plan.data and is_weight(before_casts(nodes[c.value])):
                for messages, message in zip((*op.gathers, op.sums), c.sent, strict=True):
                    if message.seconds:  # what is not sent waits for nothing
                        messages[axis] += message.seconds
            else:
                op.computes[0] += c.forward.seconds
                op.computes[1] += c.again.seconds + c.backward.seconds
    return step(list(work.values()))


def _computation(plan: Plan, problem: PlanningProblem) -> dict[str, Work]:
    """Op -> what it computes, in the order of the graph."""
    prices = problem.prices(plan.choices)
    return {node.name: Work([price.forward, price.backward]) for node, price in prices.items()}


def _first_op(graphs: Sequence[dict[str, fx.Node]], name: str, ops: dict[str, Work]) -> str:
    """The op of the first graph that stands for one of the last: it was replaced, or has a collective before it."""
    node = graphs[-1][name]
    while is_collective(node.target) and node.users:
        node = next(iter(node.users))
    name = node.name
    for nodes in reversed(graphs):
        name = nodes[name].meta.get("inside", name) if name in nodes else name
    return name if name in ops else next(reversed(ops))
