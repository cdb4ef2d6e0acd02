"""Every collective of torchshard.distributed on four ranks: what each rank holds before and after, and the gradients.

    python examples/collectives.py
    torchrun --nproc-per-node 4 examples/collectives.py

Where a call has a gradient, the backward begins with 1, 10, 100 and 1000 on ranks 0 to 3, and each rank shows what it
gets for its input.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchshard.distributed as tsd

RANKS = 4
AVG, MAX = tsd.ReduceOp.AVG, tsd.ReduceOp.MAX


def same(rank: int) -> Tensor:
    """One value on all ranks."""
    return torch.arange(4.0)


def addend(rank: int) -> Tensor:
    """A value of each rank's own."""
    return torch.arange(4.0) + 10 * rank


def piece(rank: int) -> Tensor:
    """A slice of 0 to 6: two elements on ranks 0 to 2, one on rank 3."""
    return torch.arange(7.0)[2 * rank : 2 * rank + 2]


def row(rank: int) -> Tensor:
    """A row of a square."""
    return (torch.arange(4.0) + 10 * rank).reshape(1, 4)


Call = Callable[[Tensor], Any]
CALLS: list[tuple[str, str, Callable[[int], Tensor], Call]] = [
    ("copy(x)", "I -> R: nothing is sent; the gradients are summed", same, tsd.copy),
    ("reduce(x)", "P -> I: the sum, on every rank", addend, tsd.reduce),
    ("all_reduce(x)", "P -> R: the sum, and the sum of the gradients", addend, tsd.all_reduce),
    ("scatter(x, 0)", "I -> S(0): each rank keeps its slice", same, lambda x: tsd.scatter(x, 0)),
    ("narrow(x, 0)", "R -> S(0): the same; the gradient is an addend", same, lambda x: tsd.narrow(x, 0)),
    ("gather(x, 0)", "S(0) -> I: the slices joined", piece, lambda x: tsd.gather(x, 0)),
    ("all_gather(x, 0)", "S(0) -> R: the same; the gradients are summed", piece, lambda x: tsd.all_gather(x, 0)),
    ("reduce_scatter(x, 0)", "P -> S(0): a slice of the sum", addend, lambda x: tsd.reduce_scatter(x, 0)),
    ("all_to_all(x, 0, 1)", "S(0) -> S(1): from rows to columns", row, lambda x: tsd.all_to_all(x, 0, 1)),
    ("broadcast(x, src=1)", "rank 1's, on every rank", addend, lambda x: tsd.broadcast(x, 1)),
    ("reduce_to(x, dst=2)", "the sum on rank 2, zeros elsewhere", addend, lambda x: tsd.reduce_to(x, 2)),
    ("gather_to(x, dst=0, dim=0)", "the slices joined on rank 0", piece, lambda x: tsd.gather_to(x, 0, 0)),
    ("scatter_from(x, src=3, dim=0)", "slices of rank 3's", addend, lambda x: tsd.scatter_from(x, 3, 0)),
    ("all_reduce(x, AVG)", "the mean", addend, lambda x: tsd.all_reduce(x, AVG)),
    (
        "all_reduce(x, MAX)",
        "the largest; it has no gradient",
        addend,
        lambda x: tsd.all_reduce(x.detach(), tsd.ReduceOp.MAX),
    ),
    ("all_gather_uneven(x)", "any shapes, as a list", piece, lambda x: tsd.all_gather_uneven(x.detach())),
    (
        "irecv(x, rank - 1).wait()",
        "what its `isend(x, rank + 1)` sent: once around",
        addend,
        lambda x: around(x.detach()),
    ),
    ("all_gather_object(x)", "any data, as a list", piece, lambda x: tsd.all_gather_object(int(x.sum()))),
    ("gather_object(x, dst=1)", "the same, on rank 1 alone", piece, lambda x: tsd.gather_object(int(x.sum()), 1)),
    ("broadcast_object(x, src=2)", "rank 2's data", piece, lambda x: tsd.broadcast_object(int(x.sum()), 2)),
]


def around(x: Tensor) -> Tensor:
    """Sends to the next rank, receives from the one before."""
    rank, ranks = tsd.get_rank(), tsd.get_group_size()
    sent, got = tsd.isend(x, (rank + 1) % ranks), tsd.irecv(x, (rank - 1) % ranks)
    sent.wait()
    return got.wait()


def main() -> None:
    """Runs and prints them all; rank 0 prints."""
    tsd.init_process_group()
    rank = tsd.get_rank()
    for title, meaning, made, call in CALLS:
        x = made(rank).requires_grad_()
        before = shown(x)
        result = call(x)
        gradient = ""
        if isinstance(result, Tensor) and result.requires_grad:
            (result * 10.0**rank).sum().backward()
            gradient = shown(x.grad)
        lines = tsd.gather_object((before, shown(result), gradient), dst=0)
        if lines is not None:
            print(f"{title}    {meaning}")
            for place, (before, after, grad) in enumerate(lines):
                print(f"  rank {place}   {before:20} -> {after:32}{f'   gradient {grad}' if grad else ''}".rstrip())
            print()
    tsd.destroy_process_group()


def shown(value: Any) -> str:
    """'[0 1 2 3]'."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return f"[{' '.join(map(shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        tsd.launch(main, RANKS)
