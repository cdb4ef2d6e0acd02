"""The timeline of a step over all axes of a mesh: a rank computes while weights and gradients are in transfer.

The rank runs op after op, forward and then backward. Meanwhile each axis of the batch sends one message after another.
A weight is gathered while earlier ops run. A gradient is summed after the op that computes it and after the weights
that are needed next, because only the end of the step waits for it (`passes.schedule`). The rank waits for all other
collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from torchshard.ir.graph import before_casts, is_weight
from torchshard.ops import is_collective
from torchshard.planner.problem import PlannedAxis
from torchshard.plans.costs import Collective, Sent

Sends = list[tuple[Collective, Sent]]
Messages = dict[int, Sends]
"""The number of a batch axis, counted from the outermost -> its messages."""


@dataclass
class Work:
    """The work of an op: seconds and messages, first in forward, then in backward."""

    computes: list[float] = field(default_factory=lambda: [0.0, 0.0])
    waits: tuple[Sends, Sends] = field(default_factory=lambda: ([], []))
    """The collectives that the rank waits for: before the op in forward, after it in backward."""
    gathers: tuple[Messages, Messages] = field(default_factory=lambda: ({}, {}))
    """The gathers of its weights."""
    sums: Messages = field(default_factory=dict)
    """The sums of its weights' gradients, in backward."""

    def seconds(self, way: int) -> float:
        """Returns the seconds that it computes and waits, in forward (0) or backward (1)."""
        return self.computes[way] + sum(sent.seconds for _, sent in self.waits[way])


@dataclass(frozen=True)
class Message:
    """A message of a batch axis; it starts in seconds from the beginning of the step."""

    axis: int
    of: Collective
    sent: Sent
    start: float


@dataclass(frozen=True)
class Course:
    """The timeline of a rank, in seconds from the beginning of the step."""

    starts: tuple[list[float], list[float]]
    """When each op has its weights: in the order of the ops in forward, in reverse order in backward."""
    messages: list[Message]
    seconds: float
    """The length of the step."""


def course(ops: Sequence[Work]) -> Course:
    """Returns the timeline of a step that runs these ops in order."""
    now, free = 0.0, dict[int, float]()
    starts, found = (list[float](), list[float]()), list[Message]()

    def sent(messages: Messages, start: float) -> float:
        for axis in sorted(messages, reverse=True):  # nested slices are gathered and summed from the inner axis on
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
    """Returns the seconds of a step over mesh axes, in the order in which the graph is split over them."""
    return course([*work_of_step(solutions).values()]).seconds


def work_of_step(solutions: Sequence[PlannedAxis]) -> dict[str, Work]:
    """Returns op -> its work, in the order of the first axis' graph."""
    first = solutions[0]
    prices = first.problem.prices(first.plan.choices)
    work = {node.name: Work([price.forward, price.backward]) for node, price in prices.items()}
    graphs = [{node.name: node for node in problem.graph.nodes} for _, problem in solutions]
    for axis, ((plan, _), nodes) in enumerate(zip(solutions, graphs, strict=True)):
        for c in plan.costs.collectives:
            op = work[_first_op(graphs[: axis + 1], c.consumers[0], work)]
            if plan.data and is_weight(before_casts(nodes[c.value])):
                for messages, message in zip((*op.gathers, op.sums), c.sent, strict=True):
                    if message.seconds:  # an empty message would wait for earlier ones
                        messages.setdefault(axis, []).append((c, message))
            else:
                op.waits[0].append((c, c.forward))
                op.waits[1].extend([(c, c.again), (c, c.backward)])
    return work


def _first_op(graphs: Sequence[dict[str, fx.Node]], name: str, ops: dict[str, Work]) -> str:
    """Returns the first graph's op for a node of the last: its replacement, or a collective before it."""
    node = graphs[-1][name]
    while is_collective(node.target) and node.users:
        node = next(iter(node.users))
    name = node.name
    for nodes in reversed(graphs):
        name = nodes[name].meta.get("inside", name) if name in nodes else name
    return name if name in ops else next(reversed(ops))
