"""Defers the sums of parameters' gradients over the ranks, for calls within `no_sync`.

A parameter keeps its partial gradients (`ShardedParameter.unsummed`), which differ between ranks;
reading its `grad` raises meanwhile. The backward of a call outside of `no_sync` adds its own
partial gradients, and the ranks sum the totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchshard.distributed.wire import Pending
from torchshard.ops import OPS, Begin, wait
from torchshard.passes import Call
from torchshard.weights.parameter import ShardedParameter

REDUCE = torch.ops.torchshard.reduce.default
MESSAGE_BYTES = 25 << 20
"""The maximum size of a message of several gradients, equal to the size of DDP's buckets."""
Calls = tuple[Call, ...]


class Due(NamedTuple):
    """A partial gradient, and the deferred calls that turn it into a gradient."""

    part: Tensor
    calls: Calls


def keep(parameter: ShardedParameter, due: Due) -> None:
    """Keeps a partial gradient; adds it to the one kept from earlier calls."""
    kept = parameter.unsummed.get(due.calls)
    parameter.unsummed = {**parameter.unsummed, due.calls: due.part if kept is None else kept + due.part}


def with_kept(parameter: ShardedParameter, due: Iterable[Due] = ()) -> list[Due]:
    """Returns partial gradients together with those that the parameter kept, and clears the kept ones."""
    for each in due:
        keep(parameter, each)
    kept, parameter.unsummed = parameter.unsummed, {}
    return [Due(part, calls) for calls, part in kept.items()]


def sum_kept(parameters: Iterable[ShardedParameter]) -> None:
    """Sums the partial gradients that parameters keep into their `grad`: a collective call."""
    kept = [(parameter, due) for parameter in parameters for due in with_kept(parameter)]
    for (parameter, _), gradient in zip(kept, summed([due for _, due in kept]), strict=True):
        before = parameter.grad
        parameter.grad = gradient if before is None else before + gradient


def summed(due: Sequence[Due]) -> list[Tensor]:
    """Returns the gradients from partial ones, summed over the ranks: a collective call."""
    values, calls = [part for part, _ in due], [list(calls) for _, calls in due]
    while any(calls):
        under_way = [(together, _begun([values[i] for i in together], calls[together[0]][0]))
                     for together in _messages(values, calls)]  # fmt: skip
        for together, made in under_way:
            value = wait(made) if isinstance(made, Pending) else made
            pieces = value.split([values[i].numel() for i in together]) if len(together) > 1 else [value]
            for i, piece in zip(together, pieces, strict=True):
                # pieces of one message are copied: each gradient needs its own memory
                values[i] = piece if len(together) == 1 else piece.view(values[i].shape).clone()
                calls[i].pop(0)
    return values


def _begun(values: Sequence[Tensor], call: Call) -> Tensor | Pending:
    """Makes a deferred call on values, concatenated if there are several; returns its result, maybe pending."""
    value = values[0] if len(values) == 1 else torch.cat([value.flatten() for value in values])
    run: Any = call.target
    if run in OPS:
        run = Begin(run, in_place=False)
    made: Tensor | Pending = run(value, *call.args, **dict(call.kwargs))
    return made


def _messages(values: Sequence[Tensor], calls: Sequence[Sequence[Call]]) -> Iterator[list[int]]:
    """Yields groups of indices of values: one all-reduce can make the next call of each group."""
    equal: dict[object, list[int]] = {}
    for i, rest in enumerate(calls):
        if rest:
            joins = rest[0].target is REDUCE
            equal.setdefault((rest[0], values[i].dtype, values[i].device) if joins else i, []).append(i)
    for indices in equal.values():
        together, size = list[int](), 0
        for i in indices:
            if together and size + values[i].nbytes > MESSAGE_BYTES:
                yield together
                together, size = [], 0
            together.append(i)
            size += values[i].nbytes
        yield together
