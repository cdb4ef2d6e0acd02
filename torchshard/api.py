"""What a user calls: `shard`, `plan`. The story on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchshard.distributed.groups import MODEL, init_process_group, is_initialized, lookup
from torchshard.errors import PlanError
from torchshard.module import ShardedModule
from torchshard.planner.plan import Plan
from torchshard.program import PlanLike, check_examples, check_world_size, program


def shard(
    model: nn.Module,
    plan: PlanLike,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> ShardedModule:
    """Splits a model over the ranks of this process's model-parallel group.

    Args:
        model: an ordinary, unsharded module, the same on every rank; it is left as it is.
        plan: "auto"; a dict of module globs and styles (`{"*.q_proj": "column", "*.o_proj": "row"}`), which pins what
            it names and leaves the rest to the search; a `Plan`, or the path of a Plan's JSON.
        example_inputs, example_kwargs: what the model will be called with, for the first capture; meta or fake tensors
            will do. Without them the parameters are split now and the graph is captured at the first call.

    Returns:
        a module with the same `forward`, the same parameter names, and this rank's slices of the parameters.

    Raises:
        PlanError: the plan does not fit the model or the number of ranks, or is "auto" without example inputs.
        CaptureError: the model can't be captured as a graph.
        InputError: the example inputs are not what `forward` takes, or are on another device than the model.
        DistributedError: the ranks hold different models.
    """
    check_examples(example_inputs, example_kwargs)
    if isinstance(plan, str) and plan == "auto" and example_inputs is None and example_kwargs is None:
        raise PlanError(
            'plan="auto" needs example_inputs',
            where="shard",
            why="what is split where is found by looking at what a call computes",
            attempt="example_inputs=(x,) or example_kwargs={...}; tensors on the meta device will do",
        )
    if not is_initialized():
        init_process_group()
    made = ShardedModule(model, plan, lookup(MODEL))
    if example_inputs is not None or example_kwargs is not None:
        made.warm_up(tuple(example_inputs or ()), dict(example_kwargs or {}))
    return made


def plan(
    model: nn.Module,
    plan: PlanLike,
    *,
    world_size: int,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
) -> Plan:
    """The Plan for any number of ranks, on any machine, with no process group; a model on the meta device will do.

    Raises:
        PlanError, CaptureError, InputError: as `shard`.
    """
    check_world_size(world_size)
    check_examples(example_inputs, example_kwargs)
    return program(model, plan, world_size, tuple(example_inputs), example_kwargs).plan
