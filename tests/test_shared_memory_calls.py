"""Calls through memory return the results of gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import NO_MEMORY
from tests.test_shared_memory import DTYPES, SHAPES
from torchshard.testing import run_ranks

pytestmark = pytest.mark.skipif(bool(NO_MEMORY), reason=NO_MEMORY)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns small integers, which have exact sums in every dtype."""
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


Case = Callable[[Any, int, int, torch.dtype, tuple[int, ...]], list[Tensor]]


def _all_reduce(group: Any, rank: int, world: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        x = _filled(shape, dtype, rank)
        dist.all_reduce(x, op, group=group)
        found.append(x)
    return found


def _of_one(group: Any, rank: int, world: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    sent, total, own = (_filled(shape, dtype, rank) for _ in range(3))
    dist.broadcast(sent, group_src=world - 1, group=group)
    dist.reduce(total, group_dst=world - 1, group=group)
    whole = [torch.empty_like(own) for _ in range(world)] if rank == 1 else None
    dist.gather(own, whole, group_dst=1, group=group)
    part = torch.empty_like(own)
    dist.scatter(part, whole, group_src=1, group=group)
    return [sent, total * int(rank == world - 1), part, *(whole or ())]  # other ranks' sums are undefined


def _gathers(group: Any, rank: int, world: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    x = _filled(shape, dtype, rank)
    whole = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(whole, x, group=group)
    rows = _filled((2, *shape), dtype, rank)
    joined = torch.empty(2 * world, *shape, dtype=dtype)
    dist.all_gather_into_tensor(joined, rows, group=group)
    summed = torch.empty(2, *shape, dtype=dtype)
    dist.reduce_scatter_tensor(summed, _filled((2 * world, *shape), dtype, rank), group=group)
    turned = torch.empty(world, *shape, dtype=dtype)
    dist.all_to_all_single(turned, _filled((world, *shape), dtype, rank), group=group)
    return [*whole, joined, summed, turned]


def _uneven(group: Any, rank: int, world: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """Sends r + s + 1 rows from rank r to rank s."""
    lengths = [rank + other + 1 for other in range(world)]
    rows = _filled((sum(lengths), *shape), dtype, rank)
    single = torch.empty_like(rows)
    dist.all_to_all_single(single, rows, lengths, lengths, group=group)
    return [single]


def _messages(group: Any, rank: int, world: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """Sends three messages with two tags to the next rank; receives them in a different order."""
    sent = [_filled(shape, dtype, 10 * rank + i) for i in range(3)]
    found = [torch.empty_like(x) for x in sent]
    after, before = (rank + 1) % world, (rank - 1) % world
    works = [dist.isend(x, group_dst=after, group=group, tag=i // 2) for i, x in enumerate(sent)]
    receives = [dist.irecv(found[i], group_src=before, group=group, tag=i // 2) for i in (2, 0, 1)]
    for work in (*reversed(receives), *works):
        work.wait()
    return found


CASES: tuple[Case, ...] = (_all_reduce, _of_one, _gathers, _uneven, _messages)


def _unlike_gloo(rank: int, world: int) -> list[str]:
    gloo, wrong = dist.new_group(backend="gloo"), []
    for case in CASES:
        for dtype in DTYPES:
            if dtype is torch.bool and case is not _messages:
                continue  # gloo doesn't sum bools
            for shape in SHAPES:
                expected, got = case(gloo, rank, world, dtype, shape), case(None, rank, world, dtype, shape)
                if not all(map(torch.equal, expected, got)):
                    wrong.append(f"{case.__name__} {dtype} {shape}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_each_call_gives_what_gloo_gives(world: int) -> None:
    assert run_ranks(_unlike_gloo, world, world, backend="memory") == [[]] * world
