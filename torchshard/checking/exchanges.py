"""Runs the kernels of real ranks in one process; messages are delivered as torch.distributed defines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchshard.distributed.kernels import Exchange


def exchanged(parts: Sequence[Tensor | Exchange]) -> list[Tensor]:
    """Each rank's result of a conversion, from the parts of all ranks of a group.

    Either all ranks send a message, or every part is a result already.
    """
    sending = [part for part in parts if isinstance(part, Exchange)]
    if not sending:
        return [part for part in parts if isinstance(part, Tensor)]
    assert len(sending) == len(parts) and len({part.collective for part in sending}) == 1, sending
    received = _RECEIVED[sending[0].collective](sending)
    return [part.result(own) for part, own in zip(sending, received, strict=True)]


def _all_reduce(parts: Sequence[Exchange]) -> list[Tensor]:
    """Writes the sum to the memory of the sent tensors, as the real kernel does."""
    total = _sum(parts)
    return [part.sent.copy_(total) for part in parts]


def _all_gather(parts: Sequence[Exchange]) -> list[Tensor]:
    return [torch.cat([part.sent for part in parts]) for _ in parts]


def _reduce_scatter(parts: Sequence[Exchange]) -> list[Tensor]:
    return [own.clone() for own in _sum(parts).tensor_split(len(parts))]


def _all_to_all(parts: Sequence[Exchange]) -> list[Tensor]:
    lengths = [part.lengths for part in parts if part.lengths is not None]
    pieces = [part.sent.split(own[1]) for part, own in zip(parts, lengths, strict=True)]
    received = [torch.cat([of_rank[rank] for of_rank in pieces]) for rank in range(len(parts))]
    for rank, (awaited, _) in enumerate(lengths):
        assert awaited == [len(of_rank[rank]) for of_rank in pieces], "ranks await other lengths than are sent"
    return received


def _sum(parts: Sequence[Exchange]) -> Tensor:
    return torch.stack([part.sent for part in parts]).sum(0, dtype=parts[0].sent.dtype)


_RECEIVED: dict[str, Callable[[Sequence[Exchange]], list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather_single": _all_gather,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}
"""Name of a torch.distributed function -> its simulation, which returns each rank's received tensor."""
