"""The costs of a plan per step: its collectives with their bytes and seconds, computation, memory, replicated ops.

A plan is choices and layouts (`plans.data`); these are the numbers that come of them on one machine. They do not take
part in the comparison of plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchshard.core.layouts import Layout, is_whole
from torchshard.core.units import size_text
from torchshard.plans.optimizers import OptimizerName


@dataclass(frozen=True)
class Sent:
    """Bytes and seconds of a collective, on the rank that sends the most."""

    kernel: str
    """'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', or 'none'."""
    nbytes: float
    seconds: float
    times: int = 1
    """The number of messages; 0 if it is sent as part of another message."""
    hidden: float = 0.0
    """Further seconds of the transfer, which overlap with computation."""

    @property
    def message(self) -> str:
        """The kernel as it is printed: 'all-reduce'."""
        return self.kernel.replace("_", "-")

    def often(self, times: int) -> Sent:
        """Returns the sum of `times` of them."""
        more = {name: getattr(self, name) * times for name in ("nbytes", "seconds", "times", "hidden")}
        return replace(self, **more)


@dataclass(frozen=True)
class Collective:
    """A conversion of a value, or a collective within a split op."""

    value: str
    """The node that computes the converted value."""
    name: str
    """'copy', 'reduce', ...: its name in `conversions.TABLE` or `conversions.BESIDE`."""
    source: Layout
    target: Layout
    consumers: tuple[str, ...]
    """The nodes that require it; for a collective within an op, that op."""
    origin: str
    """The module that produces the value."""
    module: str
    """The module of the first consumer."""
    line: str
    """The user's file and line."""
    type: str
    """The value's type before, with dtype, global shape and sharding: 'f32[2,8,16@tp]'."""
    into: str
    """The value's type after: 'f32[2,8,16]'."""
    forward: Sent
    backward: Sent
    again: Sent
    """Equal to `forward` if backward runs the collective again; otherwise empty."""

    @property
    def sent(self) -> tuple[Sent, ...]:
        """All that it sends in a step: in forward, again in backward, and as its own backward."""
        return self.forward, self.again, self.backward

    @property
    def nbytes(self) -> float:
        """Bytes per rank and step, forward and backward."""
        return sum(sent.nbytes for sent in self.sent)

    @property
    def seconds(self) -> float:
        """Seconds per step, forward and backward."""
        return sum(sent.seconds for sent in self.sent)

    @property
    def is_after(self) -> bool:
        """Whether it belongs after the module that produces the value, not before its consumer."""
        return not is_whole(self.source) and bool(self.origin or not self.module)

    @property
    def is_inside(self) -> bool:
        """Whether it is within a split op, and not a conversion between two ops."""
        return self.value in self.consumers

    @property
    def place(self) -> str:
        """The module that it belongs to."""
        return self.origin if self.is_after else self.module

    @property
    def calls(self) -> int:
        """The number of messages that it sends in a step."""
        return sum(sent.times for sent in self.sent if sent.nbytes)


@dataclass(frozen=True)
class GatheredOps:
    """Expensive ops of one kind that are not split: they run replicated, or on gathered values."""

    op: str
    line: str
    """The first op, with its module and the user's line."""
    modules: tuple[str, ...]
    count: int
    nbytes: float
    """Bytes that each rank sends per step to gather their operands."""
    weights: float
    """Bytes of the weights that every rank stores for them."""
    work: float
    """The fraction of the step's computation that every rank repeats for them."""
    why: str

    def __str__(self) -> str:
        times = f" ×{self.count}" if self.count > 1 else ""
        parts = [f"{size_text(self.weights)} of weights"] if self.weights else []
        parts += [f"{self.work:.0%} of the computation"] if self.work >= 0.01 else []
        whole = f", whole on every rank with {' and '.join(parts)}" if parts else ""
        gathered = f"{size_text(self.nbytes)} gathered per step for " if self.nbytes else ""
        return f"{gathered}{self.op}{times} ({self.line}){whole}: {self.why}"


@dataclass(frozen=True)
class Costs:
    """The costs of a plan per step, forward and backward, at the example inputs' sizes."""

    machine: str = ""
    """The machine of the estimated times."""
    compute: Mapping[str, float] = field(default_factory=dict)
    """Module -> seconds of its own ops, on the rank that has the most work."""
    collectives: tuple[Collective, ...] = ()
    gap: float = 0.0
    """Optimality gap in seconds (bytes of weights at their price): no plan within the same budget
    is better by more; 0 = proven optimal. With a memory limit: how much faster the plan without a
    limit is."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """'parameters', 'gradients', 'optimizer', 'caches', 'activations', 'peak' -> bytes per rank.

    Empty without a memory limit, unless `torchshard.plan` splits the batch.
    """
    whole: tuple[GatheredOps, ...] = ()
    """Expensive ops that run replicated or on gathered values."""
    fewer: Mapping[int, float] = field(default_factory=dict)
    """Number of ranks below the plan's -> seconds of a step with the same choices; 1: unsharded."""
    context: int | None = None
    """The longest context that fits the objective's memory, in tokens, for calls without gradients with a cache."""
    batch: int | None = None
    """The largest batch that fits the objective's memory, in calls without gradients of the example's other sizes."""
    step: float | None = None
    """Seconds of a step over all mesh axes that split the batch, without hidden communication."""
    optimizer: OptimizerName | None = None
    """The optimizer that is counted; None for calls without gradients."""
    products: float = 0.0
    """Seconds of computation that matrix products, convolutions and attention take."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """'the slowest host', 'the optimizer', 'copies of slices', 'waiting for the host' -> further seconds of a step."""

    @property
    def nbytes(self) -> float:
        """Bytes that each rank sends."""
        return sum(c.nbytes for c in self.collectives)

    @property
    def calls(self) -> tuple[int, int]:
        """The numbers of collectives that communicate forward, and backward."""
        ahead = sum(c.forward.times for c in self.collectives if c.forward.nbytes)
        return ahead, sum(c.calls for c in self.collectives) - ahead

    @property
    def kinds(self) -> Counter[str]:
        """Name -> the number of collectives of that name that send data."""
        return Counter(c.name for c in self.collectives if c.nbytes)

    @property
    def seconds(self) -> float:
        """Seconds of computation and communication, one after the other."""
        return sum(self.compute.values()) + sum(c.seconds for c in self.collectives)
