"""`run_ranks`: every call starts from the same state; a failing call is reported and doesn't affect others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import nightly
from torchshard.testing import PATIENCE, rule_of, run_ranks

aten = torch.ops.aten


def _state(rank: int) -> dict[str, Any]:
    """Returns all state that a rank could leave to a later one in the same process."""
    return {
        "rank": (rank, dist.get_rank(), dist.get_world_size()),
        "model-parallel group": tsd.is_initialized(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "RNG state": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "rule of relu": str(rule_of(aten.relu.default)),
        "folder": os.getcwd(),
        "attributes of a module": sorted(vars(ts)),
    }


def _change(rank: int) -> dict[str, Any]:
    """Changes the state that `_state` lists; returns the state before."""
    before = _state(rank)
    tsd.init_process_group(timeout_seconds=1.0)
    tsd.debug(True)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    os.environ["TORCHSHARD_TEST"] = "1"
    os.chdir("/")
    ts.rule(aten.relu.default)(lambda call: None)
    vars(ts)["seen"] = True
    after = _state(rank)
    same = {name for name, value in before.items() if after[name] == value}
    assert same == {"rank", "threads"}, same
    return before


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_call_changes_is_not_seen_by_the_next(world: int) -> None:
    before = run_ranks(_change, world)
    for mine, later in zip(before, run_ranks(_state, world), strict=True):
        assert [name for name in mine if mine[name] != later[name]] == []
    assert [state["rank"] for state in before] == [(rank, rank, world) for rank in range(world)]


def _fail(rank: int, how: str, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        if how == "raises":
            raise ValueError("the cause")
        if how == "exits":
            os._exit(3)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    dist.barrier()


@nightly("hangs-*")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", r"rank 1:\nTraceback[\s\S]*in _fail[\s\S]*ValueError: the cause"),
        ("exits", "process 1 terminated with exit code 3"),
        ("is killed", "process 1 terminated with signal SIGKILL"),
        ("hangs", f"ranks did not end within {2 * PATIENCE:g} s"),
    ],
)
def test_a_call_that_fails_is_reported_and_the_next_one_works(how: str, text: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=text):
        run_ranks(_fail, 2, how, str(tmp_path), seconds=2.0 if how == "hangs" else 60.0)
    assert time.monotonic() - started < 30
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert [state["rank"] for state in run_ranks(_state, 2)] == [(0, 0, 2), (1, 1, 2)]
