"""Runs the check on real ranks: processes of this machine that communicate.

Each rank builds the model from the same seed, runs a step, and returns its tensors. This process
runs the unsharded model and compares the tensors as `check` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from torchshard.capture import flatten, flatten_call
from torchshard.checking.check import in_dtype, tolerance_of
from torchshard.checking.compare import Results, UnshardedStep, compare
from torchshard.checking.report import Report
from torchshard.checking.steps import backward, leaf, unsharded
from torchshard.checking.trials import Trial
from torchshard.compiler.constraints import PlanLike
from torchshard.compiler.prepare import prepared
from torchshard.core.layouts import Layout
from torchshard.core.mesh import MODEL, Mesh, MeshAxis
from torchshard.core.rng_states import rng_states
from torchshard.core.sharding import Sharding
from torchshard.distributed.group import lookup
from torchshard.distributed.launch import launch
from torchshard.distributed.process_groups import init_process_group
from torchshard.distributed.ranks import Ranks
from torchshard.ir.graph import is_float
from torchshard.plans.objective import Aim
from torchshard.runtime.module import ShardedModule

ModelCall = tuple[nn.Module, Sequence[object], Mapping[str, object] | None]
"""A model, and the arguments and keyword arguments of a call of it."""


class Leaf(NamedTuple):
    """A tensor of a rank, as it travels between processes."""

    value: Tensor
    grad: Tensor | None


@dataclass(frozen=True)
class Pieces:
    """One rank's tensors after a step, by name."""

    outputs: list[object]
    state: dict[str, Leaf]
    inputs: dict[str, Leaf]
    shardings: dict[str, Sharding]
    tolerance: float
    """The largest error that counts as equal."""


@dataclass(frozen=True)
class _Gathered:
    """The pieces of all ranks, as `compare` reads them."""

    outputs: list[list[object]]
    states: list[dict[str, Tensor]]
    inputs: list[dict[str, Tensor]]
    mesh: Mesh
    output_shardings: tuple[Sharding, ...] = ()


def check_processes(
    make: Callable[..., ModelCall], make_args: tuple[object, ...], plan: PlanLike, world_size: int, aim: Aim
) -> Report:
    """Compares a step of real ranks with the unsharded model's.

    Args:
        make: builds the model and its arguments from `make_args`; a function that processes can import.

    Raises:
        ShardError: the errors of `torchshard.shard`.
        DistributedError: a rank died.
    """
    model, args, kwargs = _build(make, make_args)
    call = flatten_call(model, args, kwargs or {})
    torch.manual_seed(0)
    states = rng_states((*model.parameters(), *call.tensors))
    expected = unsharded(model, call, left=False)

    def trial() -> Trial:
        captured = prepared(model, args, kwargs)
        return Trial(model, captured, replace(call, names=captured.inputs), states)

    return report_of(expected, launch(_run_rank, world_size, (make, make_args, plan, aim)), trial)


def report_of(
    expected: Results, ranks: Sequence[Pieces], unsharded_step: Callable[[], UnshardedStep] | None = None
) -> Report:
    """Compares the tensors of all ranks with the results of `steps.unsharded`."""
    states = [_tensors(rank.state) for rank in ranks]
    inputs = [_tensors(rank.inputs) for rank in ranks]
    got = _Gathered([rank.outputs for rank in ranks], states, inputs, Mesh((MeshAxis(len(ranks)),)))
    shardings, tolerance = ranks[0].shardings, ranks[0].tolerance
    return Report(len(ranks), tolerance, compare(expected, got, shardings, tolerance, unsharded_step))


def _build(make: Callable[..., ModelCall], make_args: tuple[object, ...]) -> ModelCall:
    """The model and its arguments in float64, with the same weights in each process."""
    torch.manual_seed(0)
    model, args, kwargs = make(*make_args)
    return in_dtype(model, args, kwargs or {}, torch.float64)


def _run_rank(make: Callable[..., ModelCall], make_args: tuple[object, ...], plan: PlanLike, aim: Aim) -> Pieces:
    """The step of one rank; called in each process."""
    init_process_group()
    model, args, kwargs = _build(make, make_args)
    sharded = ShardedModule(model, plan, Ranks(lookup(MODEL)), aim)
    call = flatten_call(model, args, kwargs or {})
    inputs = {name: leaf(t) for name, t in zip(call.names, call.tensors, strict=True)}
    call_args, call_kwargs = call.rebuild(list(inputs.values()))
    torch.manual_seed(0)
    results = list(flatten(sharded(*call_args, **call_kwargs)).tensors)
    backward([results])
    state = dict((*sharded.named_parameters(), *sharded.named_buffers()))
    return pieces(results, state, inputs, sharded.plan.parameters, sharded.graph)


def pieces(
    results: Sequence[object],
    state: Mapping[str, Tensor],
    inputs: Mapping[str, object],
    layouts: Mapping[str, Layout],
    graph: fx.GraphModule,
) -> Pieces:
    """A rank's tensors after backward."""
    return Pieces(
        [result.detach() if isinstance(result, Tensor) else result for result in results],
        _leaves(state),
        _leaves(inputs),
        {name: Sharding.of((graph.meta["axis"], layout)) for name, layout in layouts.items()},
        tolerance_of(graph),
    )


def _leaves(values: Mapping[str, object]) -> dict[str, Leaf]:
    """Separates values from gradients: pickling a tensor drops its `.grad`."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {name: Leaf(tensor.detach(), tensor.grad) for name, tensor in tensors.items()}


def _tensors(leaves: Mapping[str, Leaf]) -> dict[str, Tensor]:
    """The tensors of another process, with their gradients in `.grad` again."""
    tensors = {}
    for name, (value, grad) in leaves.items():
        if is_float(value):
            value.requires_grad_(True)
            value.grad = grad
        tensors[name] = value
    return tensors
