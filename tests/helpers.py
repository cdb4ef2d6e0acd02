"""Real ranks: a function run in several processes at once."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchshard as ts
from torchshard.distributed.memory import Unreachable
from torchshard.distributed.memory.segment import OtherSegment, OwnSegment

PATIENCE = float(os.environ.get("TORCHSHARD_TEST_PATIENCE", "1"))
"""How many times longer than on an idle machine ranks may take: for a run beside other work."""


def _why_not_through_memory() -> str:
    try:
        own = OwnSegment()
        OtherSegment(own.found_at)
    except Unreachable as error:
        return str(error)
    return ""


NO_MEMORY = _why_not_through_memory()
"""Why ranks of this machine can't talk through memory; '': they can."""
BACKEND = os.environ.get("TORCHSHARD_TEST_BACKEND", "gloo" if NO_MEMORY else "memory")
"""Of torch.distributed, by which ranks talk; `make nightly` runs the tests of what is sent on gloo, too."""
BACKENDS = ["gloo", pytest.param("memory", marks=pytest.mark.skipif(bool(NO_MEMORY), reason=NO_MEMORY))]


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout_seconds: float = 120.0, backend: str = BACKEND
) -> list[Any]:
    """Calls `fn(rank, *args)` on `world` ranks with `torch.distributed` initialised (one thread each).

    Each rank is a fork of one process that has imported torchshard (`tests/warm.py`): every call starts from the same
    state, and what its ranks change or break ends with them.

    `timeout_seconds` holds on an idle machine (`PATIENCE`).
    Returns each rank's result; `fn` must be importable, its result picklable.

    Raises:
        RuntimeError: a rank failed (with its traceback) or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank, (fn, world, folder, args, backend), nprocs=world, join=False, start_method="forkserver"
        )
        failure = _join(context, timeout_seconds * PATIENCE)
        found = [_read(Path(folder) / f"{rank}.pkl") for rank in range(world)]
    failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(found) if not ok and text]
    if failure or not all(ok for ok, _ in found):
        # both: of a killed rank the others may tell only that their connections were reset
        raise RuntimeError("\n".join([*failed, failure]).strip() or "a rank ended without a result")
    return [result for _, result in found]


def run_survivors(
    fn: Callable[..., Any], world: int, lost: int, *args: Any, timeout_seconds: float = 60.0, backend: str = BACKEND
) -> list[Any]:
    """As `run_ranks`, where rank `lost` stops or ends in `fn`; returns the results of the others, which go on.

    Raises:
        RuntimeError: one of them failed or did not end in time.
    """
    context = mp.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, fn, world, folder, args, backend)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_seconds * PATIENCE
        for rank, process in enumerate(processes):
            if rank != lost:
                process.join(max(0, deadline - time.monotonic()))
        ended = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        found = {rank: _read(Path(folder) / f"{rank}.pkl") for rank in range(world) if rank != lost}
    failed = [f"rank {rank}, exit code {ended[rank]}:\n{text}" for rank, (ok, text) in found.items() if not ok]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [result for _, result in found.values()]


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]


class _Allocated(TorchDispatchMode):
    """What the allocator has given out at most, as seen behind each op; profilers miss what gloo's threads set free."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = ctypes.CDLL("libc.so.6").mallinfo2
        self._asked.restype = _Mallinfo
        self.before = self.most = self._now()

    def _now(self) -> int:
        info = self._asked()
        return int(info.field_7 + info.field_4)  # uordblks and hblkhd: in use, on the heap and mapped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, self._now())
        return result


def allocated(step: Callable[[], None]) -> float:
    """The most that is allocated at once while a step runs, beside what was before."""
    with _Allocated() as allocated:
        step()
    return allocated.most - allocated.before


def largest(*errors: Any) -> float:
    """As `max`, of errors: NaN if one is, which `max` passes over."""
    found = [*map(float, errors if len(errors) > 1 else errors[0])]
    return next(filter(math.isnan, found), max(found))


def whole_gradient(parameter: Any) -> Tensor | None:
    """The gradient of a whole parameter of a sharded model; all ranks must call it."""
    if parameter.grad is None:
        return None
    whole: Tensor = parameter.ranks.gathered(parameter.grad.as_subclass(Tensor), parameter.sharding, parameter.whole)
    return whole


def gradient_error(sharded: nn.Module, model: nn.Module) -> float:
    """The largest difference of any parameter's gradient from the unsharded model's; infinite if one alone has it."""
    found = {name: whole_gradient(p) for name, p in sharded.named_parameters()}
    expected = {name: p.grad for name, p in model.named_parameters()}
    pairs = [(found[name], expected[name]) for name in expected]
    if any((a is None) != (b is None) for a, b in pairs):
        return math.inf
    return largest([0.0, *((a - b).abs().max().item() for a, b in pairs if a is not None and b is not None)])


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


def _join(context: Any, timeout_seconds: float) -> str:
    """Waits for all ranks and kills those that are left; returns why a rank did not end by itself, or ""."""
    deadline, failure = time.monotonic() + timeout_seconds, f"ranks did not end within {timeout_seconds:g} s"
    try:
        while time.monotonic() < deadline:
            if context.join(timeout=1):
                failure = ""
                break
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        failure = str(error)
    for process in context.processes:
        if process.is_alive():
            process.kill()
        process.join()
    return failure


def _read(path: Path) -> tuple[bool, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else (False, "")


class _Bugs(logging.Handler):
    """Fails tests in which a bug of ours loses a graph of the backward: training does without, and stays right."""

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        if any(f"no graph of the backward: {kind}" in told for kind in _BUGS):
            raise RuntimeError(told)


_BUGS = "NameError", "UnboundLocalError", "AttributeError", "KeyError", "IndexError", "AssertionError", "TypeError"


def watch_for_bugs() -> None:
    """Has tests of this process fail where a graph of the backward is lost by a bug."""
    for name in ("torchshard.runtime.step", "torchshard.checking.steps"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(_Bugs())


def _rank(rank: int, fn: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...], backend: str) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that a rank starts
    watch_for_bugs()
    dist.init_process_group(
        backend, f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60 * PATIENCE)
    )
    dist.barrier()  # a rank that ended while others still connect to it would fail them
    try:
        result = (True, fn(rank, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    if result[0]:
        dist.destroy_process_group()
    os._exit(not result[0])  # gloo's threads, if there are any, may abort an ordinary exit on a loaded machine
