"""The check on real ranks: processes of this machine that send through gloo, beside the unsharded model in this one.

Each rank makes the model anew, from the same seed, and brings back what it holds; all is compared as `check` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchshard.capture import flatten, flatten_call
from torchshard.checking.check import Report, in_dtype, tolerance_of
from torchshard.checking.compare import Place, Results, compare
from torchshard.checking.steps import Trial, backward, leaf, unsharded
from torchshard.compiler.constraints import PlanLike
from torchshard.compiler.program import prepared
from torchshard.core.layouts import Layout
from torchshard.core.mesh import MODEL
from torchshard.distributed.group import lookup
from torchshard.distributed.launch import launch
from torchshard.distributed.process_groups import init_process_group
from torchshard.plans.machine import Objective
from torchshard.runtime.module import ShardedModule

Made = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any] | None]
"""A model, and what it is called with."""


@dataclass(frozen=True)
class Pieces:
    """What one rank holds after a step: (value, gradient) by name, and the results."""

    outputs: list[Any]
    state: dict[str, tuple[Tensor, Tensor | None]]
    inputs: dict[str, tuple[Tensor, Tensor | None]]
    layouts: dict[str, Layout]
    tolerance: float
    """What counts as equal."""


@dataclass(frozen=True)
class _Gathered:
    """The pieces of all ranks, as `compare` reads them."""

    outputs: list[list[Any]]
    states: list[dict[str, Tensor]]
    inputs: list[dict[str, Tensor]]


def check_processes(
    make: Callable[..., Made], given: tuple[Any, ...], plan: PlanLike, world_size: int, aim: Objective
) -> Report:
    """The report for real ranks.

    Args:
        make: gives the model and its inputs from `given`; a function that processes can import.

    Raises:
        what `torchshard.shard` raises; DistributedError: a rank died.
    """
    held, args, kwargs = _prepared(make, given)
    call = flatten_call(held, args, kwargs or {})
    torch.manual_seed(0)
    seed = torch.get_rng_state()
    expected = unsharded(held, call)

    def noise() -> Mapping[Place, float]:
        captured = prepared(held, args, kwargs)
        trial = Trial(held, captured, replace(call, names=captured.inputs), seed)
        return trial.noise(expected.output_names)

    return report_of(expected, launch(_pieces, world_size, (make, given, plan, aim)), noise)


def report_of(expected: Results, ranks: Sequence[Pieces], noise: Callable[[], Mapping[Place, float]] = dict) -> Report:
    """What the ranks hold, beside what `steps.unsharded` gave."""
    states = [{name: _leaf_of(*pair) for name, pair in rank.state.items()} for rank in ranks]
    inputs = [{name: _leaf_of(*pair) for name, pair in rank.inputs.items()} for rank in ranks]
    got = _Gathered([rank.outputs for rank in ranks], states, inputs)
    layouts, tolerance = ranks[0].layouts, ranks[0].tolerance
    return Report(len(ranks), tolerance, compare(expected, got, layouts, tolerance, noise))


def _prepared(make: Callable[..., Made], given: tuple[Any, ...]) -> Made:
    torch.manual_seed(0)
    model, args, kwargs = make(*given)
    return in_dtype(model, args, kwargs or {}, torch.float64)


def _pieces(make: Callable[..., Made], given: tuple[Any, ...], plan: PlanLike, aim: Objective) -> Pieces:
    """Runs on each rank."""
    init_process_group()
    model, args, kwargs = _prepared(make, given)
    sharded = ShardedModule(model, plan, lookup(MODEL), aim)
    call = flatten_call(model, args, kwargs or {})
    inputs = {name: leaf(t) for name, t in zip(call.names, call.tensors, strict=True)}
    call_args, call_kwargs = call.rebuild(list(inputs.values()))
    torch.manual_seed(0)
    results = list(flatten(sharded(*call_args, **call_kwargs)).tensors)
    backward(results, 1)
    state = dict((*sharded.named_parameters(), *sharded.named_buffers()))
    return pieces(results, state, inputs, sharded.plan.parameters, sharded.graph)


def pieces(
    results: Sequence[Any],
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Any],
    layouts: Mapping[str, Layout],
    graph: fx.GraphModule,
) -> Pieces:
    """What a rank holds after its backward of a graph."""
    return Pieces(
        [_detached(r) for r in results],
        {name: (_detached(t), t.grad) for name, t in state.items()},
        {name: (_detached(t), t.grad) for name, t in inputs.items() if isinstance(t, Tensor)},
        dict(layouts),
        tolerance_of(graph),
    )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _leaf_of(value: Tensor, grad: Tensor | None) -> Tensor:
    if value.is_floating_point() or value.is_complex():
        value.requires_grad_(True)
        value.grad = grad
    return value
