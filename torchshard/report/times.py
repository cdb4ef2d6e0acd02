"""Where the time of a step goes: of each layer, within one layer, and what bounds its ops.

layers.* ×32   computes 3.1 ms   waits for collectives 0.4 ms   0.2 ms of collectives run meanwhile
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from torchshard.compiler.what_if import solutions_of
from torchshard.core.paths import is_part, layer_of, star_numbers
from torchshard.ir.graph import op_name
from torchshard.ir.listing import is_within
from torchshard.planner.timeline import Message, Work, course, work_of_step
from torchshard.plans.data import Collective, Sent
from torchshard.plans.plan import Plan

MODEL_ITSELF = "the model"
BATCH = "over the batch's axes"


@dataclass
class Share:
    """What a step takes for one module, or for several of one name."""

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
        """Of the step."""
        return self.computes + self.waits


def shares(plan: Plan) -> list[Share]:
    """The time of a step by layers, equal names together, in the model's order; last what divides the batch."""
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
    waits = plan.step_seconds["collectives over the batch's axes"]
    if waits or plan.hidden_seconds > 0:
        found[BATCH] = Share(BATCH, {BATCH}, waits=waits, hidden=max(plan.hidden_seconds, 0.0))
    return list(found.values())


# --- one layer -------------------------------------------------------------------------------------------------------

COMPUTES, SENDS = "computes", "sends"
MOMENT = 1e-12
"""Seconds; what is no longer is rounding."""


@dataclass(frozen=True)
class Event:
    """What a rank does for a while."""

    lane: str
    """COMPUTES; SENDS, what it waits for but while it is hidden; or the axis of the batch that sends: 'over dp'."""
    name: str
    of: str
    """The node of the op; of a collective, the value's."""
    start: float
    """In seconds from the beginning of the layer's forward, or backward; less than 0 for what began before."""
    seconds: float
    hidden: float = 0.0
    """So many of the first of these the rank computes meanwhile."""
    is_own: bool = True
    """Whether it is the layer's."""
    is_op: bool = False

    @property
    def waits(self) -> float:
        """When the rank begins to wait for it, or to compute it."""
        return self.start + self.hidden

    @property
    def end(self) -> float:
        """When it has ended."""
        return self.start + self.seconds


@dataclass(frozen=True)
class Span:
    """A layer's forward, or its backward, and what else a rank does meanwhile."""

    events: list[Event]
    seconds: float


def layer_timeline(plan: Plan, layer: str) -> tuple[Span, ...]:
    """What a rank does in a module, forward and backward, by the planner's prices; nothing without a graph."""
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
    """What an op computes, and what it waits for: before it in the forward, behind it in the backward."""
    is_own = is_within(node, layer)
    op = Event(COMPUTES, op_name(node), node.name, start, work.computes[way], is_own=is_own, is_op=True)
    now = start + op.seconds * way
    for c, sent in work.waits[way]:
        yield _of_collective(c, sent, now, layer)
        now += sent.seconds
    yield op if way else replace(op, start=now)


def _of_collective(c: Collective, sent: Sent, now: float, layer: str) -> Event:
    """A collective, of which the rank has computed a part of the time meanwhile; or a cut, which it makes alone."""
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
    """The part of a step from the first op of a layer to the last, with the collectives around them."""
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
    """Ops of one kind, or messages of one kind, that the same bounds."""

    name: str
    by: str
    """What bounds them: 'computation', 'memory', 'the host'; messages, 'bandwidth' or 'latency'."""
    count: int = 0
    seconds: float = 0.0
    """Of a step."""
    flops: float = 0.0
    """Of the forward."""
    nbytes: float = 0.0
    """That the forward reads and writes; of messages, that a step sends."""


def bounds(plan: Plan) -> list[Bound]:
    """What bounds each kind of op and of message, what takes the longest first; without a graph the messages alone."""
    found: dict[tuple[str, str], Bound] = {}
    for name, by, count, *amounts in (*_ops(plan), *_messages(plan)):
        bound = found.setdefault((name, by), Bound(name, by))
        bound.count += count
        for what, amount in zip(("seconds", "flops", "nbytes"), amounts, strict=True):
            setattr(bound, what, getattr(bound, what) + amount)
    return sorted(found.values(), key=lambda bound: -bound.seconds)


def _ops(plan: Plan) -> Iterator[tuple[Any, ...]]:
    machine, solved = plan.machine, solutions_of(plan)
    for node, price in (solved[0].problem.prices(plan.choices) if solved else {}).items():
        by = "computation" if price.flops / machine.flops > price.nbytes / machine.memory_bandwidth else "memory"
        if price.forward < 2 * machine.op_overhead:
            by = "the host"
        if price.forward:
            yield op_name(node), by, 1, price.forward + price.backward, price.flops, price.nbytes


def _messages(plan: Plan) -> Iterator[tuple[Any, ...]]:
    for each in plan.axes:
        bandwidth, _ = each.machine.link(each.world_size)
        for sent in (sent for c in each.costs.collectives for sent in c.sent if sent.nbytes):
            by = "bandwidth" if 2 * sent.nbytes / bandwidth > sent.seconds + sent.hidden else "latency"
            yield sent.message, by, sent.times, sent.seconds, 0.0, sent.nbytes
