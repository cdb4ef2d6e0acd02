"""The backend "memory": PyTorch's parallel training on it, faults, time-outs and leaks."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchshard as ts
from tests.helpers import NO_MEMORY, nightly
from tests.test_shared_memory import _told
from torchshard import distributed as tsd
from torchshard.testing import PATIENCE, run_ranks

pytestmark = pytest.mark.skipif(bool(NO_MEMORY), reason=NO_MEMORY)


# --- PyTorch's parallel training on it --------------------------------------------------------------------------------


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()


def _others(rank: int, world: int) -> dict[str, float]:
    """Returns the largest errors of DDP, FSDP, functional collectives and DTensor."""
    x = torch.randn(2 * world, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    own, whole = x[2 * rank : 2 * rank + 2], _mlp()
    whole(x).square().mean().backward()
    expected = [p.grad for p in whole.parameters()]
    mesh = init_device_mesh("cpu", (world,))
    replicated, sharded = DistributedDataParallel(_mlp()), fully_shard(_mlp(), mesh=mesh)
    functional = _mlp()
    for model in (replicated, sharded, functional):
        model(own).square().mean().backward()
    averaged = [dist._functional_collectives.all_reduce(p.grad, "avg", mesh) for p in functional.parameters()]
    found = {
        "ddp": [p.grad for p in replicated.parameters()],
        "fsdp": [p.grad.full_tensor() for p in sharded.parameters()],
        "functional": averaged,
    }
    product = distribute_tensor(x, mesh, [Shard(1)]) @ distribute_tensor(whole[0].weight.data.T, mesh, [Shard(0)])
    errors = {"dtensor": product.redistribute(mesh, [Replicate()]).to_local() - x @ whole[0].weight.data.T}
    errors |= {
        name: torch.cat([(a - b).flatten() for a, b in zip(gradients, expected, strict=True)])
        for name, gradients in found.items()
    }
    return {name: float(error.detach().abs().max()) for name, error in errors.items()}


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_fully_shard_dtensor_and_functional_collectives_run_on_it(world: int) -> None:
    for found in run_ranks(_others, world, world, backend="memory"):
        assert max(found.values()) < 1e-10, found


# --- faults, time-outs and leaks --------------------------------------------------------------------------------------


def _differing(rank: int) -> list[str]:
    odd = rank == 1
    faults: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(3 + odd)),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.double if odd else torch.float)),
        lambda: dist.all_reduce(torch.ones(3)) if odd else dist.barrier(),
        lambda: dist.broadcast(torch.ones(3), src=int(odd)),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        lambda: dist.send(torch.ones(3), 0) if odd else dist.recv(torch.ones(4), 1),
    ]
    found = [_told(fault)[0] for fault in faults]
    x = torch.ones(2)
    dist.all_reduce(x)  # a difference that all ranks raised doesn't end the group
    return [*found, str(x.tolist())]


def test_a_difference_is_told_on_every_rank() -> None:
    first, second = run_ranks(_differing, 2, backend="memory")
    assert first[:5] == second[:5] and all("the ranks make different calls: rank 0: " in text for text in first[:5])
    assert second[5] == "" and "a message of torch.float32, 3 elements; rank 0: a message of" in first[5]
    assert first[-1] == second[-1] == "[2.0, 2.0]"


def _rides(rank: int) -> tuple[list[int], list[str]]:
    tsd.init_process_group()
    group = tsd.group.lookup("model")
    assert group.memory is not None
    torch.manual_seed(0)
    model = ts.shard(_mlp(), {"0": "column", "2": "row"})
    x = torch.randn(3, 6, dtype=torch.float64)
    posts = []
    for _ in range(3):
        for _ in range(2):  # the second call records its backward
            model(x).sum().backward()
        before = group.memory.begun
        y = model(x)
        between = group.memory.begun
        y.sum().backward()
        posts += [between - before, group.memory.begun - between]
    told = []
    for wrong in (torch.randn(3, 6, dtype=torch.float64) + rank, torch.randn(3 + rank, 6, dtype=torch.float64)):
        with pytest.raises(ts.InputError) as caught:
            model(wrong)
        told.append(str(caught.value).partition("\n")[0])
        model(x).sum().backward()
    return posts, told


def test_what_precedes_a_call_goes_with_its_data() -> None:
    (posts, told), second = run_ranks(_rides, 2, backend="memory")
    assert (posts, told) == second
    assert posts == [1, 0] * 3  # one sum in forward; none in backward, since the input needs no gradient
    assert told == [
        "the ranks were called with inputs of the same shape but different values",
        "the ranks were called with different arguments",
    ]


def _goes_on(rank: int) -> list[str]:
    tsd.init_process_group()
    model = ts.shard(_mlp(), {"0": "column", "2": "row"})
    told = []

    def call() -> None:
        model(torch.ones(3, 6, dtype=torch.float64)).square().sum().backward()

    for eager in (tsd.all_reduce, tsd.broadcast, lambda x: tsd.all_gather(x, 0)):
        call()
        with pytest.raises(ts.DistributedError) as caught:
            call() if rank else eager(torch.ones(3))
        told.append(str(caught.value).partition("\n")[0])
        call()
    return told


def test_calls_go_on_after_one_that_met_something_else() -> None:
    expected = ["the ranks are about to do different things"] * 3
    assert run_ranks(_goes_on, 2, backend="memory") == [expected] * 2


def _survives(rank: int, how: signal.Signals, seconds: float) -> tuple[str, float, str]:
    """Sends a signal to rank 1 during its calls; returns this rank's error, its seconds and its values."""
    group = dist.new_group(backend="memory", timeout=timedelta(seconds=2 * PATIENCE))
    x = torch.ones(100_000)
    if rank == 1 and not os.fork():
        time.sleep(seconds)
        os.kill(os.getppid(), how)
        os._exit(0)

    def calls() -> None:
        while True:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group)

    first, took = _told(calls)
    if "has ended" in first:
        assert "rank 1: its process has ended" in _told(lambda: dist.send(x, 1))[0]
    dist.destroy_process_group()
    return first, took, str(x.unique().tolist())


@pytest.mark.parametrize(("how", "text"), [("SIGKILL", "its process has ended"), ("SIGSTOP", "the time was up")])
def test_survivors_of_a_rank_are_told(how: str, text: str) -> None:
    _check_survivors(how, text, 0.1)


@nightly(but=["0", "1", "2", "3"])
@pytest.mark.parametrize("moment", range(200))
def test_survivors_of_a_rank_killed_at_any_moment_are_told(moment: int) -> None:
    _check_survivors("SIGKILL", "its process has ended", random.Random(moment).uniform(0.01, 0.05))


def _check_survivors(how: str, text: str, seconds: float) -> None:
    given = getattr(signal, how), seconds
    for found, took, values in run_ranks(_survives, 3, *given, lost=1, seconds=60.0, backend="memory"):
        assert "rank 1: " in found and text in found and values == "[1.0]"
        assert took < 5 * PATIENCE


def _left_alone(rank: int) -> tuple[str, float]:
    group = dist.new_group(backend="memory")
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    if rank == 0:
        dist.destroy_process_group(group)
        return "", 0.0
    return _told(lambda: dist.all_reduce(x, group=group))


def test_a_rank_hears_that_another_has_ended_the_group() -> None:
    text, seconds = run_ranks(_left_alone, 2, backend="memory")[1]
    assert "rank 0: it has ended the group" in text and seconds < 10


def _mappings() -> int:
    """Returns the number of segments that this process has mapped; if it is 0, none may be open."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:torchshard")
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    opened = sum("memfd:torchshard" in os.readlink(link) for link in links if link.is_symlink())
    assert bool(mapped) == bool(opened)
    return mapped


def _ends(rank: int) -> tuple[int, int, int]:
    before = _mappings()
    groups = [dist.new_group(backend="memory") for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(100), group=group)
    used = _mappings()
    for group in groups:
        dist.destroy_process_group(group)
    del groups, group
    return before, used, _mappings()


def test_the_memory_of_a_group_goes_with_it() -> None:
    for before, used, after in run_ranks(_ends, 2, backend="memory"):
        assert used == before + 6 and after == before


def _pages() -> int:
    """Returns the resident bytes of the segments that this process has mapped."""
    lines = Path("/proc/self/smaps").read_text().split("\n")
    names = [i for i, line in enumerate(lines) if "memfd:torchshard" in line]
    return sum(int(next(line for line in lines[i:] if line.startswith("Rss:")).split()[1]) * 1024 for i in names)


def _grows(rank: int) -> list[int]:
    found = []
    for _ in range(3):
        for i in range(200):
            dist.all_reduce(torch.ones(1000 + i))
            dist.broadcast(torch.ones(5000), 0)
        dist.all_reduce(torch.ones(1 << 24))  # 64 MiB
        dist.all_reduce(torch.ones(10))
        dist.barrier()
        found.append(_pages())
    return found


def test_memory_stays_flat_and_large_ranges_go_back() -> None:
    for first, second, third in run_ranks(_grows, 2, backend="memory"):
        assert third <= second + (1 << 14) <= first + (1 << 15) and third < 1 << 25


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    ]
    _fields_ += [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def _allocated() -> int:
    """Returns the bytes that the C library has allocated."""
    asked = ctypes.CDLL(None).mallinfo2
    asked.restype = _Mallinfo
    found = asked()
    return found.uordblks + found.hblkhd


def _trains_long(rank: int) -> list[tuple[int, int, int, int]]:
    tsd.init_process_group()
    model = ts.shard(_mlp(), {"0": "column", "2": "row"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, found = torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), []
    for step in range(10_000):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tsd.all_reduce(torch.ones(100 * (step % 10)))
        optimizer.step()
        if step % 1000 == 999:
            gc.collect()
            found.append((sys.getallocatedblocks(), _allocated(), _pages(), len(os.listdir("/proc/self/fd"))))
    return found


def test_memory_stays_flat_over_ten_thousand_steps() -> None:
    for samples in run_ranks(_trains_long, 2, seconds=600, backend="memory"):
        blocks, held, *others = zip(*samples, strict=True)
        for numbers, per_step in ((blocks, 0.1), (held, 10.0)):
            # the median, because a test runner sometimes allocates too
            grown = statistics.median(b - a for a, b in itertools.pairwise(numbers[1:]))
            assert grown < 1000 * per_step
        assert all(len(set(numbers)) == 1 for numbers in others)


def _launches(rank: int) -> list[list[float]]:
    mine = torch.full((3,), rank + 1.0)
    dist.all_reduce(mine)
    inner = tsd.launch(_launched, 2, (float(rank),))
    dist.all_reduce(mine)
    return [*inner, mine.tolist()]


def _launched(number: float) -> list[float]:
    tsd.init_process_group("memory")
    x = torch.tensor([number + tsd.get_rank()])
    dist.all_reduce(x)
    return x.tolist()


def test_a_rank_may_launch_ranks_of_its_own() -> None:
    assert run_ranks(_launches, 2, backend="memory") == [[[1.0], [1.0], [6.0] * 3], [[3.0], [3.0], [6.0] * 3]]


def _with_another_timeout(rank: int) -> list[str]:
    world: Any = dist.group.WORLD
    found = []
    if rank:
        world.set_timeout(timedelta(seconds=0.2))
        for call in (lambda: dist.recv(torch.ones(1), 0), dist.barrier):
            text, seconds = _told(call)
            found.append(text)
            assert seconds < PATIENCE * 2
        _store().set("told", "")
    else:
        _store().wait(["told"])
    return found


def _store() -> dist.Store:
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def test_a_timeout_that_is_set_later_counts_for_all_calls() -> None:
    _, found = run_ranks(_with_another_timeout, 2, backend="memory")
    assert ["the time was up" in text for text in found] == [True, True]


def _waits(rank: int) -> float:
    if rank == 0:
        time.sleep(2)
    begin = time.process_time()
    dist.barrier()
    return time.process_time() - begin


def test_a_rank_that_waits_takes_no_core() -> None:
    _, waiting = run_ranks(_waits, 2, backend="memory")
    assert waiting < 0.1


def _forks(rank: int) -> str:
    reading, writing = os.pipe()
    if not os.fork():
        calls = (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.send(torch.ones(1), 1 - rank))
        os.write(writing, "; ".join(_told(call)[0] for call in calls).encode())
        dist.destroy_process_group()
        os._exit(0)
    os.wait()
    x = torch.ones(2)
    dist.all_reduce(x)
    return f"{os.read(reading, 1000).decode()} {x.tolist()}"


def test_a_fork_of_a_rank_is_none() -> None:
    for text in run_ranks(_forks, 2, backend="memory"):
        assert text.count("a fork of a rank, and no rank itself") == 2 and text.endswith("[2.0, 2.0]")
