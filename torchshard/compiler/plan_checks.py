"""Checks that a given plan fits: the model, the number of ranks, and the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchshard.capture.facts import ModelFacts
from torchshard.core.errors import PlanError
from torchshard.core.layouts import INPUT_DIMS, I, Layout, Shard, parts_of, parts_size
from torchshard.core.mesh import MeshAxis
from torchshard.plans.data import Stored
from torchshard.plans.plan import Plan


def check_same_use(plan: Mapping[str, object] | Plan, axis: MeshAxis) -> None:
    """Refuses a plan of an axis with another use, and a dict of styles if the axis splits a call's inputs.

    Raises:
        PlanError: the plan does not fit the axis.
    """
    if isinstance(plan, Plan) and plan.last.holds != axis.holds:
        raise PlanError(
            "the plan divides something else than it is asked for",
            where="the plan",
            why=f"it was made for an axis that holds {plan.last.axis.holds!r}; here it holds {axis.holds!r}",
            attempt=f"a plan made for this mesh; or mesh={plan.world_size}, which divides as the plan does",
        )
    if not isinstance(plan, Plan) and plan and axis.data:
        raise PlanError(
            f"the ranks divide the {INPUT_DIMS[axis.dim]}, and the plan splits weights",
            where=f"plan key {next(iter(plan))!r}",
            why=f"the ranks hold {axis.holds!r}: one axis of ranks is for one of the two",
            attempt="the plan {}, or a mesh with an axis for the weights",
        )


def check_ranks(facts: ModelFacts, axis: MeshAxis, plan: Mapping[str, object] | Plan) -> None:
    if isinstance(plan, Plan) and plan.world_size != axis.size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, the group has {axis.size}",
            where="Plan.world_size",
            why="slices of parameters and collectives are planned for one number of ranks",
            attempt=f"a plan made with mesh={axis.size}, or {plan.world_size} ranks",
        )
    sizes = {size: name for name, t in facts.tensors.items() if t.is_parameter for size in t.shape}
    if sizes and axis.size > max(sizes) and axis.data is None:
        raise PlanError(
            f"{axis.size} ranks are more than any dim has elements",
            where=f"parameter {sizes[max(sizes)]!r}",
            why=f"its dim of {max(sizes)} is the largest: some ranks would hold nothing of anything",
            attempt=f"{max(sizes)} ranks or fewer",
        )


def stored(facts: ModelFacts) -> dict[str, Stored]:
    """The stored shape of each parameter and buffer, for a Plan."""
    return {name: Stored(t.shape, t.itemsize, t.module, t.names[1:]) for name, t in facts.tensors.items()}


def check_same_model(facts: ModelFacts, plan: Plan) -> None:
    if not plan.fingerprint or plan.fingerprint == facts.signature:
        return
    ours, theirs = stored(facts), plan.stored
    name = next((n for n in sorted(ours.keys() | theirs.keys()) if _shape(ours, n) != _shape(theirs, n)), "?")
    raise PlanError(
        "the plan was made for another model",
        where=f"parameter {name!r}",
        why=f"it has shape {_shape(ours, name)} here, and {_shape(theirs, name)} in the plan's model",
        attempt="make a new plan for this model",
    )


def _shape(tensors: Mapping[str, Stored], name: str) -> object:
    return tensors[name].shape if name in tensors else "(there is none)"


def check_layouts(facts: ModelFacts, layouts: Mapping[str, Layout]) -> None:
    """Checks that layouts fit their parameters and buffers.

    Raises:
        PlanError: a name is unknown, or a layout splits a dim that is missing or of another size.
    """
    shapes = {name: tensor.shape for name, tensor in facts.tensors.items()}
    split = {name: layout for name, layout in layouts.items() if layout != I}
    strangers = sorted(split.keys() - shapes.keys())
    if strangers:
        raise PlanError(
            f"the plan splits {len(strangers)} parameters that the model does not have",
            where=f"parameter {strangers[0]!r}",
            why="the plan was made for another model",
            attempt="make a new plan for this model",
        )
    for name, layout in split.items():
        if not _divides(layout, shapes[name]):
            raise PlanError(
                f"the plan's layout {layout} does not fit a parameter",
                where=f"parameter {name!r}",
                why=f"it has shape {tuple(shapes[name])}; the plan was made for another model",
                attempt="make a new plan for this model",
            )


def _divides(layout: Layout, shape: Sequence[int]) -> bool:
    if not isinstance(layout, Shard) or layout.dim >= len(shape):
        return False
    return parts_size(parts_of(shape[layout.dim], layout)) == shape[layout.dim]
