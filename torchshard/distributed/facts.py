"""Verifies that facts are the same on all ranks, by one small all-reduce of their digests; if not, all raise one error.

    verify_equal(group, facts, ...)      waits for the other ranks' digests
    begin_verifying(group, facts, ...)   only starts: the call of a sharded model computes meanwhile
    run_on_all_ranks(group, make, ...)   if `make` fails on one rank, all raise

The facts themselves are sent only if the digests differ, for the error. `consistency` verifies that ranks make the same
call before they communicate; here they have, and compare what they know.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from torchshard.core.errors import DistributedError, ShardError
from torchshard.core.hashing import hash_text
from torchshard.distributed.call_site import call_site
from torchshard.distributed.consistency import SAME_CALL, gather_padded, memory_of, verify_following_call
from torchshard.distributed.group import Group
from torchshard.distributed.memory import MemoryProcessGroup, Numbers, call_of
from torchshard.distributed.wire import begin, finish, settle

T = TypeVar("T")
Facts = Mapping[str, str]
"""Facts that must match on all ranks, by the names that errors use."""
TOLERANCE = 1e-3
"""The maximum relative difference of numbers that are equal up to rounding."""
COMPARING = "comparing what the ranks do"
_COMPARED = "compared"
"""The key of the sentence that names the comparison."""


class Near(NamedTuple):
    """A number that must match on all ranks up to rounding."""

    value: float = 0.0
    scale: float = 0.0
    """The magnitude that differences are relative to."""
    name: str = ""


def verify_equal(
    group: Group,
    facts: Facts,
    error: Callable[..., ShardError],
    what: str,
    *,
    unlike: int = 0,
    near: Near | None = None,
    attempt: str = SAME_CALL,
) -> bool:
    """Verifies that facts match on all ranks: `begin_verifying`, then the wait."""
    return begin_verifying(group, facts, error, what, unlike=unlike, near=near, attempt=attempt)()


def begin_verifying(
    group: Group,
    facts: Facts | Callable[[], Facts],
    error: Callable[..., ShardError],
    what: str,
    *,
    digest: int | None = None,
    unlike: int = 0,
    near: Near | None = None,
    attempt: str = SAME_CALL,
    rides: bool = False,
) -> Callable[[], bool]:
    """Starts to compare digests with the other ranks.

    Args:
        facts: must match on all ranks; a function is called only if the digests differ.
        what: the error's first line.
        digest: the hash of the facts, if they are a function.
        unlike: a number that may differ between ranks.
        near: a number that may differ by rounding. If it differs by more, the error reports it at
            its name's position among the facts, or first.
        attempt: the error's last line.
        rides: whether ranks that communicate through memory may attach the digests to their next
            data. They may send nothing else until the comparison ends (`wire.settling`).

    Returns:
        a function that waits for the other ranks' digests and returns whether `unlike` is the same
        on all ranks. If the digests differ, it raises `error` on every rank; its `where` names the
        first unequal fact.
    """
    settle()
    if group.size == 1:
        return lambda: True
    verify_following_call(group, lambda: "comparing what the sharded model does")
    digest = hash_text(repr(facts)) if digest is None else digest
    value, scale, name = near or Near()
    rides = rides and group.memory is not None
    bounds = _begin_bounds(group, digest, unlike, _ordered(value), _ordered(scale), rides=rides)

    def compare() -> bool:
        highest, lowest = bounds()
        largest, spread = _number(highest[3]), _number(highest[2]) - _number(lowest[2])
        close = spread <= TOLERANCE * largest
        if highest[0] == lowest[0] and close:
            return highest[1] == lowest[1]

        def shown() -> Facts:
            found = facts() if callable(facts) else facts
            first = {} if name in found else {name: ""}
            return found if close else first | dict(found) | {name: f"{value:.12g}"}

        raise _unequal(group, shown, error, what, attempt)

    return compare


def _unequal(
    group: Group, facts: Callable[[], Facts], error: Callable[..., ShardError], what: str, attempt: str
) -> ShardError:
    site = {_COMPARED: what, "at": call_site()}
    data = json.dumps(site | dict(facts())).encode()
    (longest,), _ = _begin_bounds(group, len(data))()  # not `gather_bytes`: it would verify calls, which may differ too
    rows = gather_padded(group, COMPARING, data.ljust(longest))
    everyone = [json.loads(memory_of(row)) for row in rows]
    sites = [f"rank {rank}: {found.pop('at')}" for rank, found in enumerate(everyone)]
    if len({found.pop(_COMPARED) for found in everyone}) > 1:  # for example, a save on one rank and a call on another
        what, where = "the ranks do different things", "; ".join(sites)
        return DistributedError(what, where=where, why="each of these lines is a call of all ranks", attempt=SAME_CALL)
    return error(what, where=_first_difference(everyone), why=_shown(everyone), attempt=attempt)


def run_on_all_ranks(group: Group, make: Callable[[], T], error: Callable[..., ShardError], what: str) -> T:
    """Returns `make()` if it succeeds on every rank; if it fails on one, all raise.

    Args:
        error, what: the error for the ranks on which it succeeded; see `verify_equal`.
    """
    result, failure = None, None
    try:
        result = make()
    except Exception as caught:
        failure = caught
    outcome = {"what it gave": "what was asked for" if failure is None else str(failure)}
    verify_equal(group, outcome, error, what, attempt="what the error of the rank that failed says")
    if failure is not None:
        raise failure
    return cast(T, result)


def _begin_bounds(group: Group, *numbers: int, rides: bool = False) -> Callable[[], tuple[list[int], list[int]]]:
    """Starts to find the highest and the lowest of each number; returns the wait for both."""
    if isinstance(group.control, MemoryProcessGroup):
        told = Numbers(group.control.calls, call_of(f"{COMPARING}\n{call_site()}"), numbers)
        if not rides:
            begin(group, COMPARING, told.begin)

        def of_all() -> tuple[list[int], list[int]]:
            finish(group, COMPARING, told)
            each = list(zip(*told.of_all, strict=True))
            return [*map(max, each)], [*map(min, each)]

        return of_all
    bounds = torch.tensor([*numbers, *(-n for n in numbers)], device="cpu")
    work = begin(group, COMPARING, dist.all_reduce, bounds, dist.ReduceOp.MAX, group.control, async_op=True)

    def highest_and_lowest() -> tuple[list[int], list[int]]:
        finish(group, COMPARING, work)
        # one all-reduce of maxima gives both: the lowest is minus the highest of the negated numbers
        reduced = bounds.tolist()
        return reduced[: len(numbers)], [-n for n in reduced[len(numbers) :]]

    return highest_and_lowest


def _ordered(number: float) -> int:
    """Returns an integer ordered like the float, so one integer all-reduce bounds floats too."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return bits if bits >= 0 else -(bits & (2**63 - 1))


def _number(ordered: int) -> float:
    """Inverts `_ordered`."""
    bits = ordered if ordered >= 0 else -ordered | -(2**63)
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def _first_difference(everyone: list[dict[str, str]]) -> str:
    keys = list(dict.fromkeys(key for facts in everyone for key in facts))
    return next((key for key in keys if len({facts.get(key) for facts in everyone}) > 1), "an unnamed fact")


def _shown(everyone: list[dict[str, str]]) -> str:
    key = _first_difference(everyone)
    return "; ".join(f"rank {rank}: {facts.get(key, 'nothing'):.200}" for rank, facts in enumerate(everyone))
