"""Objects sent between real ranks, with and without pickle; tests/test_checkpoint_files.py tests the encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import torchshard as ts
import torchshard.distributed as tsd
from torchshard.testing import run_ranks


@dataclass
class _Point:
    x: int


def test_alone() -> None:
    data = [_Point(1)]
    assert tsd.all_gather_object(data) == tsd.gather_object(data) == [data] and tsd.broadcast_object(data) is data
    assert torch.equal(tsd.all_gather_uneven(torch.ones(2))[0], torch.ones(2))


def _objects(rank: int) -> dict[str, Any]:
    tsd.init_process_group()
    data = {
        "rank": rank,
        "text": "x" * rank * 1000,
        "tensor": torch.full((rank, 2), float(rank)),
        "point": _Point(rank),
    }
    found: dict[str, Any] = {}
    with torch.inference_mode(bool(rank % 2)):
        found["all"] = tsd.all_gather_object(data)
        found["one"] = tsd.gather_object(data, dst=1)
        found["from"] = tsd.broadcast_object(data if rank == 1 else None, src=1)
        found["plain"] = tsd.all_gather_object((rank, [None]), allow_pickle=False)
        found["uneven"] = tsd.all_gather_uneven(torch.full((rank, 2 + rank), rank, dtype=torch.int32))
    try:
        tsd.all_gather_uneven(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    except ts.InputError as error:
        found["dtypes"] = str(error)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_between_ranks(world: int) -> None:
    for rank, found in enumerate(run_ranks(_objects, world)):
        for held in (found["all"], found["one"] if rank == 1 else found["all"]):
            assert [d["rank"] for d in held] == list(range(world))
            assert [d["point"] for d in held] == [_Point(r) for r in range(world)]
            assert all(torch.equal(d["tensor"], torch.full((r, 2), float(r))) for r, d in enumerate(held))
        assert (found["one"] is None) == (rank != 1) and found["from"]["text"] == "x" * 1000
        assert found["plain"] == [(r, [None]) for r in range(world)]
        assert [u.tolist() for u in found["uneven"]] == [[[r] * (2 + r)] * r for r in range(world)]
        assert "rank 0: torch.float32; rank 1: torch.float64" in found["dtypes"]


def test_no_gradient_is_lost_silently() -> None:
    with pytest.raises(ts.InputError, match="has no gradient"):
        tsd.all_gather_uneven(torch.ones(2, requires_grad=True))
