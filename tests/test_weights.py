"""Weights go into a sharded model without a rank ever holding more of them than it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torchshard as ts
from tests.helpers import run_ranks


def _allocated(run: Callable[[], object]) -> tuple[int, int]:
    """(the most bytes that a function holds on the CPU beside those before it, what it leaves)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    total = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    del kept
    return most, total


def _blocks() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))
    return nn.Sequential(*blocks, nn.BatchNorm1d(256))


def _bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _shards(rank: int, plan: Any) -> tuple[float, float]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model, x, held = _blocks(), torch.randn(4, 256), []
    most, left = _allocated(lambda: held.append(ts.shard(model, plan, (x,))))
    own = _bytes_of((*held[0].parameters(), *held[0].buffers()))
    return most / own, left / own


@pytest.mark.parametrize("plan", ["auto", {"*.0": "column", "*.2": "row"}], ids=["auto", "dict"])
@pytest.mark.parametrize("world", [2, 3])
def test_to_shard_takes_the_memory_of_the_slices_alone(plan: Any, world: int) -> None:
    for most, left in run_ranks(_shards, world, plan):
        assert left <= most < 1.02


def _changes_the_original(rank: int) -> list[bool]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model, x = _blocks().double().eval(), torch.randn(4, 256, dtype=torch.float64)
    sharded, before = ts.shard(model, "auto", (x,)), model(x)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    result: Tensor = sharded(x)
    return [torch.allclose(result, before, atol=1e-10)]


def test_slices_share_no_memory_with_the_original() -> None:
    assert run_ranks(_changes_the_original, 2) == [[True], [True]]
