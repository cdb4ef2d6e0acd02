"""Breaks down the time of a step: by layer, within one layer, and by the bounds of its ops.

layers.* ×32   computes 3.1 ms   waits for collectives 0.4 ms   0.2 ms of collectives run meanwhile
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from torchshard.compiler.what_if import solutions_of
from torchshard.core.paths import is_part, layer_of, star_numbers
from torchshard.ir.graph import op_name
from torchshard.ir.listing import is_within
from torchshard.planner.timeline import Message, Work, course, work_of_step
from torchshard.plans.costs import Collective, Sent
from torchshard.plans.plan import Plan

MODEL_ITSELF = "the model"
BATCH = "over the batch's axes"


@dataclass
class Share:
    """The time in a step of one module, or of several of one name."""

    name: str
    modules: set[str] = field(default_factory=set)
    computes: float = 0.0
    """Seconds of computation."""
    waits: float = 0.0
    """Seconds in which the rank waits for collectives."""
    hidden: float = 0.0
    """Seconds of collectives that run while the rank computes."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.computes + self.waits


def shares(plan: Plan) -> list[Share]:
    """The time of a step by layers, in model order; on a mesh then the rest, the batch axes' collectives last.

    Layers with equal names share an entry.
    """
    found: dict[str, Share] = {}

    def share(path: str) -> Share:
        module = layer_of(path) or path
        name = star_numbers(module) or MODEL_ITSELF
        one = found.setdefault(name, Share(name))
        one.modules.add(module)
        return one

    for path, seconds in plan.costs.compute.items():
        share(path).computes += seconds
    over_weights = [] if plan.last.data else plan.costs.collectives
    for c in over_weights:
        share(c.place).waits += c.seconds
        share(c.place).hidden += sum(sent.hidden for sent in c.sent)
    found |= {name: Share(name, {name}, waits=seconds) for name, seconds in plan.costs.beside.items() if seconds}
    waits = plan.step_seconds["collectives over the batch's axes"]
    if waits or plan.hidden_seconds > 0:
        found[BATCH] = Share(BATCH, {BATCH}, waits=waits, hidden=max(plan.hidden_seconds, 0.0))
    return list(found.values())


# --- one layer -------------------------------------------------------------------------------------------------------

COMPUTES, SENDS = "computes", "sends"
MOMENT = 1e-12
"""Seconds; shorter differences are rounding errors."""


@dataclass(frozen=True)
class Event:
    """An activity of a rank with a start and a duration."""

    lane: str
    """COMPUTES; SENDS, collectives that it waits for, unless hidden; or 'over dp', for the batch axis
    dp."""
    name: str
    of: str
    """The name of the op's node or, for a collective, of the converted value."""
    start: float
    """Seconds from the beginning of the layer's forward or backward; negative if it began earlier."""
    seconds: float
    hidden: float = 0.0
    """Seconds from the start during which the rank computes meanwhile."""
    is_own: bool = True
    """Whether it belongs to the layer."""
    is_op: bool = False

    @property
    def waits(self) -> float:
        """The time at which the rank begins to wait for it, or to compute it."""
        return self.start + self.hidden

    @property
    def end(self) -> float:
        """The time at which it ends."""
        return self.start + self.seconds


@dataclass(frozen=True)
class Span:
    """A layer's forward or backward, with all other activity of the rank meanwhile."""

    events: list[Event]
    seconds: float


def layer_timeline(plan: Plan, layer: str) -> tuple[Span, ...]:
    """A rank's activity during a module's forward and backward, by the planner's prices.

    Empty for a plan without a graph.
    """
    solved = solutions_of(plan)
    if not solved:
        return ()
    work = work_of_step(solved)
    found = course([*work.values()])
    nodes = {node.name: node for node in solved[0].problem.graph.nodes}
    spans = []
    for way, names in enumerate((list(work), list(work)[::-1])):
        events = list[Event]()
        for name, start in zip(names, found.starts[way], strict=True):
            events += _of_op(nodes[name], work[name], way, start, layer)
        spans.append(_span(events, [_of_batch(plan, message, layer) for message in found.messages]))
    return tuple(spans)


def _of_op(node: fx.Node, work: Work, way: int, start: float, layer: str) -> Iterator[Event]:
    """The events of an op: its computation after its waits in the forward, before them in the backward."""
    is_own = is_within(node, layer)
    op = Event(COMPUTES, op_name(node), node.name, start, work.computes[way], is_own=is_own, is_op=True)
    now = start + op.seconds * way
    for c, sent in work.waits[way]:
        yield _of_collective(c, sent, now, layer)
        now += sent.seconds
    yield op if way else replace(op, start=now)


def _of_collective(c: Collective, sent: Sent, now: float, layer: str) -> Event:
    """The event of a collective, partly hidden by computation, or of a slicing that sends no message."""
    is_own = is_part(c.place, layer)
    if not sent.nbytes:
        return Event(COMPUTES, c.name, c.value, now, sent.seconds, is_own=is_own)
    name = f"{sent.message} of {c.name}"
    return Event(SENDS, name, c.value, now - sent.hidden, sent.hidden + sent.seconds, sent.hidden, is_own)


def _of_batch(plan: Plan, message: Message, layer: str) -> Event:
    lane, c = f"over {plan.in_order[message.axis].axis}", message.of
    is_own = is_part(c.place, layer)
    return Event(lane, message.sent.message, c.value, message.start, message.sent.seconds, is_own=is_own)


def _span(of_ops: Sequence[Event], of_batch: Sequence[Event]) -> Span:
    """The part of a step from a layer's first op to its last, extended by adjacent collectives."""
    own = [event for event in of_ops if event.is_own]
    ops = [event for event in own if event.is_op]
    start = min((event.start for event in ops), default=0.0)
    end = max((event.end for event in ops), default=0.0)
    for event in own:
        end = max(end, event.end) if event.waits <= end + MOMENT else end
    for event in reversed(own):
        start = min(start, event.waits) if event.end >= start - MOMENT else start
    events = [event for event in (*of_ops, *of_batch) if event.seconds and event.waits < end and event.end > start]
    return Span([replace(event, start=event.start - start) for event in events], end - start)


# --- bounds ----------------------------------------------------------------------------------------------------------


@dataclass
class Bound:
    """Ops of one kind, or messages of one kind, with the same bottleneck."""

    name: str
    by: str
    """The bottleneck: 'computation', 'memory' or 'the host'; of messages, 'bandwidth' or 'latency'."""
    count: int = 0
    seconds: float = 0.0
    """Time in a step."""
    flops: float = 0.0
    """Operations in the forward."""
    nbytes: float = 0.0
    """Bytes that the forward reads and writes; for messages, bytes that a step sends."""


def bounds(plan: Plan) -> list[Bound]:
    """The bottlenecks of all kinds of ops and messages, longest first; only messages without a graph."""
    found: dict[tuple[str, str], Bound] = {}
    for name, by, count, *amounts in (*_ops(plan), *_messages(plan)):
        bound = found.setdefault((name, by), Bound(name, by))
        bound.count += count
        for what, amount in zip(("seconds", "flops", "nbytes"), amounts, strict=True):
            setattr(bound, what, getattr(bound, what) + amount)
    return sorted(found.values(), key=lambda bound: -bound.seconds)


def _ops(plan: Plan) -> Iterator[tuple[str, str, int, float, float, float]]:
    machine, solved = plan.machine, solutions_of(plan)
    for node, price in (solved[0].problem.prices(plan.choices) if solved else {}).items():
        by = "computation" if price.flops / machine.flops > price.nbytes / machine.memory_bandwidth else "memory"
        if price.forward < 2 * machine.op_overhead:
            by = "the host"
        if price.forward:
            yield op_name(node), by, 1, price.forward + price.backward, price.flops, price.nbytes


def _messages(plan: Plan) -> Iterator[tuple[str, str, int, float, float, float]]:
    for each in plan.axes:
        for sent in (sent for c in each.costs.collectives for sent in c.sent if sent.nbytes):
            begins = each.machine.begins(sent.kernel, each.world_size)
            by = "latency" if 2 * begins * sent.times > sent.seconds + sent.hidden else "bandwidth"
            yield sent.message, by, sent.times, sent.seconds, 0.0, sent.nbytes
