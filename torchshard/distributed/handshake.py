"""Exchanges headers, in which ranks announce their next call, over the group's control group.

A header has a fixed size, so no backend can truncate it, write past it, or wait for it beyond the
deadline, whatever the ranks' calls are. `consistency` defines the comparisons.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import DistributedError, first_line
from torchshard.core.hashing import hash_text
from torchshard.distributed.call_site import verified_site
from torchshard.distributed.group import Group
from torchshard.distributed.memory import Call, Calls, Different, MemoryProcessGroup, Numbers, Stopped

T = TypeVar("T")
HEADER_BYTES = 1024
GRACE_SECONDS = 0.5
"""How long a rank waits for the other ranks' reports after a collective has failed."""
UNUSED_TAG = 3
"""A tag that messages never use: a receive with it ends only by its time-out."""
TIMED_OUT = "the time was up"


class Header(NamedTuple):
    """One rank's report of its next call."""

    digest: int
    """A hash of everything that must match on all ranks."""
    value: int
    """A number that may differ."""
    call: str
    site: str
    """The calling line, or the graph node."""


def header(call: str, site: str, value: int = 0, compared: str = "") -> Header:
    """Returns a rank's header, with its texts cut to fit.

    Args:
        compared: the text to hash, if it is more than `call`.
    """
    return Header(hash_text(compared or call), value, call[:600], site[-200:])


def exchange(group: Group, mine: Header, seconds: float) -> tuple[dict[int, Header], dict[int, str]]:
    """Sends this rank's header to all ranks and receives theirs.

    Returns:
        the received headers by rank, and the reason for each missing rank.
    """
    if isinstance(group.control, MemoryProcessGroup):
        return _exchange_in_memory(group.control.calls, mine, seconds)
    responses, missing = {group.rank: mine}, dict[int, str]()
    peers = [rank for rank in range(group.size) if rank != group.rank]
    sent, received = _packed(mine), {rank: _empty_header() for rank in peers}
    deadline = time.monotonic() + seconds

    receives = {r: _attempt(missing, r, dist.irecv, received[r], group_src=r, group=group.control) for r in peers}
    sends = {r: _attempt(missing, r, dist.isend, sent, group_dst=r, group=group.control) for r in peers}
    for works in (receives, sends):
        for rank, work in works.items():
            # a time-out of 0 would select torch.distributed's default
            _attempt(missing, rank, _wait, work, max(0.001, deadline - time.monotonic()))
    responses.update({rank: _unpacked(received[rank]) for rank in peers if rank not in missing})
    return responses, missing


def _exchange_in_memory(calls: Calls, mine: Header, seconds: float) -> tuple[dict[int, Header], dict[int, str]]:
    rank = calls.board.rank
    try:
        told = Numbers(calls, Call(mine.digest, f"{mine.call}\n{mine.site}".encode()), [mine.value]).begin()
        told.wait(seconds)
    except Different as error:
        return headers_of(error), {}
    except Stopped as error:
        others = [other for other in range(calls.board.size) if other != rank]
        return {rank: mine}, {other: error.why for other in (others if error.rank == rank else [error.rank])}
    return {other: mine._replace(value=value) for other, (value,) in enumerate(told.of_all)}, {}


def headers_of(error: Different) -> dict[int, Header]:
    """Returns the posted headers of calls that differ."""
    headers = dict[int, Header]()
    for rank, call in error.calls.items():
        text, _, site = call.text.decode(errors="replace").partition("\n")
        headers[rank] = Header(call.digest, 0, text, site)
    return headers


def exchange_with(
    group: Group, rank: int, call: str, site: str, tags: tuple[int, int]
) -> Callable[[float | None], None]:
    """Sends a header to one rank.

    Args:
        tags: of the sent header, and of the received one.

    Returns:
        a function that waits for the other rank's header for some seconds (None: no limit).

    Raises:
        DistributedError: the other rank does something else, or timed out.
    """
    mine, received = header(call, site), _empty_header()
    missing = dict[int, str]()
    receive = _attempt(missing, rank, dist.irecv, received, group_src=rank, group=group.control, tag=tags[1])
    send = _attempt(missing, rank, dist.isend, _packed(mine), group_dst=rank, group=group.control, tag=tags[0])

    def verify(seconds: float | None) -> None:
        left = timedelta(days=1).total_seconds() if seconds is None else seconds
        for work in (receive, send):
            _attempt(missing, rank, _wait, work, left)
        if missing:
            raise missing_error(group, f"{call} ({site})", {}, missing)
        responses = {group.rank: mine, rank: _unpacked(received)}
        if responses[rank].digest != mine.digest:
            group.handshake.fail()
            raise DistributedError(
                "a rank sends another message than the receiver expects",
                where=f"{call} ({site})",
                why=describe(responses),
                attempt="the same shape and dtype in send and recv, and as many of them, in the same order",
            )

    return verify


def different_error(group: Group, here: str, responses: Mapping[int, Header]) -> DistributedError:
    """Returns the error for ranks with different headers."""
    what, attempt = "the ranks are about to do different things", "the same calls with the same shapes and dtypes"
    if len({response.call for response in responses.values()}) > 1:
        advice = f"{attempt} in one order on every rank, which no set has"
        return DistributedError(what, where=here, why=describe(responses), attempt=advice)
    if len({response.site for response in responses.values()}) > 1:
        advice = f"{attempt}, from one line: debug(True) takes calls from different lines for different calls"
        return DistributedError(what, where=here, why=describe(responses), attempt=advice)
    return DistributedError(
        "the ranks have done different things since they last compared",
        where=here,
        why=f"this rank: {'; '.join(group.handshake.recent_unverified) or 'nothing'}",
        attempt="backward() and calls of models in the same order on every rank; debug(True) names the first of them",
    )


def collective_failed(group: Group, call: str, error: Exception) -> DistributedError:
    """Returns the error for a failed collective, with the other ranks' reports."""
    responses, missing = dict[int, Header](), dict[int, str]()
    if group.control is not None:
        responses, missing = exchange(group, header(f"{call} failed", ""), GRACE_SECONDS)
    group.handshake.fail()
    others = {rank: response for rank, response in responses.items() if rank != group.rank}
    nothing = f"no word from {_ranks(missing)}: stopped, dead, or in another call" if missing else ""
    return DistributedError(
        f"{call} failed on rank {group.rank} of {group.size}",
        where=verified_site(group),
        why="; ".join(text for text in (_reason(error), nothing, describe(others)) if text),
        attempt="look at what the silent ranks printed last; torchshard.distributed.debug(True) compares each call",
    )


def late_error(group: Group, rank: int, call: str, site: str) -> DistributedError:
    """Returns the error for a message that timed out."""
    return missing_error(group, f"{call} ({site})", {}, {rank: TIMED_OUT})


def missing_error(
    group: Group, here: str, responses: Mapping[int, Header], missing: Mapping[int, str]
) -> DistributedError:
    """Returns the error for ranks that sent no header."""
    group.handshake.fail()
    reasons = "; ".join(dict.fromkeys(missing.values()))
    return DistributedError(
        f"{_ranks(missing)} did not come to a call within {group.timeouts.verify:g} s, or went away",
        where=here,
        why="; ".join([*([describe(responses)] if responses else []), f"no word from {_ranks(missing)} ({reasons})"]),
        attempt="the same calls, and the same debug(...), on every rank; a rank that is only slow needs a longer "
        "init_process_group(timeout_seconds=...)",
    )


def abort_pending_receives(group: Group) -> None:
    """Ends every wait for messages of a group, which can't send any afterwards."""
    for process_group in (group.control, group.process_group):
        if isinstance(process_group, MemoryProcessGroup):
            process_group.shutdown()
        if process_group is None or "cpu:gloo" not in dist.get_backend_config(process_group):
            continue
        for rank in (rank for rank in range(group.size) if rank != group.rank):
            # gloo closes all connections of a group when one wait times out, which ends the other waits
            with contextlib.suppress(RuntimeError):
                unused = torch.empty(1, device="cpu")
                _wait(dist.irecv(unused, group_src=rank, group=process_group, tag=UNUSED_TAG), 0.001)
    for thread in group.handshake.waiter_threads:
        thread.is_done(GRACE_SECONDS)


def describe(responses: Mapping[int, Header]) -> str:
    """Returns 'ranks 0, 2: reduce() of f32[2,8] (train.py:12 in step); rank 1: ...'."""
    ranks_of: dict[str, list[int]] = {}
    for rank, response in sorted(responses.items()):
        text = f"{response.call} ({response.site})" if response.site else response.call
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _attempt(missing: dict[int, str], rank: int, step: Callable[..., T], *args: object, **kwargs: object) -> T | None:
    """Runs a step of an exchange with a rank, unless one failed; a failure marks it missing."""
    if rank in missing:
        return None
    try:
        return step(*args, **kwargs)
    except RuntimeError as error:
        missing[rank] = _reason(error)
        return None


def _wait(work: dist.Work | None, seconds: float) -> None:
    if work is not None:  # torch.distributed returns None to a process outside of the group
        work.wait(timedelta(seconds=seconds))


def _reason(error: Exception) -> str:
    text = first_line(error)
    if "imed out" in text:
        return TIMED_OUT
    return "a connection is closed" if "Connection" in text else text[:300]


def _empty_header() -> Tensor:
    return torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")


def _packed(mine: Header) -> Tensor:
    # the call comes last, because it may contain line breaks
    text = "\n".join([str(mine.digest), str(mine.value), mine.site.replace("\n", " "), mine.call]).encode()
    return torch.frombuffer(bytearray(text[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _unpacked(received: Tensor) -> Header:
    text = received.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    digest, value, site, call = text.split("\n", 3)
    return Header(int(digest), int(value), call, site)
