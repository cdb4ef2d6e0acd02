"""Real ranks: a function run in several gloo processes at once."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchshard as ts

TIMEOUT_SECONDS = 120


def run_ranks(fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Calls `fn(rank, *args)` on `world` ranks with `torch.distributed` initialised (gloo, one thread each).

    Returns each rank's result; `fn` must be importable, its result picklable.

    Raises:
        RuntimeError: a rank failed (with its traceback) or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        # one process imports torch, and the ranks are forks of it
        mp.get_context("forkserver").set_forkserver_preload(["torchshard.public", "tests.models"])
        context = mp.start_processes(
            _rank, (fn, world, folder, args), nprocs=world, join=False, start_method="forkserver"
        )
        ended = _join(context)
        found = [_read(Path(folder) / f"{rank}.pkl") for rank in range(world)]
    failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(found) if not ok and text]
    if failed or not ended:
        raise RuntimeError("\n".join(failed) or f"ranks did not end within {TIMEOUT_SECONDS} s")
    return [result for _, result in found]


def refused(fn: Callable[[], Any], text: str, kind: type[ts.ShardError] = ts.ShardError) -> bool:
    """Whether a call raises an error of ours, of this kind, that says this; what else it raises goes on."""
    try:
        fn()
    except kind as error:
        return text in str(error)
    return False


def refused_input(fn: Callable[[], Any], text: str) -> bool:
    """Whether a call raises an InputError that says this."""
    return refused(fn, text, ts.InputError)


def _join(context: Any) -> bool:
    """Whether all ranks ended by themselves; after the timeout they are killed."""
    deadline, ended = time.monotonic() + TIMEOUT_SECONDS, False
    try:
        while not ended and time.monotonic() < deadline:
            ended = context.join(timeout=1)
    except (mp.ProcessExitedException, mp.ProcessRaisedException):
        ended = False
    for process in context.processes:
        if process.is_alive():
            process.kill()
        process.join()
    return ended


def _read(path: Path) -> tuple[bool, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else (False, "")


def _rank(rank: int, fn: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_SECONDS / 2)
    )
    try:
        result = (True, fn(rank, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    if result[0]:
        dist.destroy_process_group()
    os._exit(not result[0])  # gloo's threads, if any is left, may abort an ordinary exit on a loaded machine
