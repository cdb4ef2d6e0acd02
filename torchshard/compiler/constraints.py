"""The user's constraints on a plan, read and checked once: a dict of styles, a Plan, its JSON, or "auto"."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchshard.capture.facts import ModelFacts
from torchshard.compiler.memory import Held, memory_of_weights
from torchshard.compiler.plan_checks import check_layouts, check_ranks, check_same_model, check_same_use
from torchshard.core.errors import InputError, PlanError
from torchshard.core.layouts import SEQUENCE, I, Layout, Shard
from torchshard.core.mesh import Data, Mesh, MeshAxis
from torchshard.core.paths import outermost
from torchshard.core.units import size_text
from torchshard.planner.pins import named_modules, read_pins
from torchshard.planner.styles import Style, StyleWord, parameter_layouts
from torchshard.plans.data import AxisPlan
from torchshard.plans.objective import Aim, read_aim
from torchshard.plans.optimizers import OPTIMIZERS
from torchshard.plans.plan import Plan

PlanLike = Mapping[str, StyleWord] | Plan | str | os.PathLike[str]
"""A dict of module globs and styles, "auto" (an empty dict), a Plan, or a Plan's JSON: a path or the
text itself."""


@dataclass(frozen=True)
class Constraints:
    """The requirements for a plan, and the objective for which the best one is sought."""

    mesh: Mesh
    aim: Aim
    pins: Mapping[str, tuple[str, Style]] = field(default_factory=dict)
    """Module path -> (key of the user's dict, style)."""
    plan: AxisPlan | None = None
    """An existing plan of the mesh's last axis, instead of pins."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """Parameters and buffers with fixed layouts, by name."""
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    """The call's tensors that are split, by name."""
    left: Mapping[str, Layout] = field(default_factory=dict)
    """Layouts of the values that a call writes into its arguments, by place; only those that differ
    from the input's."""
    steady: bool = False
    """Whether the call is one of many: the tensors that it leaves came in with the same layouts."""
    recompute: tuple[str, ...] = ()
    """Modules that backward recomputes, without any that is inside another."""

    @property
    def axis(self) -> MeshAxis:
        """The axis that is planned: the mesh's last."""
        return self.mesh.last

    @property
    def is_static(self) -> bool:
        """Whether the plan is for a single batch and sequence size, and the capture has fixed sizes."""
        return self.aim.split == "all" if self.plan is None else self.plan.static

    @property
    def splits_sequence(self) -> bool:
        """Whether to split the sequence, where its length allows."""
        if self.plan is not None:
            return self.plan.splits_dynamic
        return self.aim.split == "sequence" or any(style.name == "sequence" for _, style in self.pins.values())

    @property
    def data(self) -> Data | None:
        """How ranks of the axis store weights if it splits the batch; None for an axis of the weights."""
        return self.axis.data

    @property
    def batch_parts(self) -> int:
        """The number of parts that a call's inputs are split into; 0 if each rank gets the full inputs."""
        return self.mesh.parts if any(axis.data for axis in self.mesh.axes) else 0

    @property
    def slices(self) -> int:
        """The number of slices that the other axes cut a weight's local shard into."""
        return math.prod(axis.size for axis in self.mesh.across if axis.data != "replicate")

    @property
    def keeps_gathered(self) -> bool:
        """Whether a weight gathered from these slices is kept until backward has used it."""
        return any(axis.data == "shard_grad_op" for axis in self.mesh.across)

    @property
    def divided(self) -> dict[int, int]:
        """Dims of the call's tensors that may be split in equal slices -> the number of ranks.

        To stay within a memory limit, the sequence may be split even if the user did not request
        it.
        """
        batch = self.mesh.parts_of_dims
        if self.data or SEQUENCE in batch:
            return batch
        is_limited = self.plan is None and self.aim.memory is not None and self.aim.trains
        splits_sequence = self.splits_sequence or (is_limited and not self.is_static)
        return batch | ({SEQUENCE: self.axis.size} if splits_sequence else {})

    @property
    def of_batch(self) -> list[Constraints]:
        """The constraints for each axis that splits the batch: the only axis, or all but the last."""
        if not self.mesh.across:
            return [self]
        found, neighbours = list[Constraints](), self.axis.size  # the distance between neighbours on an axis
        for axis in reversed(self.mesh.across):
            machine = self.aim.machine.across(neighbours)
            aim = replace(self.aim, machine=machine, memory=None, split="weights", recompute=())
            found.append(Constraints(Mesh((axis,)), aim))
            neighbours *= axis.size
        return found[::-1]

    def with_layouts(self, layouts: Mapping[str, Layout]) -> Constraints:
        """A copy for a model with parameters in given layouts."""
        return replace(self, layouts=layouts)

    def with_gradients(self, trains: bool) -> Constraints:
        """A copy for calls with gradients, or without."""
        return replace(self, aim=replace(self.aim, trains=trains))

    def with_inputs(self, inputs: Mapping[str, Layout], left: Mapping[str, Layout] | None = None) -> Constraints:
        """A copy for a call that takes split tensors of earlier calls, and may leave some itself."""
        return replace(self, inputs=inputs, left=left or {})

    @property
    def fixed(self) -> dict[str, Layout]:
        """The given layouts of parameters, buffers and inputs, by name."""
        planned = self.plan.inputs if self.steady and self.plan is not None else {}
        return {**planned, **self.layouts, **self.inputs}

    def first_layouts(self, facts: ModelFacts) -> dict[str, Layout]:
        """The parameters' layouts before capture, from the Plan or as plain slices by the dict."""
        if self.data:
            return _data_layouts(facts, self.data, self.axis.size)
        return parameter_layouts(facts, self.pins) if self.plan is None else dict(self.plan.parameters)


def read_constraints(facts: ModelFacts, plan: PlanLike, mesh: Mesh, aim: Aim | None = None) -> Constraints:
    """Reads a plan in any of its forms, and checks it against the model.

    Args:
        aim: by default the fastest step on a machine of the model's kind of device.

    Raises:
        InputError: the objective allows splits that are impossible on a mesh that splits the batch.
        PlanError: the plan can't be read, was made for a different number of ranks or a different
            model, it or `recompute` matches no module, or the memory is too small for any plan.
    """
    aim = aim or read_aim(device=facts.device)
    wanted, axis = read_plan(plan), mesh.last
    if axis.data and aim.split != "weights":
        raise InputError(
            "the ranks divide the batch, and nothing else",
            where=f"split {aim.split!r} of an objective, on ranks that hold {axis.data!r}",
            why="there is one axis of ranks",
            attempt="the objective without split",
        )
    if aim.split != "weights" and SEQUENCE in mesh.parts_of_dims:
        raise InputError(
            "the sequence is split over an axis of its own",
            where=f"split {aim.split!r} of an objective",
            why="the ranks of the last axis can't split it too",
            attempt="the objective without split; or a mesh without an axis that holds 'sequence'",
        )
    if any(each.data for each in mesh.axes):
        check_same_use(wanted, axis)
    check_ranks(facts, axis, wanted)
    if isinstance(wanted, Plan):
        check_same_model(facts, wanted)
        check_layouts(facts, wanted.parameters)
        given = wanted.last
        if mesh.axes == (axis,):  # a plan for a single axis decides whether the batch or the weights are split
            mesh = Mesh((replace(axis, holds=given.axis.holds),))
        return Constraints(mesh, aim, plan=given, recompute=_recomputed(facts, [*given.recompute, *aim.recompute]))
    found = Constraints(mesh, aim, read_pins(wanted, facts.modules), recompute=_recomputed(facts, aim.recompute))
    check_memory(facts, found)
    return found


def _recomputed(facts: ModelFacts, globs: Sequence[str]) -> tuple[str, ...]:
    return outermost(named_modules(globs, facts.modules))


def loaded(plan: str | os.PathLike[str]) -> Plan:
    """A Plan from its JSON, or from the path of a JSON file.

    Raises:
        PlanError: it can't be read.
    """
    is_text = isinstance(plan, str) and plan.lstrip().startswith("{")
    return Plan.from_json(str(plan)) if is_text else Plan.load(plan)


def read_plan(plan: PlanLike) -> Mapping[str, object] | Plan:
    """A plan in any of its forms, as a dict of styles or a Plan.

    Raises:
        PlanError: it can't be read.
    """
    if isinstance(plan, str) and plan == "auto":
        return {}
    if isinstance(plan, (str, os.PathLike)):
        plan = loaded(plan)
    if not isinstance(plan, (Plan, Mapping)):
        raise PlanError(
            f"a {type(plan).__name__} is no plan",
            where="the plan",
            why=f"got {plan!r:.80}",
            attempt="a dict of module globs and styles, a Plan, or the path of a Plan's JSON",
        )
    return plan


def _data_layouts(facts: ModelFacts, data: Data, ranks: int) -> dict[str, Layout]:
    """The layouts of parameters and buffers between calls, on ranks that split the batch.

    Weights are sliced along the first dim, as in FSDP2. Vectors stay replicated, as small tensors
    do in DeepSpeed's ZeRO-3 (`stage3_param_persistence_threshold`), and their gradients are summed
    together.
    """
    return {
        name: Shard(0) if data != "replicate" and t.is_parameter and len(t.shape) > 1 and t.shape[0] >= ranks else I
        for name, t in facts.tensors.items()
    }


def check_memory(facts: ModelFacts, constraints: Constraints) -> None:
    """Refuses constraints that cannot be met, before the model is captured.

    Raises:
        PlanError: even an equal share of the parameters, gradients and optimizer states exceeds the
            memory limit.
    """
    axis, aim = constraints.axis, constraints.aim
    memory, parts = aim.memory, constraints.slices * (1 if constraints.data == "replicate" else axis.size)
    if memory is None:
        return
    held = [Held(t.nbytes, t.itemsize, t.is_trained and aim.trains) for t in facts.tensors.values() if t.is_parameter]
    whole = memory_of_weights(held, OPTIMIZERS[aim.optimizer])
    shares = {name: size / parts for name, size in whole.items()}
    estimate = shares | {"peak": sum(shares.values())}
    if estimate["peak"] > memory:
        ranks = constraints.mesh.size
        which = f"an even share of {', '.join(name for name, size in whole.items() if size)}"
        attempt = f"{more_slices(constraints)}, or weights of fewer bytes"
        raise does_not_fit(f"no plan for {ranks} ranks fits", which, estimate, memory, attempt)


def more_slices(constraints: Constraints) -> str:
    """Names the change that makes a rank's slices of weights smaller."""
    copies = any(axis.data == "replicate" for axis in constraints.mesh.axes)
    return 'mesh= with "shard" for the ranks of the batch' if copies else "more ranks"


def does_not_fit(what: str, which: str, memory: Mapping[str, float], most: float, attempt: str) -> PlanError:
    """The error for a plan that exceeds the memory limit."""
    shown = ", ".join(f"{name} {size_text(size)}" for name, size in memory.items() if name != "peak")
    peak = memory["peak"]
    return PlanError(
        f"{what} {size_text(most)}: {which} takes {size_text(peak)}, {size_text(peak - most)} too much",
        where="memory=",
        why=f"per rank: {shown}",
        attempt=attempt,
    )
