"""Tests `launch`: results in rank order, the first failing rank's exception, and no leftover process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchshard as ts
from torchshard.distributed import all_reduce, destroy_process_group, get_rank, init_process_group, launch

WAIT_SECONDS = 60.0


def _place(greeting: str) -> tuple[str, int, torch.Tensor]:
    time.sleep(0.5 * (os.environ["RANK"] == "0"))
    told = f"{greeting} from {os.environ['LOCAL_RANK']}/{os.environ['WORLD_SIZE']}"
    return told, torch.get_num_threads(), torch.ones(2)


def _summed() -> float:
    init_process_group()
    held = torch.tensor(get_rank() + 1.0)
    dist.all_reduce(held)
    destroy_process_group()
    return float(held)


def _fail_on_rank_1(folder: str) -> None:
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        while not (Path(folder) / "0").exists():
            time.sleep(0.01)
        raise ts.PlanError("rank 1 has had enough", why="it says so")
    time.sleep(WAIT_SECONDS)


def _fail_in_company() -> None:
    init_process_group()
    if get_rank() == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def _die() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(WAIT_SECONDS)


class _Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("it can't be pickled")


def _fail_unpicklably() -> None:
    raise _Stubborn(1, 2)


def _no_result() -> object:
    return lambda: None


def _leave_quietly() -> None:
    if os.environ["RANK"] == "1":
        raise SystemExit(0)


def _fail_then_abort() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the cause")
    time.sleep(0.1)
    os.abort()


def _again_and_again() -> list[float]:
    found = []
    for _ in range(4):
        init_process_group(timeout_seconds=20)
        found.append(float(all_reduce(torch.tensor(get_rank() + 1.0))))
        time.sleep(0.3 * (get_rank() == 0))
        destroy_process_group()
    return found


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts ranks by a fork server, in milliseconds; spawned ranks take seconds to import torch.

    Only the start differs: test_results_come_in_the_order_of_the_ranks and test_a_failing_rank_ends_the_others
    spawn ranks, as users' calls do.
    """
    forks = functools.partial(mp.start_processes, start_method="forkserver")
    monkeypatch.setattr(mp, "spawn", forks)


@pytest.mark.usefixtures("forked")
def test_groups_can_be_made_again() -> None:
    assert launch(_again_and_again, 2) == [[3.0] * 4] * 2


@pytest.mark.usefixtures("forked")
def test_a_rank_that_leaves_without_a_result() -> None:
    with pytest.raises(ts.DistributedError, match="rank 1 ended without a result"):
        launch(_leave_quietly, 2)
    with pytest.raises(ValueError, match="the cause"):
        launch(_fail_then_abort, 2)


ENDS = """
import atexit, torch.distributed as dist, torchshard as ts
atexit.register(lambda: print(dist.is_initialized()))
ts.distributed.init_process_group()
"""


@pytest.mark.nightly
def test_a_program_that_ends_without_ending_its_groups() -> None:
    """Groups are destroyed at exit, because Gloo's threads sometimes abort a process that exits with groups."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], env=os.environ | place, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr


def test_results_come_in_the_order_of_the_ranks() -> None:
    results = launch(_place, 2, ("hello",))
    assert [r[0] for r in results] == ["hello from 0/2", "hello from 1/2"]
    assert [r[1] for r in results] == [1, 1]
    assert torch.equal(results[1][2], torch.ones(2))


@pytest.mark.usefixtures("forked")
def test_ranks_find_each_other() -> None:
    assert launch(_summed, 3) == [6.0, 6.0, 6.0]


@pytest.mark.nightly
def test_a_failing_rank_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ts.PlanError, match="rank 1 has had enough") as caught:
        launch(_fail_on_rank_1, 2, (str(tmp_path),))
    assert time.monotonic() - began < WAIT_SECONDS
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1:") and "_fail_on_rank_1" in note and caught.value.why == "it says so"
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)


@pytest.mark.usefixtures("forked")
def test_the_cause_is_raised_not_its_consequence() -> None:
    with pytest.raises(ValueError, match="the cause"):
        launch(_fail_in_company, 2)


@pytest.mark.usefixtures("forked")
def test_a_rank_that_dies_without_a_word() -> None:
    with pytest.raises(ts.DistributedError, match=r"rank 1 ended without a result\n.*\n.*exit code 3"):
        launch(_die, 2)


@pytest.mark.usefixtures("forked")
def test_an_exception_that_can_not_be_pickled_keeps_its_class_and_text() -> None:
    with pytest.raises(_Stubborn, match="it can't be pickled") as caught:
        launch(_fail_unpicklably, 1)
    assert caught.value.__notes__[0].startswith("on rank 0:")
    with pytest.raises(ts.DistributedError, match="what rank 0 returned can't be pickled"):
        launch(_no_result, 1)


def _put(queue: Any) -> None:
    queue.put(3)


def test_arguments_may_be_what_only_a_start_can_pass_on() -> None:
    queue = mp.get_context("spawn").Queue()
    launch(_put, 1, (queue,))
    assert queue.get() == 3
    with pytest.raises(ts.DistributedError, match="can't be sent to other processes"):
        launch(_put, 2, ((i for i in ()),))


def test_no_ranks() -> None:
    with pytest.raises(ts.DistributedError, match="0 ranks can't be started"):
        launch(_summed, 0)
