"""Runs one collective of all ranks in this process; `lockstep` stops the ranks there.

A conversion joins the full value from the ranks' slices, and splits it by the target layout. Its backward does the
same with the dual layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from torchshard.checking.exchanges import exchanged
from torchshard.core.conversions import kernels, source_and_target
from torchshard.core.errors import InternalError
from torchshard.core.layouts import Layout, dual, is_whole, join, split
from torchshard.core.mesh import Simulated, simulated
from torchshard.core.types import Context
from torchshard.distributed.convert import own_part
from torchshard.distributed.experts import KERNELS
from torchshard.distributed.group import Group
from torchshard.ir.graph import where
from torchshard.ops import COMBINE, DISPATCH, OPS, SENDING, experts_of_ranks


class Request(NamedTuple):
    """A rank's request to run a collective, where it waits."""

    node: fx.Node
    op: OpOverload[..., object]
    args: Sequence[Argument]
    in_place: bool = False
    """Whether the result overwrites the operand."""

    @property
    def group(self) -> Simulated:
        """The rank's place in the group that the collective is over."""
        found = simulated(str(self.args[-1]))
        assert found is not None, self.node.format_node()
        return found

    @property
    def tensor(self) -> Tensor:
        """The tensor that this rank contributes."""
        assert isinstance(self.args[0], Tensor)
        return self.args[0]


def run_collective(requests: Sequence[Request], *, by_kernels: bool) -> Sequence[Tensor]:
    """Runs the collective that all ranks have arrived at; returns each rank's result."""
    node, op, args, in_place = requests[0]
    # the first argument is the rank's tensor; the last is its group, with a different simulated name on each rank
    if any(request.op is not op or _common(request) != _common(requests[0]) for request in requests):
        raise InternalError(
            "the ranks arrive at different collectives",
            where=node.name,
            why="; ".join(f"rank {i}: {request.node.format_node()}" for i, request in enumerate(requests)),
        )
    tensors = [request.tensor for request in requests]
    groups = [Group(each.group.rank, each.group.size, simulated=True) for each in requests]
    if by_kernels and op in KERNELS:
        operands = [cast(list[Tensor], each.args[:3]) for each in requests]
        return exchanged([KERNELS[op](x, a, b, group) for (x, a, b), group in zip(operands, groups, strict=True)])
    if op in (DISPATCH, COMBINE):
        return _moved(requests)
    row = OPS.get(op)
    if row is None:  # all_reduce_max
        largest = torch.stack(tensors).amax(0)
        return [largest.clone() for _ in tensors]
    if by_kernels:
        kernel, ends = f"{row.kernel}_" if in_place else row.kernel, source_and_target(row.name, args[1:])
        return exchanged([own_part(kernel, x, *ends, group) for x, group in zip(tensors, groups, strict=True)])
    sends = kernels(row.name, needs_grad=torch.is_grad_enabled())[1] in SENDING
    if sends:
        _check_all_take_part(node, [t.requires_grad for t in tensors])
    return SimulatedConversion.apply(node if sends else None, *source_and_target(row.name, args[1:]), *tensors)


def _common(request: Request) -> list[Argument]:
    """The arguments that are equal on all ranks: without the rank's tensor, row counts and group."""
    return [] if request.op in (DISPATCH, COMBINE) else list(request.args[1:-1])


def _moved(requests: Sequence[Request]) -> list[Tensor]:
    """The rows that all ranks send to experts, or take back, by the definition of these collectives."""
    _check_all_take_part(requests[0].node, [request.tensor.requires_grad for request in requests])
    sent = torch.stack([cast(Tensor, request.args[1]) for request in requests], 1)  # [experts, ranks]
    experts, ranks = sent.shape
    begins = [0, *itertools.accumulate(experts_of_ranks(experts, ranks))]
    if requests[0].op is DISPATCH:
        groups = [request.tensor.split(sent[:, rank].tolist()) for rank, request in enumerate(requests)]
        return [torch.cat([group[e] for e in range(*own) for group in groups]) for own in itertools.pairwise(begins)]
    counts = [sent[begin:end].flatten().tolist() for begin, end in itertools.pairwise(begins)]
    groups = [request.tensor.split(of_rank) for request, of_rank in zip(requests, counts, strict=True)]
    by_expert = list(itertools.chain(*groups))  # each expert's rows of all ranks, expert by expert
    return [torch.cat(by_expert[rank::ranks]) for rank in range(ranks)]


def _check_all_take_part(node: fx.Node, takes_part: Sequence[bool]) -> None:
    """Raises InternalError if some ranks would wait forever for others in a collective's backward."""
    if any(takes_part) and not all(takes_part):
        raise InternalError(
            "ranks would wait for each other in the backward of a collective",
            where=where(node),
            why=f"of ranks {[i for i, part in enumerate(takes_part) if not part]} no gradient comes back to it",
        )


class SimulatedConversion(torch.autograd.Function):
    """One conversion on all ranks, by the definition of the layouts."""

    @staticmethod
    def forward(
        ctx: Context, node: fx.Node | None, source: Layout, target: Layout, *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        """Converts. `node` is None if the backward of the conversion does not communicate."""
        results = convert(pieces, source, target)
        ctx.node, ctx.layouts = node, (source, target)
        ctx.likes = [torch.empty_like(result, device="meta") for result in results]
        ctx.set_materialize_grads(False)  # a missing gradient must be seen: on real ranks it would be a hang
        return results

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.node is not None:
            _check_all_take_part(ctx.node, [grad is not None for grad in grads])
        source, target = ctx.layouts
        devices = [grad.device for grad in grads if grad is not None]
        if not devices:
            return (None, None, None, *grads)
        full = []
        for grad, like in zip(grads, ctx.likes, strict=True):
            full.append(torch.zeros_like(like, device=devices[0]) if grad is None else grad)
        return (None, None, None, *convert(full, dual(target), dual(source)))


def convert(pieces: Sequence[Tensor], source: Layout, target: Layout) -> tuple[Tensor, ...]:
    whole, world = join(pieces, source), len(pieces)
    # a copy keeps its operand's memory format; received data are contiguous
    lies = torch.preserve_format if is_whole(source) and is_whole(target) else torch.contiguous_format
    return tuple(split(whole, target, rank, world).clone(memory_format=lies) for rank in range(world))
