"""The data of a Plan: layouts, choices and costs; tables, JSON and exports are made from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from torch import fx

from torchshard.core.conversions import Steps
from torchshard.core.layouts import I, Layout, is_whole
from torchshard.core.mesh import Data, Holds, MeshAxis
from torchshard.core.notation import Choice
from torchshard.core.sharding import Cut, Cuts, Sharding, local_shape, split_text
from torchshard.core.units import size_text
from torchshard.plans.machine import Machine


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
class Stored:
    """A parameter or buffer of the unsharded model."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element."""
    module: str = ""
    """The class of its module: 'Linear', 'Embedding'."""
    tied: tuple[str, ...] = ()
    """The tensor's other names."""

    def nbytes(self, cuts: Cuts = ()) -> int:
        """Returns the bytes of the full tensor, or of the slice that the cuts give."""
        return math.prod(local_shape(self.shape, cuts)) * self.itemsize


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
    step: float | None = None
    """Seconds of a step over all mesh axes that split the batch, without hidden communication."""

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


class Source(Protocol):
    """The origin of a plan: the program of a model (`compiler.program`), or a plan's file."""

    @property
    def graph(self) -> fx.GraphModule | None:
        """The graph with its collectives, if any."""

    def question(self) -> Mapping[str, object]:
        """Returns the call, the model and the constraints that the plan answers, as data for JSON."""


@dataclass(frozen=True)
class Written:
    """The question of a plan from a file; `compiler.what_if.program_of` plans it again."""

    body: Mapping[str, object]
    graph: None = None

    def question(self) -> Mapping[str, object]:
        """Returns the call, the model and the constraints that the plan answers, as data for JSON."""
        return self.body


@dataclass(frozen=True)
class AxisPlan:
    """One choice per op and one layout per parameter, over one axis of a mesh."""

    axis: MeshAxis
    parameters: Mapping[str, Layout]
    """The layout of each parameter and buffer, by its name in the model."""
    choices: Mapping[str, Choice]
    """The choice of each op, by the node's name."""
    conversions: Mapping[str, Steps] = field(default_factory=dict)
    """The conversions of each value that is required in other layouts than its own, by node name."""
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    """The layout of each carried tensor, left in an argument by an earlier call, by its place there."""
    costs: Costs = field(default_factory=Costs, compare=False)
    machine: Machine = field(default=Machine(), compare=False)
    """The machine that the plan was optimised for."""
    static: bool = False
    """Whether inputs must have the example inputs' sizes, so batch or sequence may be split."""
    recompute: tuple[str, ...] = ()
    """The modules with values that backward recomputes instead of keeping; none is inside another."""
    holds: Holds = field(init=False, repr=False)
    """The field `holds` of the axis, repeated because plans compare by it and axes do not."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", self.axis.holds)

    @property
    def world_size(self) -> int:
        """The number of ranks along the axis."""
        return self.axis.size

    @property
    def data(self) -> Data | None:
        """How the ranks store weights if they split the batch; None if they split the weights."""
        return self.axis.data

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of parameters, buffers and carried tensors."""
        return {**self.parameters, **self.inputs}

    @property
    def held(self) -> dict[str, Layout]:
        """The layouts of parameters, buffers and, if the ranks split the batch, carried tensors."""
        return self.layouts if self.data else dict(self.parameters)

    @property
    def splits_dynamic(self) -> bool:
        """Whether it splits a dynamic size into equal slices, so calls need divisible sizes."""
        return any(choice.splits_dynamic for choice in self.choices.values())


@dataclass(frozen=True)
class PlanData:
    """The plans of all mesh axes."""

    axes: tuple[AxisPlan, ...]
    """One plan per axis, outermost first. All but the last split the batch. `parameters`, `choices`
    and similar properties here are those of the last axis."""
    stored: Mapping[str, Stored] = field(default_factory=dict, compare=False)
    """The shape of each parameter and buffer."""
    fingerprint: str = field(default="", compare=False)
    """A signature of the model: the names and shapes of its parameters and buffers."""
    title: str = field(default="", compare=False)
    """The class of the model and the sizes of the call: 'GPT2LMHeadModel, batch 2, length 128'."""
    source: Source | None = field(default=None, compare=False, repr=False)
    """The origin of the plan; None for a file written without it."""

    @property
    def last(self) -> AxisPlan:
        """The plan of the last axis: the one that splits the weights, if any does."""
        return self.axes[-1]

    @property
    def across(self) -> tuple[AxisPlan, ...]:
        """The plans of all axes except the last; they split the batch."""
        return self.axes[:-1]

    @property
    def in_order(self) -> tuple[AxisPlan, ...]:
        """The plans in the order in which the graph is split over axes: the last, then the others."""
        return (self.last, *self.across)

    def with_last(self, **fields: Any) -> Self:
        """Returns the plan with other fields of its last axis, such as `parameters` or `costs`."""
        return replace(self, axes=(*self.across, replace(self.last, **fields)))

    @property
    def world_size(self) -> int:
        """The number of ranks along the last axis."""
        return self.last.world_size

    @property
    def parameters(self) -> Mapping[str, Layout]:
        """The layout of each parameter and buffer over the last axis, by its name in the model."""
        return self.last.parameters

    @property
    def choices(self) -> Mapping[str, Choice]:
        """The choice of each op over the last axis, by the node's name."""
        return self.last.choices

    @property
    def conversions(self) -> Mapping[str, Steps]:
        """The conversions of values over the last axis, by the node's name."""
        return self.last.conversions

    @property
    def inputs(self) -> Mapping[str, Layout]:
        """The layout of each carried tensor, left in an argument by an earlier call, by place."""
        return self.last.inputs

    @property
    def splits_dynamic(self) -> bool:
        """Whether it splits a dynamic size over the last axis, so calls need divisible sizes."""
        return self.last.splits_dynamic

    @property
    def costs(self) -> Costs:
        """The costs of the last axis' plan."""
        return self.last.costs

    @property
    def machine(self) -> Machine:
        """The machine that the plan was optimised for."""
        return self.last.machine

    @property
    def recompute(self) -> tuple[str, ...]:
        """The modules with values that backward recomputes."""
        return self.last.recompute

    @property
    def static(self) -> bool:
        """Whether inputs must have exactly the example inputs' sizes."""
        return self.last.static

    @property
    def graph(self) -> fx.GraphModule | None:
        """The graph with its collectives over the last axis; None for a plan that was loaded."""
        return None if self.source is None else self.source.graph

    @property
    def step_seconds(self) -> dict[str, float]:
        """The seconds of a step by cause, over all mesh axes: computation, then collectives."""
        sent = [sum(c.seconds for c in each.costs.collectives) for each in self.in_order]
        over_weights = 0.0 if self.last.data else sent.pop(0)
        computation, waits = sum(self.costs.compute.values()), sum(sent)
        if self.costs.step is not None:
            waits = self.costs.step - computation - over_weights
        return {
            "computation": computation,
            "collectives over the weights' axis": over_weights,
            "collectives over the batch's axes": waits,
        }

    @property
    def hidden_seconds(self) -> float:
        """The seconds of a step that computation and collectives over the batch's axes overlap."""
        sent = sum(c.seconds for each in self.axes if each.data for c in each.costs.collectives)
        return sent - self.step_seconds["collectives over the batch's axes"]

    @property
    def step_memory(self) -> Mapping[str, float]:
        """The bytes of a step on a rank, by kind, as in `Costs.memory`."""
        return self.in_order[-1].costs.memory

    def held_text(self, name: str) -> str:
        """Returns the shape and sharding of a parameter or buffer: '[4096@tp@dp,64]'."""
        stored = self.stored.get(name)
        held = Sharding.of(*((each.axis, each.parameters.get(name, I)) for each in self.in_order))
        return held.text if stored is None else split_text(stored.shape, held)

    def cuts(self, name: str, place: Sequence[int] = ()) -> Cuts:
        """Returns the cuts that give a rank's slice of a parameter or buffer.

        Args:
            place: the rank's numbers on the axes, in the order of `in_order`; by default the first
                rank's, which has the largest slices.
        """
        ranks = place or [0] * len(self.axes)
        plans = zip(self.in_order, ranks, strict=True)
        return tuple(Cut(each.parameters.get(name, I), rank, each.world_size) for each, rank in plans)

    def parameter_bytes(self) -> tuple[int, int]:
        """Returns the bytes of parameters and buffers: unsharded, and on the rank with the most."""
        held = sum(stored.nbytes(self.cuts(name)) for name, stored in self.stored.items())
        return sum(stored.nbytes() for stored in self.stored.values()), held
