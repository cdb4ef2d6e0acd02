"""Where the time of a step goes: of each layer, within one layer, and what bounds its ops.

layers.* ×32   computes 3.1 ms   waits for collectives 0.4 ms   0.2 ms of collectives run meanwhile
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchshard.core.paths import is_part, layer_of, star_numbers
from torchshard.ir.graph import op_name
from torchshard.ir.listing import is_within
from torchshard.planner.problem import Price
from torchshard.plans.data import Collective, PlanData, Sent

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


def shares(plan: PlanData) -> list[Share]:
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
    over_weights = [] if plan.data else plan.costs.collectives
    for c in over_weights:
        share(c.place).waits += c.seconds
        share(c.place).hidden += sum(sent.hidden for sent in c.sent)
    waits = plan.step_seconds["collectives over the batch's axes"]
    if waits or plan.hidden_seconds > 0:
        found[BATCH] = Share(BATCH, {BATCH}, waits=waits, hidden=max(plan.hidden_seconds, 0.0))
    return list(found.values())


# --- one layer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """What a rank does for a while, in seconds from the beginning of the layer's forward, or backward."""

    lane: str
    """'computes' or 'sends'."""
    name: str
    node: str
    """Of the op; of a collective, that of the value."""
    start: float
    seconds: float


@dataclass
class _Clock:
    now: float = 0.0
    events: list[Event] = field(default_factory=list)

    def compute(self, node: fx.Node, seconds: float) -> None:
        if seconds:
            self.events.append(Event("computes", op_name(node), node.name, self.now, seconds))
            self.now += seconds

    def send(self, c: Collective, sent: Sent) -> None:
        """A collective, of which the rank has computed a part of the time meanwhile; or a cut, which it makes alone."""
        if not sent.seconds:
            return
        start, lane, name = self.now, "computes", c.name
        if sent.nbytes:
            start, lane = max(self.now - sent.hidden, 0.0), "sends"
            name = f"{sent.kernel.replace('_', '-')} of {c.name}"
        self.events.append(Event(lane, name, c.value, start, sent.hidden + sent.seconds))
        self.now += sent.seconds


def layer_timeline(plan: PlanData, layer: str) -> tuple[list[Event], list[Event]]:
    """What a rank does in a module, forward and backward, by the planner's prices; nothing for a plan that was loaded.

    Collectives of axes that divide the batch are left out: they are not waited for where they are sent.
    """
    forward, backward = _Clock(), _Clock()
    ops: dict[str, tuple[fx.Node, Price]] = {}
    if plan.problem is not None:
        inside = {n.name for n in plan.problem.graph.nodes if is_within(n, layer)}
        choices = {name: choice for name, choice in plan.choices.items() if name in inside}
        ops = {node.name: (node, price) for node, price in plan.problem.prices(choices).items()}
    before: dict[str, list[Collective]] = defaultdict(list)
    for c in () if plan.data or not ops else plan.costs.collectives:
        if is_part(c.place, layer):
            before[c.consumers[0] if c.consumers[0] in ops else BEHIND].append(c)
    for node, price in ops.values():
        for c in before[node.name]:
            forward.send(c, c.forward)
        forward.compute(node, price.forward)
    for c in before[BEHIND]:
        forward.send(c, c.forward)
        backward.send(c, c.backward)
    for node, price in reversed(ops.values()):
        backward.compute(node, price.backward)
        for c in before[node.name]:
            backward.send(c, c.again)
            backward.send(c, c.backward)
    return forward.events, backward.events


BEHIND = ""
"""Where a layer's collectives stand that are for what comes after it."""


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


def bounds(plan: PlanData) -> list[Bound]:
    """What bounds each kind of op and of message, what takes the longest first; of a loaded plan the messages alone."""
    found: dict[tuple[str, str], Bound] = {}
    for name, by, count, *amounts in (*_ops(plan), *_messages(plan)):
        bound = found.setdefault((name, by), Bound(name, by))
        bound.count += count
        for what, amount in zip(("seconds", "flops", "nbytes"), amounts, strict=True):
            setattr(bound, what, getattr(bound, what) + amount)
    return sorted(found.values(), key=lambda bound: -bound.seconds)


def _ops(plan: PlanData) -> Iterator[tuple[Any, ...]]:
    machine = plan.machine
    for node, price in ({} if plan.problem is None else plan.problem.prices(plan.choices)).items():
        by = "computation" if price.flops / machine.flops > price.nbytes / machine.memory_bandwidth else "memory"
        if price.forward < 2 * machine.op_overhead:
            by = "the host"
        if price.forward:
            yield op_name(node), by, 1, price.forward + price.backward, price.flops, price.nbytes


def _messages(plan: PlanData) -> Iterator[tuple[Any, ...]]:
    for each in plan.over_all:
        bandwidth, _ = each.machine.link(each.world_size)
        for sent in (sent for c in each.costs.collectives for sent in c.sent if sent.nbytes):
            by = "bandwidth" if 2 * sent.nbytes / bandwidth > sent.seconds + sent.hidden else "latency"
            yield sent.kernel.replace("_", "-"), by, sent.times, sent.seconds, 0.0, sent.nbytes
