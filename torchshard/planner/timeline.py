"""The course of a step over all axes of a mesh: a rank computes while weights and gradients are on their way.

The rank computes op after op, forward and then backward. Beside that each axis of the batch sends one message after
another: a weight is gathered while what comes before the op that needs it computes, and a gradient is summed behind the
op that gives it, and behind the weights that are needed next, for nobody waits for it before the end of the step
(`passes.schedule`). All else is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from torchshard.distributed.ops import is_collective
from torchshard.ir.graph import before_casts, is_weight
from torchshard.planner.problem import PlannedAxis
from torchshard.plans.data import Collective, Sent

Sends = list[tuple[Collective, Sent]]
Messages = dict[int, Sends]
"""The number of an axis of the batch, the outermost first -> what it sends."""


@dataclass
class Work:
    """What an op takes, in seconds, first in the forward and then in the backward."""

    computes: list[float] = field(default_factory=lambda: [0.0, 0.0])
    waits: tuple[Sends, Sends] = field(default_factory=lambda: ([], []))
    """The collectives that the rank waits for: before the op in the forward, behind it in the backward."""
    gathers: tuple[Messages, Messages] = field(default_factory=lambda: ({}, {}))
    """Of its weights."""
    sums: Messages = field(default_factory=dict)
    """Of its weights' gradients, in the backward."""

    def seconds(self, way: int) -> float:
        """What it computes and waits for, forward (0) or backward (1)."""
        return self.computes[way] + sum(sent.seconds for _, sent in self.waits[way])


@dataclass(frozen=True)
class Message:
    """What an axis of the batch sends, in seconds from the beginning of the step."""

    axis: int
    of: Collective
    sent: Sent
    start: float


@dataclass(frozen=True)
class Course:
    """When a rank does what, in seconds from the beginning of the step."""

    starts: tuple[list[float], list[float]]
    """When each op has its weights: in the order of the ops in the forward, and in the reverse one in the backward."""
    messages: list[Message]
    seconds: float
    """Of the step."""


def course(ops: Sequence[Work]) -> Course:
    """The course of a step of these ops, in their order."""
    now, free = 0.0, dict[int, float]()
    starts, found = (list[float](), list[float]()), list[Message]()

    def sent(messages: Messages, start: float) -> float:
        for axis in sorted(messages, reverse=True):  # slices of slices are joined and summed from the inner axis on
            for of, message in messages[axis]:
                start = max(free.get(axis, 0.0), start)
                found.append(Message(axis, of, message, start))
                start = free[axis] = start + message.seconds
        return start

    for way, order in enumerate((ops, ops[::-1])):
        before, sums = now, list[tuple[Messages, float]]()
        for op in order:
            if op.gathers[way]:
                before, now = now, max(now, sent(op.gathers[way], before))
                while sums:
                    sent(*sums.pop(0))
            starts[way].append(now)
            now += op.seconds(way)
            if way:
                sums.append((op.sums, now))
        while sums:
            sent(*sums.pop(0))
    return Course(starts, found, max([now, *free.values()]))


def seconds_of_step(solutions: Sequence[PlannedAxis]) -> float:
    """The seconds of a step over the axes of a mesh, in their order."""
    return course([*work_of_step(solutions).values()]).seconds


def work_of_step(solutions: Sequence[PlannedAxis]) -> dict[str, Work]:
    """Op -> what it takes, in the order of the graph of the first axis."""
    first = solutions[0]
    prices = first.problem.prices(first.plan.choices)
    work = {node.name: Work([price.forward, price.backward]) for node, price in prices.items()}
    graphs = [{node.name: node for node in problem.graph.nodes} for _, problem in solutions]
    for axis, ((plan, _), nodes) in enumerate(zip(solutions, graphs, strict=True)):
        for c in plan.costs.collectives:
            op = work[_first_op(graphs[: axis + 1], c.consumers[0], work)]
            if plan.data and is_weight(before_casts(nodes[c.value])):
                for messages, message in zip((*op.gathers, op.sums), c.sent, strict=True):
                    if message.seconds:  # what is not sent waits for nothing
                        messages.setdefault(axis, []).append((c, message))
            else:
                op.waits[0].append((c, c.forward))
                op.waits[1].extend([(c, c.again), (c, c.backward)])
    return work


def _first_op(graphs: Sequence[dict[str, fx.Node]], name: str, ops: dict[str, Work]) -> str:
    """The op of the first graph that stands for one of the last: it was replaced, or has a collective before it."""
    node = graphs[-1][name]
    while is_collective(node.target) and node.users:
        node = next(iter(node.users))
    name = node.name
    for nodes in reversed(graphs):
        name = nodes[name].meta.get("inside", name) if name in nodes else name
    return name if name in ops else next(reversed(ops))
