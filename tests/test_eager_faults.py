"""Eager calls of known kinds that differ between ranks: one error on every rank, without an abort."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import BACKENDS
from torchshard.testing import run_ranks

pytestmark = pytest.mark.waits

SECONDS = 3.0
Call = Callable[[], Any]


def ones(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=grad)


PAIRS: dict[str, tuple[Call, Call]] = {
    "dtype": (lambda: tsd.reduce(ones(4, dtype=torch.float16)), lambda: tsd.reduce(ones(4, dtype=torch.bfloat16))),
    "op": (lambda: tsd.all_reduce(ones(4)), lambda: tsd.all_reduce(ones(4), ReduceOp.MAX)),
    "gather dims": (lambda: tsd.gather(ones(4, 4), 0, size=8), lambda: tsd.gather(ones(4, 4), 1, size=8)),
    "all_reduce sizes": (lambda: tsd.all_reduce(ones(4)), lambda: tsd.all_reduce(ones(6))),
    "reduce sizes": (lambda: tsd.reduce(ones(400)), lambda: tsd.reduce(ones(600))),
    "broadcast sizes": (lambda: tsd.broadcast(ones(4)), lambda: tsd.broadcast(ones(6))),
    "broadcast sources": (lambda: tsd.broadcast(ones(4), 0), lambda: tsd.broadcast(ones(4), 1)),
    "all_gather sizes": (lambda: tsd.all_gather(ones(4), 0, size=8), lambda: tsd.all_gather(ones(6), 0, size=12)),
    "reduce_scatter sizes": (lambda: tsd.reduce_scatter(ones(4), 0), lambda: tsd.reduce_scatter(ones(8), 0)),
    "all_to_all dims": (
        lambda: tsd.all_to_all(ones(2, 4, 4), 0, 1, size=4),
        lambda: tsd.all_to_all(ones(2, 4, 4), 0, 2, size=4),
    ),
    "another call": (lambda: tsd.all_reduce(ones(4)), lambda: tsd.barrier()),
    "objects": (lambda: tsd.all_gather_object([1]), lambda: tsd.reduce(ones(4))),
    "scatter_from sizes": (lambda: tsd.scatter_from(ones(4), 0, 0), lambda: tsd.scatter_from(ones(8), 0, 0)),
    "gather_to": (lambda: tsd.gather_to(ones(4), 0, 0), lambda: tsd.gather_to(ones(4), 1, 0)),
}


def _swapped_backwards(odd: bool, make: Callable[[int], Tensor]) -> None:
    first, second = make(4), make(6)
    for loss in (second, first) if odd else (first, second):
        loss.sum().backward()


def _messages(odd: bool) -> None:
    """Sends a message of a known shape while the receiver expects another known shape."""
    rank = tsd.get_rank()
    for size in (4, 6):
        tsd.send(ones(size), 1) if rank == 0 else tsd.recv((size,), 0) if rank == 1 else None
    tsd.send(ones(4), 1) if rank == 0 else tsd.recv((6,), 0) if rank == 1 else tsd.reduce(ones(1))


BACKWARDS: dict[str, Callable[[bool], None]] = {
    "copy": lambda odd: _swapped_backwards(odd, lambda n: tsd.copy(ones(n, grad=True))),
    "scatter": lambda odd: _swapped_backwards(odd, lambda n: tsd.scatter(ones(n, grad=True), 0)),
    "broadcast": lambda odd: _swapped_backwards(odd, lambda n: tsd.broadcast(ones(n, grad=True))),
    "all_reduce": lambda odd: _swapped_backwards(odd, lambda n: tsd.all_reduce(ones(n, grad=True))),
    "messages": _messages,
}


def _same_shapes(odd: bool) -> None:
    """Two sums of one shape in a different order, which only their lines of code reveal."""
    a, b = ones(4), ones(4) * 2
    if odd:
        tsd.reduce(b), tsd.reduce(a)
    else:
        tsd.reduce(a), tsd.reduce(b)


def _outcome(call: Call) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _faults(rank: int, mode: bool | None) -> dict[str, tuple[str, str, float]]:
    found = {}
    world = dist.get_world_size()
    names = [*PAIRS, *BACKWARDS, *(["order"] if mode else [])]
    for name in names:
        dist.barrier()
        tsd.debug(None)
        tsd.init_process_group(timeout_seconds=SECONDS)
        tsd.debug(mode)
        odd = rank == world - 1
        if name in PAIRS:
            for call in PAIRS[name] * 2:
                call()
            found[name] = _outcome(PAIRS[name][odd])
        else:
            fault = BACKWARDS.get(name, _same_shapes)
            found[name] = _outcome(lambda: fault(odd))  # noqa: B023
        try:
            tsd.destroy_process_group()
        except ts.ShardError:
            pass
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [None, True])
def test_each_difference_is_an_error_on_every_rank(mode: bool | None, backend: str) -> None:
    ranks = run_ranks(_faults, 2, mode, backend=backend)
    for name in ranks[0]:
        kinds, texts, seconds = zip(*(found[name] for found in ranks), strict=True)
        assert set(kinds) <= {"DistributedError", "InputError"}, f"{name}: {kinds}\n{texts}"
        assert max(seconds) < SECONDS + 1, f"{name}: {seconds}"
    if mode:
        assert "from one line" in ranks[0]["order"][1] and ":8 in _same_shapes" in ranks[0]["order"][1]


def _fine(rank: int) -> list[bool]:
    """Calls that ranks may make from different lines, even with `debug(True)`."""
    tsd.init_process_group(timeout_seconds=SECONDS)
    tsd.debug(True)
    found = []
    for source in range(2):
        if rank == source:
            got = tsd.broadcast(ones(3) * source, source)
        else:
            got = tsd.broadcast(ones(3) * 7, source)
        found.append(bool((got == source).all()))
    for size in (4, 6, 4):
        if rank == 0:
            tsd.send(ones(size), 1)
        else:
            found.append(tsd.recv((size,), 0).shape == (size,))
    return found


def test_one_sided_calls_may_come_from_any_line() -> None:
    assert all(map(all, run_ranks(_fine, 2)))
