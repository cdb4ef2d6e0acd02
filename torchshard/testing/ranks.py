"""Real ranks: runs a function in several processes at once, with `torch.distributed` initialised.

Each rank is a fork of one process that has imported torchshard. So every run starts from the same state, and changes
and crashes of a rank end with it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from torchshard.distributed.memory import Unreachable
from torchshard.distributed.memory.segment import OtherSegment, OwnSegment

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = float(os.environ.get("TORCHSHARD_TEST_PATIENCE", "1"))
"""Factor on all time limits, for runs on a busy machine."""
_START_SECONDS = 60


def why_not_through_memory() -> str:
    """Returns the reason why processes of this machine can't communicate through memory; '' if they can."""
    try:
        own = OwnSegment()
        OtherSegment(own.found_at)
    except Unreachable as error:
        return str(error)
    return ""


@functools.cache
def default_backend() -> str:
    """Returns the fastest backend of this machine, memory or gloo. TORCHSHARD_TEST_BACKEND overrides it."""
    return os.environ.get("TORCHSHARD_TEST_BACKEND") or ("gloo" if why_not_through_memory() else "memory")


def on_ranks(
    ranks: int, *, seconds: float = 120.0, backend: str | None = None
) -> Callable[[Callable[Concatenate[int, P], T]], Callable[P, list[T] | None]]:
    """Decorates a module-level function to run on several ranks at each call.

        @on_ranks(2)
        def test_gradients(rank):
            ...

    Its first parameter is the rank; the others, such as pytest's fixtures, must be picklable.
    A call returns the results of all ranks, or None if all of them are None. It raises the errors of `run_ranks`.
    """

    def decorate(fn: Callable[Concatenate[int, P], T]) -> Callable[P, list[T] | None]:
        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> list[T] | None:
            results = run_ranks(_call_decorated, ranks, run, args, kwargs, seconds=seconds, backend=backend)
            return results if any(result is not None for result in results) else None

        signature = inspect.signature(fn)
        _, *rest = signature.parameters.values()
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]  # pytest reads it
        return run

    return decorate


def _call_decorated(
    rank: int, decorated: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:
    return vars(decorated)["__wrapped__"](rank, *args, **kwargs)


def run_ranks(
    fn: Callable[..., T],
    ranks: int,
    *args: object,
    seconds: float = 120.0,
    backend: str | None = None,
    lost: int | None = None,
) -> list[T]:
    """Calls `fn(rank, *args)` on several ranks, one thread each.

    Args:
        fn: a module-level function; its results are pickled.
        seconds: how long the ranks may take on an idle machine (TORCHSHARD_TEST_PATIENCE multiplies it).
        backend: a backend of `torch.distributed`; by default `default_backend()`.
        lost: a rank that stops or exits within `fn`, while the others continue.

    Returns:
        the results of all ranks but the lost one.

    Raises:
        RuntimeError: a rank failed (with its traceback), or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        given = fn, ranks, folder, args, backend or default_backend()
        processes = [context.Process(target=_rank, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        awaited = {rank: process for rank, process in enumerate(processes) if rank != lost}
        failure = _join(awaited, seconds * PATIENCE, until_one_fails=lost is None)
        for process in processes:
            process.kill()
            process.join()
        found = {rank: _read(Path(folder) / f"{rank}.pkl") for rank in awaited}
    failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in found.items() if not ok and text]
    if failure or not all(ok for ok, _ in found.values()):
        # report both: if a rank was killed, the others may report only that their connections were reset
        raise RuntimeError("\n".join([*failed, failure]).strip() or "a rank ended without a result")
    return [result for _, result in found.values()]


def _join(processes: Mapping[int, ForkServerProcess], seconds: float, *, until_one_fails: bool) -> str:
    """Waits for processes; returns the reason if one did not end by itself, else ''."""
    waiting, deadline = {process.sentinel: rank for rank, process in processes.items()}, time.monotonic() + seconds
    while waiting:
        ended = connection.wait(list(waiting), deadline - time.monotonic())
        if not ended:
            return f"ranks did not end within {seconds:g} s"
        for sentinel in ended:
            rank = waiting.pop(sentinel)  # type: ignore[arg-type]
            code = processes[rank].exitcode
            if code and until_one_fails:
                how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
                return f"process {rank} terminated with {how}"
    return ""


def _read(path: Path) -> tuple[bool, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else (False, "")


def _rank(
    rank: int, fn: Callable[..., object], ranks: int, folder: str, args: tuple[object, ...], backend: str
) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that a rank starts
    fail_on_bugs()
    timeout = timedelta(seconds=_START_SECONDS * PATIENCE)
    dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timeout)
    dist.barrier()  # the others would fail if a rank ended while they still connect to it
    try:
        result = (True, fn(rank, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    if result[0]:
        dist.destroy_process_group()
    os._exit(not result[0])  # gloo's threads, if there are any, may abort an ordinary exit on a loaded machine


class _Bugs(logging.Handler):
    """Raises if a bug has prevented a backward graph: training falls back to autograd, and stays correct."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(f"no graph of the backward: {kind}" in text for kind in _BUGS):
            raise RuntimeError(text)


_BUGS = "NameError", "UnboundLocalError", "AttributeError", "KeyError", "IndexError", "AssertionError", "TypeError"


def fail_on_bugs() -> None:
    """Makes this process raise if a bug in a rule or pass prevents a backward graph.

    Otherwise training falls back to autograd. The ranks of `run_ranks` call this function automatically.
    """
    for name in ("torchshard.runtime.step", "torchshard.checking.trials"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(_Bugs())
