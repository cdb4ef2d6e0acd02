"""Checkpoints of replicas, which save and load together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torchshard as ts
from tests.resumed import STEPS, run_of, same, train, whole_state
from torchshard.testing import run_ranks

# --- replicas --------------------------------------------------------------------------------------------------------


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    """A copy of an optimizer's states, without the marks of slices."""
    return copy.deepcopy([[optimizer.state[p] for p in group["params"]] for group in optimizer.param_groups])


def _replicas(rank: int, folder: str, loads: bool) -> Any:
    model, optimizer, _ = run_of("auto", group_size=2)
    torch.manual_seed(7 + ts.distributed.get_data_parallel_rank())
    wrapped = DistributedDataParallel(model, process_group=ts.distributed.get_data_parallel_group())
    if loads:
        ts.load(folder, wrapped, optimizer)
    else:
        train(wrapped, optimizer, STEPS)
        ts.save(folder, wrapped, optimizer)
    return whole_state(model), _optimizer_state(optimizer), torch.rand(4)


@pytest.mark.nightly
def test_replicas_save_and_load_together(tmp_path: Path) -> None:
    before, after = (run_ranks(_replicas, 4, str(tmp_path), loads) for loads in (False, True))
    files = sorted(path.name for path in tmp_path.glob("data-*/*"))
    assert files == [f"{i}-of-2{r}.safetensors" for i in "01" for r in (".1", "")] + ["objects.bin"]
    for (whole, state, drawn), (loaded, loaded_state, drawn_after) in zip(before, after, strict=True):
        assert same(whole, loaded) and torch.equal(drawn, drawn_after)
        for group, other in zip(state, loaded_state, strict=True):
            assert all(same(a, b) for a, b in zip(group, other, strict=True))
    assert not torch.equal(before[0][2], before[2][2])  # replicas have drawn their own masks
    whole, _, _ = run_ranks(_loads_alone, 1, str(tmp_path))[0]
    assert same(whole, before[0][0])


def _loads_alone(rank: int, folder: str) -> Any:
    model, optimizer, _ = run_of(None)
    ts.load(folder, model, optimizer)
    return whole_state(model), None, None
