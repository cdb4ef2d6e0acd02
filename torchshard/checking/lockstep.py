"""All ranks of a program in one process, in lockstep: no process group, any number of ranks.

Each rank runs its own localized graph up to its next collective and waits there; when all have arrived at the same
one, it is done for all by the definition of the layouts: the whole value is joined from what the ranks hold and split
as the target says, and its gradient likewise by the duals. One autograd tape spans all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchshard.core.conversions import kernels, source_and_target
from torchshard.core.errors import InternalError
from torchshard.core.layouts import Layout, dual, join, split
from torchshard.core.mesh import MeshAxis
from torchshard.custom_ops.stepwise import Steps, Stepwise
from torchshard.distributed.ops import OPS, SENDING, is_collective
from torchshard.ir.graph import where
from torchshard.passes import localized
from torchshard.rules import is_random

Record = Callable[[fx.Node, Any, list[Any]], Any]
"""Called with each node, its value and the values of its arguments; gives the value that goes on."""
Request = tuple[fx.Node, Any, Sequence[Any]]
"""A node, the collective that it waits at, and its arguments."""


def rank_graphs(graph: fx.GraphModule, axis: MeshAxis) -> list[fx.GraphModule]:
    """The graph of every rank."""
    seen: dict[str, Any] = {}
    return [localized(graph, coordinate, seen) for coordinate in axis.simulated()]


def run(graphs: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Any]], record: Sequence[Record]) -> list[list[Any]]:
    """Runs all ranks; returns each rank's results.

    Args:
        graphs: one per rank.
        inputs: per rank the values of the placeholders.
        record: per rank.

    Raises:
        InternalError: the ranks arrive at different collectives.
    """
    streams = [torch.get_rng_state() for _ in graphs]
    ranks = [_rank(g, x, r, streams, i) for i, (g, x, r) in enumerate(zip(graphs, inputs, record, strict=True))]
    waiting: list[Any] = [None] * len(ranks)
    while True:
        arrived, results = [], []
        for rank, value in zip(ranks, waiting, strict=True):
            try:
                arrived.append(rank.send(value))
            except StopIteration as done:
                results.append(done.value)
        if results:
            if arrived:
                raise InternalError("some ranks ended while others wait", where=str(arrived[0][0]))
            torch.set_rng_state(streams[0])
            return results
        waiting = _meet(arrived)


def _rank(
    graph: fx.GraphModule, inputs: Sequence[Any], record: Record, streams: list[Tensor], rank: int
) -> Generator[Request, Any, list[Any]]:
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "output":
            return list(args[0])
        elif is_collective(node.target):
            env[node] = yield node, node.target, args
        elif isinstance(node.target, Stepwise):
            env[node] = yield from _stepwise(node, node.target.steps(*args), streams, rank)
        elif is_random(node.target):
            env[node] = _drawing(streams, rank, lambda: node.target(*args, **kwargs))  # noqa: B023
        else:
            env[node] = node.target(*args, **kwargs)
        env[node] = record(node, env[node], [*args, *kwargs.values()])
    raise InternalError("a graph has no output", where=str(graph))


def _drawing(streams: list[Tensor], rank: int, run: Callable[[], Any]) -> Any:
    """What is run with a rank's own random stream."""
    torch.set_rng_state(streams[rank])
    try:
        return run()
    finally:
        streams[rank] = torch.get_rng_state()


def _stepwise(node: fx.Node, steps: Steps, streams: list[Tensor], rank: int) -> Generator[Request, Any, Any]:
    result: Any = None
    while True:
        try:
            op, args = _drawing(streams, rank, lambda: steps.send(result))  # noqa: B023
        except StopIteration as done:
            return done.value
        result = yield node, op, args


def _meet(arrived: Sequence[Request]) -> list[Any]:
    nodes, ops, args = zip(*arrived, strict=True)
    if any(op is not ops[0] or a[1:-1] != args[0][1:-1] for op, a in zip(ops, args, strict=True)):
        raise InternalError(
            "the ranks arrive at different collectives",
            where=nodes[0].name,
            why="; ".join(f"rank {i}: {node.format_node()}" for i, node in enumerate(nodes)),
        )
    tensors = [a[0] for a in args]
    row = OPS.get(ops[0])
    if row is None:
        largest = torch.stack(tensors).amax(0)
        return [largest.clone() for _ in tensors]
    sends = kernels(row.name, needs_grad=torch.is_grad_enabled())[1] in SENDING
    if sends:
        _check_all_come(nodes[0], [t.requires_grad for t in tensors])
    return list(_Conversion.apply(nodes[0] if sends else None, *source_and_target(row.name, args[0][1:]), *tensors))


def _check_all_come(node: fx.Node, come: Sequence[bool]) -> None:
    """Raises InternalError where some ranks would wait for others in a collective's backward."""
    if any(come) and not all(come):
        raise InternalError(
            "ranks would wait for each other in the backward of a collective",
            where=where(node),
            why=f"of ranks {[i for i, comes in enumerate(come) if not comes]} no gradient comes back to it",
        )


class _Conversion(torch.autograd.Function):
    """One conversion on all ranks at once, by the definition of the layouts."""

    @staticmethod
    def forward(ctx: Any, node: fx.Node | None, source: Layout, target: Layout, *pieces: Tensor) -> tuple[Tensor, ...]:
        """`node`: the one whose backward communicates; None where it does not."""
        made = _convert(pieces, source, target)
        ctx.node, ctx.ends, ctx.likes = node, (source, target), [torch.empty_like(m, device="meta") for m in made]
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.node is not None:
            _check_all_come(ctx.node, [grad is not None for grad in grads])
        source, target = ctx.ends
        devices = [grad.device for grad in grads if grad is not None]
        if not devices:
            return (None, None, None, *grads)
        full = [torch.zeros_like(like, device=devices[0]) if grad is None else grad
                for grad, like in zip(grads, ctx.likes, strict=True)]  # fmt: skip
        return (None, None, None, *_convert(full, dual(target), dual(source)))


def _convert(pieces: Sequence[Tensor], source: Layout, target: Layout) -> tuple[Tensor, ...]:
    whole, world = join(pieces, source), len(pieces)
    return tuple(split(whole, target, rank, world).clone() for rank in range(world))
