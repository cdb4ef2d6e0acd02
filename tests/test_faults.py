"""A fault between ranks raises one error on every surviving rank in time, without wrong numbers, aborts or hangs.

Most faults run one after the other in one set of processes, each in new groups; faults that end or stop a process
run in separate processes.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import BACKENDS
from torchshard.nn.functional import parallel_cross_entropy, parallel_embedding, parallel_linear
from torchshard.testing import run_ranks

pytestmark = pytest.mark.waits

SECONDS = 3.0
"""The groups' timeout."""
SHORT_SECONDS = 1.0
"""The groups' timeout for faults that make a rank wait in vain."""
WAIT_SECONDS = 120.0

Fault = Callable[[bool, int, int], Any]
"""(whether this rank is the odd one, its rank, the number of ranks) -> the rank's calls."""


def ones(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=grad)


def _backward(x: Tensor, other: Tensor | None = None) -> None:
    for loss in (x, other):
        if loss is not None:
            loss.sum().backward()


def _swapped(odd: bool, first: Callable[[], Any], second: Callable[[], Any]) -> None:
    for call in (second, first) if odd else (first, second):
        call()


def _skips_the_backward(odd: bool) -> None:
    y = tsd.copy(ones(4, grad=True))
    if not odd:
        _backward(y)


def _backwards_swapped(odd: bool) -> None:
    a, b = tsd.copy(ones(4, grad=True)), tsd.copy(ones(5, grad=True))
    _backward(*((b, a) if odd else (a, b)))


def _asynchronous(odd: bool) -> None:
    flying: list[Any] = []
    calls = [lambda: tsd.all_reduce(ones(4), async_op=True), lambda: tsd.all_gather(ones(4), 0, size=8, async_op=True)]
    for call in reversed(calls) if odd else calls:
        flying.append(call())
    for handle in flying:
        handle.wait()


def _message(rank: int, sent: Tensor, expected: Tensor) -> None:
    if rank == 0:
        tsd.send(sent, 1)
    if rank == 1:
        tsd.recv(expected, 0)
    tsd.reduce(ones(2))


def _two_messages(rank: int) -> None:
    if rank == 0:
        for handle in [tsd.isend(ones(4), 1), tsd.isend(ones(5), 1)]:
            handle.wait()
    if rank == 1:
        later, first = tsd.irecv((5,), 0), tsd.irecv((4,), 0)
        first.wait(), later.wait()
    tsd.reduce(ones(2))


def _model(**options: Any) -> ts.ShardedModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return ts.shard(model, {"0": "column", "2": "row"}, **options)


def _model_loses_a_backward(odd: bool) -> None:
    loss = _model()(ones(2, 4, grad=True)).sum()
    if not odd:
        loss.backward()


def _model_beside_a_call(odd: bool) -> None:
    model = _model(example_inputs=(ones(2, 4),))
    _swapped(odd, lambda: model(ones(2, 4)), lambda: tsd.reduce(ones(2)))


FAULTS: dict[str, Fault] = {
    "shape": lambda odd, r, n: tsd.reduce(ones(5 if odd else 4)),
    "shape of as many elements": lambda odd, r, n: tsd.reduce(ones(3, 4) if odd else ones(2, 6)),
    "transposed shape": lambda odd, r, n: tsd.all_reduce(ones(4, 2) if odd else ones(2, 4)),
    "dtype": lambda odd, r, n: tsd.reduce(ones(4, dtype=torch.float64 if odd else torch.float32)),
    "dtype of the same size": lambda odd, r, n: tsd.reduce(ones(4, dtype=torch.int32 if odd else torch.float32)),
    "half of another kind": lambda odd, r, n: tsd.reduce(ones(4, dtype=torch.float16 if odd else torch.bfloat16)),
    "ReduceOp": lambda odd, r, n: tsd.all_reduce(ones(4), tsd.ReduceOp.MAX if odd else tsd.ReduceOp.MIN),
    "sum and maximum": lambda odd, r, n: tsd.all_reduce(ones(4), tsd.ReduceOp.MAX if odd else tsd.ReduceOp.SUM),
    "sum and mean": lambda odd, r, n: tsd.all_reduce(ones(4), tsd.ReduceOp.AVG if odd else tsd.ReduceOp.SUM),
    "order": lambda odd, r, n: _swapped(odd, lambda: tsd.reduce(ones(4)), lambda: tsd.reduce(ones(2, 2))),
    "order of two kinds": lambda odd, r, n: _swapped(odd, lambda: tsd.reduce(ones(4)), lambda: tsd.gather(ones(4))),
    "a call skipped": lambda odd, r, n: (odd or tsd.reduce(ones(4)), tsd.gather(ones(4), 0)),
    "the last call skipped": lambda odd, r, n: odd or tsd.reduce(ones(4)),
    "a call too many": lambda odd, r, n: (tsd.reduce(ones(4)), odd and tsd.reduce(ones(4))),
    "a call in place of another": lambda odd, r, n: (tsd.gather if odd else tsd.all_gather)(ones(4), 0),
    "copy skipped": lambda odd, r, n: (odd or tsd.copy(ones(4)), tsd.barrier()),
    "gather: other dims": lambda odd, r, n: tsd.gather(ones(4, 4), 0 if odd else 1),
    "gather: the other dim's size": lambda odd, r, n: tsd.gather(ones(4, 3 if odd else 4), 0),
    "gather: sizes of no split": lambda odd, r, n: tsd.gather(ones(6 if odd else 4), 0),
    "gather: another size=": lambda odd, r, n: tsd.gather(ones(4), 0, size=4 * n + odd),
    "gather: a size= that is not so": lambda odd, r, n: tsd.gather(ones(3 if odd else 4), 0, size=4 * n),
    "scatter: shape": lambda odd, r, n: tsd.scatter(ones(8 + odd), 0),
    "reduce_scatter: dim": lambda odd, r, n: tsd.reduce_scatter(ones(4, 4), int(odd)),
    "all_to_all: dims": lambda odd, r, n: tsd.all_to_all(ones(4, 4, 4), 0, 2 if odd else 1),
    "broadcast: src": lambda odd, r, n: tsd.broadcast(ones(4), int(odd)),
    "broadcast: shape": lambda odd, r, n: tsd.broadcast(ones(4 + odd), 0),
    "reduce_to: dst": lambda odd, r, n: tsd.reduce_to(ones(4), int(odd)),
    "gather_to: dst": lambda odd, r, n: tsd.gather_to(ones(4), int(odd), 0),
    "scatter_from: src": lambda odd, r, n: tsd.scatter_from(ones(4), int(odd), 0),
    "scatter_from: shape": lambda odd, r, n: tsd.scatter_from(ones(4 + odd), 0, 0),
    "barrier and a call": lambda odd, r, n: tsd.barrier() if odd else tsd.reduce(ones(4)),
    "a gradient on some": lambda odd, r, n: tsd.copy(ones(4, grad=not odd)),
    "a backward skipped": lambda odd, r, n: _skips_the_backward(odd),
    "backwards in other order": lambda odd, r, n: _backwards_swapped(odd),
    "asynchronous order": lambda odd, r, n: _asynchronous(odd),
    "a dim that one lacks": lambda odd, r, n: tsd.scatter(ones(4, 4), 2 if odd else 1),
    "a rank that is none": lambda odd, r, n: tsd.broadcast(ones(4), n if odd else 0),
    "an expanded tensor in place": lambda odd, r, n: tsd.reduce(ones(1).expand(4) if odd else ones(4)),
    "in vain: message: shape": lambda odd, r, n: _message(r, ones(4), ones(5)),
    "in vain: message: fewer": lambda odd, r, n: _message(r, ones(5), ones(4)),
    "in vain: message: dtype": lambda odd, r, n: _message(r, ones(4), ones(4, dtype=torch.int32)),
    "in vain: messages: order": lambda odd, r, n: _two_messages(r),
    "in vain: message: not received": lambda odd, r, n: (tsd.send(ones(4), 1) if r == 0 else None, tsd.reduce(ones(2))),
    "in vain: message: not sent": lambda odd, r, n: (tsd.recv((4,), 0) if r == 1 else None, tsd.reduce(ones(2))),
    "objects and a tensor": lambda odd, r, n: tsd.all_gather_object([1]) if odd else tsd.reduce(ones(4)),
    "broadcast_object: src": lambda odd, r, n: tsd.broadcast_object([r], int(odd)),
    "an object that may not travel": lambda odd, r, n: tsd.all_gather_object(print if odd else 1, allow_pickle=False),
    "an object that can't be pickled": lambda odd, r, n: tsd.all_gather_object((lambda: 1) if odd else 1),
    "linear: a gradient on some": lambda odd, r, n: parallel_linear(ones(2, 4, grad=not odd), ones(3, 4), dim=1),
    "embedding: other ids": lambda odd, r, n: parallel_embedding(torch.tensor([1 * odd]), ones(2, 3), dim=0),
    "embedding: an id of no row": lambda odd, r, n: parallel_embedding(torch.tensor([9 * odd]), ones(2, 3), dim=0),
    "cross entropy: other labels": lambda odd, r, n: parallel_cross_entropy(
        ones(1, 2), torch.tensor([int(odd)]), dim=1
    ),
    "linear: another size": lambda odd, r, n: parallel_linear(ones(2, 4), ones(3 + odd, 4), dim=1, size=3 * n),
    "model: an input's shape": lambda odd, r, n: _model()(ones(2 + odd, 4)),
    "model: an input's values": lambda odd, r, n: _model()(ones(2, 4) * (1 + odd)),
    "model: a backward skipped": lambda odd, r, n: _model_loses_a_backward(odd),
    "model: beside a call": lambda odd, r, n: _model_beside_a_call(odd),
    "debug on one rank": lambda odd, r, n: tsd.debug(True) if odd else tsd.reduce(ones(4)),
    "in vain: late": lambda odd, r, n: (odd and time.sleep(SHORT_SECONDS * 1.5), tsd.reduce(ones(4))),
}

OF_THE_INPUT = (
    *("gather: sizes of no split", "gather: a size= that is not so"),
    "linear: another size",
    *("model: an input's shape", "model: an input's values"),
)
"""Faults with equal calls, but arguments that don't fit."""

EARLY = "messages, the receiver long before"
FINE: dict[str, Callable[[int], bool]] = {
    "every other column": lambda n: torch.equal(tsd.all_reduce(ones(4, 6)[:, ::2]), ones(4, 3) * n),
    "strides of the rank's own": lambda n: torch.equal(
        tsd.all_reduce(ones(4, 6).mT if tsd.get_rank() else ones(6, 4)), ones(6, 4) * n
    ),
    "expanded": lambda n: torch.equal(tsd.all_reduce(ones(1).expand(4)), ones(4) * n),
    "of no elements": lambda n: tsd.all_reduce(ones(0, 3)).shape == (0, 3),
    "refused on all, then on": lambda n: _refused() and torch.equal(tsd.all_reduce(ones(2)), ones(2) * n),
    "messages": lambda n: _exchanged(),
    "messages around, sends waited for first": lambda n: _around(n, sends_first=True),
    "messages around, received first": lambda n: _around(n, sends_first=False),
    "more kinds than are remembered": lambda n: _many_kinds(n),
    EARLY: lambda n: _early(),
}


def _refused() -> bool:
    try:
        tsd.scatter(ones(2), 3)
    except ts.InputError:
        return True
    return False


def _exchanged() -> bool:
    """Sends two messages each way, and waits for them in another order."""
    if tsd.get_rank() > 1:
        return True
    other = 1 - tsd.get_rank()
    sent = [tsd.isend(ones(3) * i, other) for i in range(2)]
    got = [tsd.irecv((3,), other) for _ in range(2)]
    while not got[1].is_completed():
        time.sleep(0.001)
    held = [handle.wait() for handle in reversed(got)]
    return [h[0].item() for h in held] == [1.0, 0.0] and all(h.wait() is not None for h in sent)


def _around(ranks: int, *, sends_first: bool) -> bool:
    """Each rank sends to the next, twice with different shapes, and begins to receive before or after."""
    rank, right = tsd.get_rank(), True
    for size in (2, 3):
        x, before = torch.full((size,), float(rank)), (rank - 1) % ranks
        got = None if sends_first else tsd.irecv(x, before)
        sent = tsd.isend(x, (rank + 1) % ranks)
        got = got or tsd.irecv(x, before)
        handles = (sent, got) if sends_first else (got, sent)
        right &= all(handle.wait() is not None for handle in handles) and bool((got.wait() == before).all())
    return right


def _early() -> bool:
    """The receiver begins before the sender by more than the timeout, and waits only then."""
    rank = tsd.get_rank()
    got = tsd.irecv((2,), 1) if rank == 0 else None
    time.sleep(SECONDS * 1.2)
    if rank == 1:
        tsd.send(ones(2), 0)
    return got is None or torch.equal(got.wait(), ones(2))


def _many_kinds(ranks: int) -> bool:
    """Makes more kinds of calls than are remembered, and more on some ranks than on others."""
    with mock.patch("torchshard.distributed.consistency.MAX_VERIFIED", 8):
        for size in range(1, 24):
            if tsd.get_rank() < 2:
                _around(2, sends_first=True)
                (tsd.send if tsd.get_rank() else tsd.recv)(ones(size), 1 - tsd.get_rank())
            if not torch.equal(tsd.gather(tsd.scatter(ones(size), 0), 0), ones(size)):
                return False
    return True


Outcome = tuple[str, str, float]
"""(type of the error, its text, seconds)."""


def _outcome(call: Callable[[], Any]) -> Outcome:
    """Runs a fault and destroys the group; returns the error that this rank sees."""
    began = time.monotonic()
    try:
        try:
            call()
        finally:
            tsd.destroy_process_group()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _seconds(fault: str) -> float:
    return SHORT_SECONDS if fault.startswith("in vain") else SECONDS


def _all_faults(rank: int) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for name, fault in FAULTS.items():
        dist.barrier()
        tsd.debug(None)
        tsd.init_process_group(timeout_seconds=_seconds(name))
        tsd.debug(True) if name != "debug on one rank" else None
        world = tsd.get_group_size()
        found[name] = _outcome(lambda: fault(rank == world - 1, rank, world))  # noqa: B023
    for mode in (True, None, False):
        tsd.init_process_group(timeout_seconds=SECONDS)
        tsd.debug(mode)
        for name, right in FINE.items():
            if name == EARLY and mode is not True:
                continue  # slow, and only debug(True) waits for a comparison
            found[f"{name}, debug({mode})"] = ("" if right(tsd.get_group_size()) else "wrong", "", 0.0)
        tsd.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [2, 4])
def test_each_fault_is_one_error_on_every_rank(world: int, backend: str) -> None:
    ranks = run_ranks(_all_faults, world, backend=backend)
    for name in FAULTS:
        kinds, texts, seconds = zip(*(found[name] for found in ranks), strict=True)
        assert set(kinds) == {"InputError" if name in OF_THE_INPUT else "DistributedError"}, f"{name}: {kinds}\n{texts}"
        assert all("rank" in text for text in texts), f"{name}: {texts}"
        late = SHORT_SECONDS * 1.5 if name.endswith("late") else 0.0
        assert max(seconds) < _seconds(name) + 1 + late, f"{name}: {seconds}"
    assert "node _2_linear_reduce" in ranks[0]["model: a backward skipped"][1]
    for found in ranks:
        assert {name: kind for name, (kind, _, _) in found.items() if name not in FAULTS and kind} == {}


# --- a rank that is stopped, killed or gone --------------------------------------------------------------------------


def _leave(how: str) -> None:
    if how == "exits":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP if how == "is stopped" else signal.SIGKILL)


def _survivor(rank: int, world: int, how: str, mode: bool | None, backend: str, folder: str) -> None:
    """Runs a step that rank 1 leaves early; writes this rank's outcome, and exits like any process."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=world)
    tsd.init_process_group(timeout_seconds=SECONDS)
    tsd.debug(mode)
    for _ in range(2):  # so the next calls are of a known kind, which the default does not compare
        tsd.all_reduce(ones(1000))
    if rank == 1:
        _leave(how)
    outcome = _outcome(lambda: [tsd.all_reduce(ones(1000)) for _ in range(3)])
    Path(folder, f"{rank}.part").write_bytes(pickle.dumps(outcome))
    Path(folder, f"{rank}.part").rename(Path(folder, f"{rank}.pkl"))


LOSSES = [
    *((world, how, True) for world in (2, 4) for how in ("is stopped", "is killed")),
    (2, "exits", True),
    *((4, how, None) for how in ("is stopped", "is killed")),
]
"""(ranks, fate of rank 1, debug mode)."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world, how, mode", LOSSES)
def test_survivors_of_a_rank_name_it(world: int, how: str, mode: bool | None, backend: str, tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    args = (world, how, mode, backend, str(tmp_path))
    processes = [context.Process(target=_survivor, args=(rank, *args)) for rank in range(world)]
    for process in processes:
        process.start()
    survivors = [rank for rank in range(world) if rank != 1]
    try:
        for rank in survivors:
            processes[rank].join(WAIT_SECONDS)
        ended = [processes[rank].exitcode for rank in survivors]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert ended == [0] * len(survivors), "a survivor hung, or was aborted"
    for rank in survivors:
        kind, text, seconds = pickle.loads((tmp_path / f"{rank}.pkl").read_bytes())
        assert kind == "DistributedError" and seconds < SECONDS + 1, f"rank {rank}: {kind} after {seconds} s\n{text}"
        assert re.search(r"ranks? ([\d, ]+, )?1\b", text) and "test_faults.py" in text, text
