"""The backend "memory": ranks of one machine exchange the same values as by gloo, and no call hangs."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor

from tests.helpers import NO_MEMORY
from torchshard import distributed as tsd
from torchshard.distributed.launch import free_port
from torchshard.distributed.memory import Unreachable, reductions, segment
from torchshard.distributed.memory import groups as memory_backend
from torchshard.distributed.memory.regions import ALIGNMENT, Regions
from torchshard.distributed.memory.segment import Address, OtherSegment, OwnSegment
from torchshard.testing import PATIENCE, run_ranks

pytestmark = pytest.mark.skipif(bool(NO_MEMORY), reason=NO_MEMORY)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)
SHAPES = ((), (0, 3), (1,), (3, 5), (7, 2, 4), (40_000,))


def _in_any_order(rank: int, world: int) -> list[bool]:
    """Starts calls of two groups at once, and waits for them in a different order."""
    groups = [None, dist.new_group(backend="memory")]
    tensors = [torch.full((50 + i,), float(i + rank)) for i in range(40)]
    works = [dist.all_reduce(x, group=groups[i % 2], async_op=True) for i, x in enumerate(tensors)]
    for i in torch.randperm(40, generator=torch.Generator().manual_seed(rank)).tolist():
        works[i].wait()
    return [bool((x == sum(i + r for r in range(world))).all()) for i, x in enumerate(tensors)]


def test_calls_under_way_end_in_any_order() -> None:
    assert all(map(all, run_ranks(_in_any_order, 3, 3, backend="memory")))


def _not_waited_for(rank: int) -> list[list[float]]:
    """Starts more calls than a ring can store; a barrier then ensures that the earlier calls have ended."""
    found = []
    for i in range(1500):
        x = torch.full((2,), float(rank + i))
        dist.all_reduce(x, async_op=True)
        found.append(x)
        if i % 100 == 99:
            dist.barrier()
    return [x.tolist() for x in found]


def test_a_call_that_nobody_waits_for_ends_in_a_later_one() -> None:
    expected = [[2.0 * i + 1] * 2 for i in range(1500)]
    assert run_ranks(_not_waited_for, 2, backend="memory") == [expected] * 2


def _polled(rank: int) -> list[list[float]]:
    """A completed call has its data; a receive that is kept and never waited for completes too."""
    x, received, kept = torch.full((2,), 1.0 + rank), torch.zeros(2), torch.zeros(2)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    if rank:
        message, other = dist.irecv(received, 0), dist.irecv(kept, 0)
        while not message.is_completed():
            time.sleep(0.001)
    else:
        dist.send(torch.full((2,), 7.0), 1)
        dist.send(torch.full((2,), 8.0), 1)
    dist.barrier()
    dist.barrier()
    return [x.tolist(), received.tolist(), kept.tolist()] if rank == 0 or other else []


def test_what_is_complete_is_there() -> None:
    first, second = run_ranks(_polled, 2, backend="memory")
    assert first == [[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]] and second == [[3.0, 3.0], [7.0, 7.0], [8.0, 8.0]]


def _by_two_threads(rank: int) -> list[list[float]]:
    x = torch.full((2,), 1.0 + rank)
    if rank:
        time.sleep(0.3)
    work, found = dist.all_reduce(x, async_op=True), list[list[float]]()

    def waits() -> None:
        work.wait()
        found.append(x.tolist())

    threads = [threading.Thread(target=waits) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_may_wait_for_one_call() -> None:
    assert run_ranks(_by_two_threads, 2, backend="memory") == [[[3.0, 3.0]] * 3] * 2


def _interrupted(rank: int) -> list[Any]:
    x = torch.full((2,), 1.0 + rank)
    if rank:
        time.sleep(0.5)
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    work.wait()
    return x.tolist()


def test_a_wait_that_was_interrupted_goes_on() -> None:
    assert run_ranks(_interrupted, 2, backend="memory") == [[3.0, 3.0]] * 2


def _out_of_step(rank: int) -> list[Any]:
    """If nobody waits for a differing call, a later wait raises; the calls keep their order."""
    dist.all_reduce(torch.ones(3 + rank), async_op=True)
    if rank:
        time.sleep(0.3)
    found = []
    for i in range(3):
        x = torch.full((2,), i + 1.0)
        text, _ = _told(lambda: dist.all_reduce(x))  # noqa: B023
        found.append((text, x.tolist()))
    return found


def test_a_failure_that_nobody_waits_for_is_told() -> None:
    for found in run_ranks(_out_of_step, 2, backend="memory"):
        assert "different calls" in found[0][0] and found[0][1] == [2.0, 2.0]
        assert found[1:] == [("", [4.0, 4.0]), ("", [6.0, 6.0])]


def _misfits(rank: int) -> list[str]:
    two, odd = torch.ones(2), rank == 1
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather([torch.empty(2 + 2 * odd) for _ in range(2)], two),
        lambda: dist.gather(two, None if odd else [torch.empty(3)] * 2, dst=0),
        lambda: dist.scatter(torch.empty(3), None if odd else [torch.ones(5)] * 2, src=0),
        lambda: dist.reduce_scatter(torch.zeros(2), [torch.ones(3)] * 2),
        lambda: dist.all_gather_into_tensor(torch.empty(4, dtype=torch.int32), two),
        lambda: dist.reduce_scatter_tensor(torch.empty(1, dtype=torch.int32), two),
        lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)),
        lambda: dist.all_to_all([torch.empty(2), torch.empty(2 + odd)], [torch.ones(2), torch.ones(2)]),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint16)),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
    ]
    found = [_told(call)[0] for call in calls]
    x = torch.ones(2)
    dist.all_reduce(x)
    return [*found, str(x.tolist())]


def test_tensors_that_do_not_fit_are_told_on_every_rank() -> None:
    for found in run_ranks(_misfits, 2, backend="memory"):
        assert all(found) and found[-1] == "[2.0, 2.0]", found
        assert all(
            "refused" in text
            or "are not" in text
            or "not have" in text
            or "not reduce" in text
            or "which takes" in text
            for text in found[:-1]
        ), found


def _strided(rank: int) -> list[Any]:
    out = torch.zeros(4, 6)[:, ::2]
    dist.all_gather_into_tensor(out, torch.full((2, 3), 1.0 + rank))
    part = torch.empty(3, 2)
    dist.reduce_scatter_tensor(part, torch.arange(12.0).reshape(2, 6).T)
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    return [out.tolist(), part.tolist(), future.then(lambda done: done.value()[0].item()).wait()]


def test_pieces_of_strided_tensors() -> None:
    whole = torch.arange(12.0).reshape(2, 6).T * 2
    for rank, found in enumerate(run_ranks(_strided, 2, backend="memory")):
        assert found == [[[1.0] * 3] * 2 + [[2.0] * 3] * 2, whole[3 * rank : 3 * rank + 3].tolist(), 2.0]


def _messages_in_odd_ways(rank: int) -> list[Any]:
    group = dist.new_group(backend="memory", timeout=timedelta(seconds=0.5 * PATIENCE))
    found: list[Any] = []
    if rank:
        late = _told(lambda: dist.recv(torch.zeros(2), 0, group=group))[0]
        dist.barrier()
        x, y = torch.zeros(2), torch.zeros(2)
        found += ["the time was up" in late, dist.recv(x), dist.recv(y, 0), x.tolist(), y.tolist()]
    else:
        dist.barrier()
        dist.send(torch.ones(2), 1)
        dist.send(torch.full((2,), 2.0), 1)
    works = [dist.isend(torch.full((1,), float(i)), 1 - rank) for i in range(1500)]
    many = [torch.zeros(1) for _ in works]
    for x in many:
        dist.recv(x, 1 - rank)
    return [*found, [x.item() for x in many] == list(range(1500))]


def test_messages_that_come_late_from_any_rank_or_in_numbers() -> None:
    first, second = run_ranks(_messages_in_odd_ways, 2, backend="memory")
    assert first == [True] and second == [True, 0, 0, [1.0, 1.0], [2.0, 2.0], True]


def _one_open(rank: int) -> list[float]:
    first = torch.ones(2)
    work = dist.all_reduce(first, async_op=True)
    x = torch.ones(2)
    for _ in range(1300):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    work.wait()
    return first.tolist()


def test_a_call_that_is_waited_for_last_holds_up_none() -> None:
    assert run_ranks(_one_open, 2, backend="memory") == [[2.0, 2.0]] * 2


def _sums(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1000).to(dtype)
        for _ in range(20):
            time.sleep(float(torch.rand(())) * 1e-3)
            total = x.clone()
            dist.all_reduce(total)
            found.append(total)
    return found


def test_sums_are_the_same_bits_on_all_ranks_whoever_comes_first() -> None:
    first, *others = run_ranks(_sums, 3, 3, backend="memory")
    assert all(torch.equal(x, first[i // 20 * 20]) for i, x in enumerate(first))
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@given(st.lists(st.tuples(st.integers(1, 5 * ALIGNMENT), st.integers(0, 3)), max_size=40))
def test_ranges_are_apart_and_come_again(asked: list[tuple[int, int]]) -> None:
    regions, taken, floor = (
        Regions(ALIGNMENT, 64 * ALIGNMENT, lambda start, stop: None),
        dict[int, tuple[int, int]](),
        0,
    )
    for number, (size, read) in enumerate(asked):
        floor = min(floor + read, number)
        taken = {n: found for n, found in taken.items() if n >= floor}
        try:
            start = regions.take(size, 0, number, lambda channel, floor=floor: floor)
        except MemoryError:
            assert sum(stop - begin for begin, stop in taken.values()) > 20 * ALIGNMENT
            return
        assert start % ALIGNMENT == 0 and ALIGNMENT <= start <= 64 * ALIGNMENT - size
        assert all(start >= stop or start + size <= begin for begin, stop in taken.values())
        taken[number] = (start, start + size)


def test_halves_are_rounded_once() -> None:
    parts = [torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0])]
    total = torch.empty(1, dtype=torch.bfloat16)
    reductions.combine(total, [part.bfloat16() for part in parts], dist.ReduceOp(dist.ReduceOp.SUM))
    assert total == 258  # bfloat16 can't represent 257: rounded after each step, the sum would stay 256


def _told(call: Callable[[], object]) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def _segments() -> Iterator[Address]:
    own = OwnSegment()
    yield own.found_at._replace(token="00" * 16)  # the number of a process in another container
    yield own.found_at._replace(process=1 << 22)
    yield own.found_at._replace(descriptor=0)


def test_what_can_not_be_opened_is_unreachable() -> None:
    for address in _segments():
        with pytest.raises(Unreachable, match=f"/proc/{address.process}/fd/{address.descriptor}"):
            OtherSegment(address)


def _unreachable(rank: int) -> str:
    if rank == 1:
        segment.platform.machine = lambda: "riscv64"  # type: ignore[assignment]
    return _told(lambda: dist.new_group(backend="memory"))[0]


def test_all_ranks_hear_that_one_can_not() -> None:
    first, second = run_ranks(_unreachable, 2)
    assert first == second and "rank 1: shared memory of ranks knows x86_64, aarch64, this is riscv64" in first


def _by_default(rank: int, port: int, backend: str | None, hosts: int) -> list[str]:
    """Returns the backends of the world and of this rank's model-parallel and data-parallel groups of two."""
    dist.destroy_process_group()
    place = {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    host_of, exchanged = dict[int, int](), memory_backend.exchanged_by_store

    def noting_hosts(store: Any, key: str, rank: int, size: int, mine: Any, timeout: timedelta) -> list[Any]:
        found = exchanged(store, key, rank, size, mine, timeout)
        for other, address in enumerate(found if key == "address" else ()):
            host_of.setdefault(address[0], other * hosts // size)
        return found

    def opened(address: Address) -> OtherSegment:
        if host_of[address.process] != rank * hosts // 4:
            raise Unreachable("another machine")
        return OtherSegment(address)

    memory_backend.exchanged_by_store = noting_hosts
    memory_backend.OtherSegment = opened  # type: ignore[assignment, misc]
    tsd.init_process_group(2, backend=backend)
    assert tsd.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    return [dist.get_backend(group) for group in (None, tsd.get_group(), tsd.get_data_parallel_group())]


@pytest.mark.parametrize(
    ("backend", "hosts", "expected"),
    [
        (None, 1, ["memory", "memory", "memory"]),
        (None, 2, ["gloo", "memory", "gloo"]),
        ("gloo", 1, ["gloo", "gloo", "gloo"]),
    ],
)
def test_groups_of_one_machine_talk_through_memory(backend: str | None, hosts: int, expected: list[str]) -> None:
    assert run_ranks(_by_default, 4, free_port(), backend, hosts) == [expected] * 4


def test_others_can_not_write() -> None:
    own = OwnSegment()
    other = OtherSegment(own.found_at)
    own.publish(10, 7)
    other.wait(10, 7, time.monotonic())
    with pytest.raises(TypeError):
        other.memory[0] = 1
    with pytest.raises(TimeoutError):
        other.wait(10, 8, time.monotonic())
    assert copy.copy(other.words[10]) == 7
