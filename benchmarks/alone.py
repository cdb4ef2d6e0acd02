"""Runs a function for many names, each in a process of its own that is ended at a limit."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def in_processes(
    run: Callable[[str], Any], names: Sequence[str], limit: float, jobs: int
) -> Iterator[tuple[str, Any, float]]:
    """(name, what the function gives or a text that says what failed, seconds), in the order of the names."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.testing._internal.common_methods_invocations", "transformers",
                                    "torchshard.public", "__main__"])  # fmt: skip
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda name: _in_a_process(context, run, name, limit), names)


def _in_a_process(context: Any, run: Callable[[str], Any], name: str, limit: float) -> tuple[str, Any, float]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_alone, args=(run, name, theirs))
    start = time.perf_counter()
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(limit) else f"no end within {limit:.0f} s"
    except EOFError:
        process.join(5)
        found = f"the process ended with {process.exitcode}"
    process.kill()
    process.join()
    return name, found, round(time.perf_counter() - start, 1)


def _alone(run: Callable[[str], Any], name: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    try:
        pipe.send(run(name))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({frame.filename}:{frame.lineno})")
