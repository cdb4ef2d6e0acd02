"""The data of a Plan: layouts, choices and costs. Its forms (table, JSON, other libraries' words) read it from here."""

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
from torchshard.plans.machine import Machine, size_text


@dataclass(frozen=True)
class Sent:
    """Bytes and seconds of a collective, on the rank that sends most where slices differ."""

    kernel: str
    """'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', or 'none'."""
    nbytes: float
    seconds: float
    times: int = 1
    """How many messages these are; 0 for what goes with another one."""
    hidden: float = 0.0
    """Further seconds that it is on its way, while the rank computes what does not need it."""

    @property
    def message(self) -> str:
        """The kernel as it is printed: 'all-reduce'."""
        return self.kernel.replace("_", "-")

    def often(self, times: int) -> Sent:
        """The sum of so many of them."""
        more = {name: getattr(self, name) * times for name in ("nbytes", "seconds", "times", "hidden")}
        return replace(self, **more)


@dataclass(frozen=True)
class Collective:
    """A conversion of a value, or a collective within a split op."""

    value: str
    """The node whose value is converted."""
    name: str
    """'copy', 'reduce', ...: its row of the table of conversions."""
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
    """dtype and shape of the value, and how the ranks hold it before: 'f32[2,8,16@tp]'."""
    into: str
    """And after: 'f32[2,8,16]'."""
    forward: Sent
    backward: Sent
    again: Sent
    """The same as forward, where backward runs it again; else nothing."""

    @property
    def sent(self) -> tuple[Sent, ...]:
        """What it sends in a step: forward, again in the backward, and as its own backward."""
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
        """Whether it stands after the module that produces the value, and not before the one that consumes it."""
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
        """How many messages it sends in a step."""
        return sum(sent.times for sent in self.sent if sent.nbytes)


@dataclass(frozen=True)
class GatheredOps:
    """Expensive ops of one kind that are not split: they run whole on every rank, or have split values gathered."""

    op: str
    line: str
    """The first of them, with its module and the user's line."""
    modules: tuple[str, ...]
    count: int
    nbytes: float
    """Bytes that each rank sends per step to gather their operands."""
    weights: float
    """Bytes of weights that every rank holds for them."""
    work: float
    """The part of the step's computation that every rank repeats for them."""
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
    """The class of the module that it belongs to: 'Linear', 'Embedding'."""
    tied: tuple[str, ...] = ()
    """The other names of the same tensor."""

    def nbytes(self, cuts: Cuts = ()) -> int:
        """Bytes of the whole, or of what is cut out of it."""
        return math.prod(local_shape(self.shape, cuts)) * self.itemsize


@dataclass(frozen=True)
class Costs:
    """What a plan costs per step, forward and backward, at the example inputs' sizes."""

    machine: str = ""
    """The machine that the times are estimated for."""
    compute: Mapping[str, float] = field(default_factory=dict)
    """Module -> seconds of its own ops, on the rank that has the most work."""
    collectives: tuple[Collective, ...] = ()
    gap: float = 0.0
    """Optimality gap in seconds (bytes of weights at their price): no plan within the same budget is better by more;
    0 = proven optimal. Under a limit of memory: how much faster the plan without a limit is."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """'parameters', 'gradients', 'optimizer', 'caches', 'activations', 'peak' -> bytes per rank, with `memory=`."""
    whole: tuple[GatheredOps, ...] = ()
    """Expensive ops that run whole, and ops that values are gathered for."""
    fewer: Mapping[int, float] = field(default_factory=dict)
    """Number of ranks, fewer than the plan's -> seconds of a step with the same choices; 1: the whole model."""
    context: int | None = None
    """The longest context that fits `memory=`, in tokens, for calls without gradients that leave more each time."""
    step: float | None = None
    """Seconds of a step over all axes of a mesh that divide the batch, without what computation hides of it."""

    @property
    def nbytes(self) -> float:
        """Bytes that each rank sends."""
        return sum(c.nbytes for c in self.collectives)

    @property
    def calls(self) -> tuple[int, int]:
        """How many collectives communicate forward, and backward."""
        ahead = sum(c.forward.times for c in self.collectives if c.forward.nbytes)
        return ahead, sum(c.calls for c in self.collectives) - ahead

    @property
    def kinds(self) -> Counter[str]:
        """Name -> how many collectives of that name send something."""
        return Counter(c.name for c in self.collectives if c.nbytes)

    @property
    def seconds(self) -> float:
        """Seconds, computation and communication one after the other."""
        return sum(self.compute.values()) + sum(c.seconds for c in self.collectives)


class Source(Protocol):
    """What a plan was made from: the program of a model (`compiler.program`), or what a plan's file holds."""

    @property
    def graph(self) -> fx.GraphModule | None:
        """The graph with its collectives, if there is one."""

    def question(self) -> Mapping[str, object]:
        """The call, the model and the constraints that the plan answers, as data that JSON can hold."""


@dataclass(frozen=True)
class Written:
    """The question of a plan that was read from a file; `compiler.what_if.program_of` plans it again."""

    body: Mapping[str, object]
    graph: None = None

    def question(self) -> Mapping[str, object]:
        """As `Source`."""
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
    """The conversions of each value that is required in another layout than it is produced in, by the node's name."""
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    """The layout of each tensor that earlier calls have left in the arguments, by its place there."""
    costs: Costs = field(default_factory=Costs, compare=False)
    machine: Machine = field(default=Machine(), compare=False)
    """The machine that it was optimised for."""
    static: bool = False
    """Whether it is for inputs of exactly the example inputs' sizes, so that batch or sequence may be split."""
    recompute: tuple[str, ...] = ()
    """The modules whose values backward computes again, in place of keeping them; none of them within another."""
    holds: Holds = field(init=False, repr=False)
    """That of the axis; a field, because equal axes may hold different things and equal plans may not."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", self.axis.holds)

    @property
    def world_size(self) -> int:
        """The number of ranks along the axis."""
        return self.axis.size

    @property
    def data(self) -> Data | None:
        """How the ranks hold weights if they divide the batch; None: they divide the weights."""
        return self.axis.data

    @property
    def layouts(self) -> dict[str, Layout]:
        """Those of parameters, buffers and inputs."""
        return {**self.parameters, **self.inputs}

    @property
    def held(self) -> dict[str, Layout]:
        """The layouts of parameters, buffers and the call's tensors of which each rank passes a part of the batch."""
        return self.layouts if self.data else dict(self.parameters)

    @property
    def splits_dynamic(self) -> bool:
        """Whether it splits a dynamic size, in equal slices: it is for calls whose sizes divide."""
        return any(choice.splits_dynamic for choice in self.choices.values())


@dataclass(frozen=True)
class PlanData:
    """The plans of all axes of a mesh."""

    axes: tuple[AxisPlan, ...]
    """One for each axis, outermost first. All but the last divide the batch; `parameters`, `choices` and others of this
    plan are those of the last."""
    stored: Mapping[str, Stored] = field(default_factory=dict, compare=False)
    """The shape of each parameter and buffer."""
    fingerprint: str = field(default="", compare=False)
    """The signature of the model that it was made for: of names and shapes of parameters and buffers."""
    title: str = field(default="", compare=False)
    """The class of the model and the sizes of the call that it was made for: 'GPT2LMHeadModel, batch 2, length 128'."""
    source: Source | None = field(default=None, compare=False, repr=False)
    """What it was made from; None for a file that was written without."""

    @property
    def last(self) -> AxisPlan:
        """The plan of the last axis: the one that divides the weights, if one does."""
        return self.axes[-1]

    @property
    def across(self) -> tuple[AxisPlan, ...]:
        """The plans of the axes beside the last, which divide the batch."""
        return self.axes[:-1]

    @property
    def in_order(self) -> tuple[AxisPlan, ...]:
        """The plans in the order in which the graph is split over their axes: the last, then the others."""
        return (self.last, *self.across)

    def with_last(self, **fields: Any) -> Self:
        """The plan with other fields of its last axis, such as `parameters` or `costs`."""
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
        """The layout of each tensor that earlier calls have left in the arguments, by its place there."""
        return self.last.inputs

    @property
    def splits_dynamic(self) -> bool:
        """Whether it splits a dynamic size over the last axis: it is for calls whose sizes divide."""
        return self.last.splits_dynamic

    @property
    def costs(self) -> Costs:
        """What the last axis' plan costs."""
        return self.last.costs

    @property
    def machine(self) -> Machine:
        """The machine that it was optimised for."""
        return self.last.machine

    @property
    def recompute(self) -> tuple[str, ...]:
        """The modules whose values backward computes again."""
        return self.last.recompute

    @property
    def static(self) -> bool:
        """Whether it is for inputs of exactly the example inputs' sizes."""
        return self.last.static

    @property
    def graph(self) -> fx.GraphModule | None:
        """The graph with its collectives over the last axis; None for a plan that was loaded."""
        return None if self.source is None else self.source.graph

    @property
    def step_seconds(self) -> dict[str, float]:
        """The seconds of a step by cause, communication after computation, over all axes of the mesh."""
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
        """The seconds of a step in which a rank computes while the axes of the batch send."""
        sent = sum(c.seconds for each in self.axes if each.data for c in each.costs.collectives)
        return sent - self.step_seconds["collectives over the batch's axes"]

    @property
    def step_memory(self) -> Mapping[str, float]:
        """The bytes that a step takes on a rank, by kind, if they were asked for."""
        return self.in_order[-1].costs.memory

    def held_text(self, name: str) -> str:
        """How the ranks hold a parameter or buffer: '[4096@tp@dp,64]'."""
        stored = self.stored.get(name)
        held = Sharding.of(*((each.axis, each.parameters.get(name, I)) for each in self.in_order))
        return held.text if stored is None else split_text(stored.shape, held)

    def cuts(self, name: str, place: Sequence[int] = ()) -> Cuts:
        """How a rank's slice of a parameter or buffer is cut out.

        Args:
            place: the rank's numbers on the axes, in the order of `in_order`; those of the first rank, which holds the
                most, if none.
        """
        ranks = place or [0] * len(self.axes)
        plans = zip(self.in_order, ranks, strict=True)
        return tuple(Cut(each.parameters.get(name, I), rank, each.world_size) for each, rank in plans)

    def parameter_bytes(self) -> tuple[int, int]:
        """Bytes of the parameters and buffers: of the unsharded model, and on the rank that holds the most."""
        held = sum(stored.nbytes(self.cuts(name)) for name, stored in self.stored.items())
        return sum(stored.nbytes() for stored in self.stored.values()), held
