"""The data of a Plan: layouts and choices over each mesh axis, with their costs. Tables, JSON and exports show it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from torch import fx

from torchshard.core.conversions import Steps
from torchshard.core.layouts import I, Layout
from torchshard.core.mesh import Data, Holds, MeshAxis
from torchshard.core.rows import Choice
from torchshard.core.sharding import Cut, Cuts, Sharding, local_shape, split_text
from torchshard.plans.costs import Costs
from torchshard.plans.machine import Machine
from torchshard.plans.optimizers import OPTIMIZERS, Optimizer


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
    """The conversions of each value that is required in layouts other than its own, by node name."""
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
    def optimizer(self) -> Optimizer:
        """What updates the parameters."""
        return OPTIMIZERS[self.costs.optimizer or "sgd"]

    @property
    def step_seconds(self) -> dict[str, float]:
        """The seconds of a step by cause, over all mesh axes: computation, collectives, and what is beside these."""
        sent = [sum(c.seconds for c in each.costs.collectives) for each in self.in_order]
        over_weights = 0.0 if self.last.data else sent.pop(0)
        computation, products, waits = sum(self.costs.compute.values()), self.costs.products, sum(sent)
        if self.costs.step is not None:
            waits = self.costs.step - computation - over_weights
        return {
            "products": products,
            "other ops": max(computation - products, 0.0),
            "collectives over the weights' axis": over_weights,
            "collectives over the batch's axes": waits,
            **self.costs.beside,
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
