"""Runs all ranks of a program in one process, in lockstep, for any number of ranks.

Lockstep needs no process group. Each rank runs its own localized graph up to its next collective
and waits there. When all ranks of a group have arrived at the same collective, it runs for all of
them, by the definition of the layouts (`simulated`). One autograd tape spans all ranks.

The collectives of `distributed` are not used there, so that a bug in a kernel can't hide a bug in a
graph. Graphs after their last pass, which run without autograd, run a second time with the kernels
of real ranks (see `exchanges`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from torchshard.checking.simulated import Request, run_collective
from torchshard.compiler.divided import DividedBatch, rank_before
from torchshard.core.conversions import source_and_target
from torchshard.core.errors import InternalError
from torchshard.core.layouts import split
from torchshard.core.mesh import Mesh, MeshAxis, Place, simulated, simulated_name
from torchshard.core.rng_states import RngStates, rng_state, rng_states, set_rng_states
from torchshard.custom_ops.stepwise import Computation, Stepwise
from torchshard.distributed.ops import unwrapped
from torchshard.ops import OPS, Begin, is_collective, wait
from torchshard.passes import localized
from torchshard.passes.nodes import FOR_ANY_STRIDES, call_target
from torchshard.passes.propagate import Seen
from torchshard.plans.data import AxisPlan

T = TypeVar("T")
Record = Callable[[fx.Node, Argument, list[Argument]], Argument]
"""Called with each node, its value and the values of its arguments; returns the value that the consumers get."""
Rank = Generator[Request, Tensor | None, list[object]]
"""A rank's run: it yields collectives, is sent their results, and returns the graph's results."""


def rank_graphs(graph: fx.GraphModule, axis: MeshAxis, batches: Sequence[DividedBatch] = ()) -> list[fx.GraphModule]:
    """The localized graph of every rank.

    Args:
        batches: how the ranks also split the batch, one entry per mesh axis, outermost first.
    """
    seen = Seen()
    found: dict[tuple[int, ...], fx.GraphModule] = {
        (place.rank,): localized(graph, place, seen) for place in axis.simulated(axis.name)
    }
    axes = [axis]
    for divided in batches:
        own = divided.constraints.axis
        axes.append(own)
        plans, split = dict[tuple[int, ...], AxisPlan](), dict[tuple[int, ...], fx.GraphModule]()
        for numbers, local in found.items():
            plans[numbers] = divided.solve(local, plans.get(rank_before(numbers))).plan
            split[numbers] = divided.split(local, plans[numbers])
        found = {
            (*numbers, place.rank): localized(each, place, seen)
            for numbers, each in split.items()
            for place in own.simulated(own.name)
        }
    return [
        _among(found[tuple(place[axis.name] for axis in axes)], place) for place in Mesh((*axes[1:], axis)).places()
    ]


def _among(local: fx.GraphModule, place: Place) -> fx.GraphModule:
    """Makes each collective of a graph name the ranks at the same place on the other axes."""

    def group(name: object) -> str:
        along = simulated(str(name))
        assert along is not None, name
        others = ", ".join(f"{axis} {rank}" for axis, rank in place.items() if axis != along.among)
        return simulated_name(along.rank, along.size, f"{along.among} at {others}" if others else along.among)

    for node in local.graph.nodes:
        if is_collective(node.target):
            node.args = (*node.args[:-1], group(node.args[-1]))
        elif isinstance(node.target, Stepwise):
            node.target = replace(node.target, group=group(node.target.group))
    return local


def run(
    graphs: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Argument]],
    record: Sequence[Record],
    *,
    by_kernels: bool = False,
) -> list[list[object]]:
    """Runs all ranks; returns each rank's results.

    Args:
        graphs: one per rank.
        inputs: per rank the values of the placeholders.
        record: per rank.
        by_kernels: whether collectives run by the kernels of real ranks, without gradients.

    Raises:
        InternalError: the ranks arrive at different collectives.
    """
    # a process has only one RNG state, so each simulated rank saves its own and restores it when it
    # goes on
    states = [rng_states(values) for values in inputs]
    calls = zip(graphs, inputs, record, strict=True)
    ranks = [_rank(*call) for call in calls]
    received: dict[int, Tensor | None] = dict.fromkeys(range(len(ranks)))
    waiting, results = dict[int, Request](), dict[int, list[object]]()
    while received:
        for number, value in received.items():
            try:
                waiting[number] = _with_rng_state(states, number, partial(ranks[number].send, value))
            except StopIteration as done:
                results[number] = done.value
        received = _all_arrived(waiting, by_kernels=by_kernels)
        for number in received:
            del waiting[number]
    if waiting:
        raise InternalError("some ranks ended while others wait", where=str(next(iter(waiting.values())).node))
    set_rng_states(states[0])
    return [results[number] for number in range(len(ranks))]


def _all_arrived(waiting: Mapping[int, Request], *, by_kernels: bool) -> dict[int, Tensor | None]:
    """Runs the collectives that all ranks of a group wait at; returns these ranks' results."""
    groups = dict[tuple[str, int], dict[int, int]]()
    for number, request in waiting.items():
        rank, size, among = request.group
        groups.setdefault((among, size), {})[rank] = number
    results: dict[int, Tensor | None] = {}
    for (_, size), members in groups.items():
        if len(members) == size:
            numbers = [members[rank] for rank in range(size)]
            made = run_collective([waiting[n] for n in numbers], by_kernels=by_kernels)
            results |= zip(numbers, made, strict=True)
    return results


def _rank(graph: fx.GraphModule, inputs: Sequence[Argument], record: Record) -> Rank:
    env: dict[fx.Node, Argument] = {}
    remaining_inputs = iter(inputs)
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        target = unwrapped(node.target)
        if node.op == "placeholder":
            value = next(remaining_inputs)
        elif node.op == "output":
            return list(args[0])
        elif is_collective(target):
            request = Request(node, cast(OpOverload[..., object], target), args)
            alone = _alone(request)
            value = alone if alone is not None else (yield request)
        elif isinstance(target, Begin):
            value = yield Request(node, target.op, args, target.in_place)
        elif target is wait:
            value = args[0]  # all ranks have begun the collective, and it has ended
        elif isinstance(target, Stepwise):
            value = yield from _stepwise(node, target.steps(*args))
        elif node.target in FOR_ANY_STRIDES:
            value = FOR_ANY_STRIDES[node.target](*args, **kwargs)
        else:
            value = call_target(node, args, kwargs)
        env[node] = record(node, value, [*args, *kwargs.values()])
    raise InternalError("a graph has no output", where=str(graph))


def _alone(request: Request) -> Tensor | None:
    """The slice that a rank cuts for itself without waiting for others, if it needs no gradient.

    Ranks with empty slices may reach the op at a different place among their collectives.
    """
    row = OPS.get(request.op)
    if row is None or row.kernel != "slice" or torch.is_grad_enabled():
        return None
    rank, size, _ = request.group
    _, target = source_and_target(row.name, request.args[1:])
    return split(request.tensor, target, rank, size).clone(memory_format=torch.contiguous_format)


def _with_rng_state(states: list[RngStates], rank: int, fn: Callable[[], T]) -> T:
    """Runs a function with a rank's own RNG state."""
    set_rng_states(states[rank])
    try:
        return fn()
    finally:
        states[rank] = {device: rng_state(device) for device in states[rank]}


def _stepwise(node: fx.Node, steps: Computation) -> Generator[Request, Tensor | None, Argument]:
    """Runs an op that yields its collectives."""
    result: Tensor | None = None
    while True:
        try:
            # generators require that the first `send` is of None
            op, args = steps.send(cast(Tensor, result))
        except StopIteration as done:
            return cast(Argument, done.value)
        assert isinstance(op, OpOverload)
        result = yield Request(node, op, args)
