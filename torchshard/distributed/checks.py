"""Before they communicate, ranks tell each other what they are about to do: a difference is one error on every rank.

Each rank sends each other one a header of fixed size over the group's control group, so that nothing can be cut, run
over, or wait for longer than the group's timeout:

    DistributedError: the ranks are about to do different things
      where: reduce() of f32[2,8] (train.py:12 in step)
      why:   ranks 0, 2: reduce() of f32[2,8] (train.py:12 in step); rank 1: gather(dim=1) of f32[2,*] (train.py:15)
      try:   the same calls with the same shapes in the same order on every rank

By default eager calls are compared: over gloo, which aborts where sizes differ, each call and each step of its
backward; over NCCL a call whose like is new. With `debug(True)` each collective node of a graph is compared too, each
step of its backward, and the line that calls: two losses that one rank reduces in another order are found.

What is not compared (the backward of a sharded model) goes into a rolling hash, which the next comparison includes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import linecache
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import DistributedError

if TYPE_CHECKING:
    from torchshard.distributed.groups import Group

HEADER_BYTES = 1024
GRACE_SECONDS = 0.5
"""After a collective has failed, how long a rank waits for what the others say about it."""
NO_TAG = 3
"""The tag of what is never sent."""
TIME_UP = "the time was up"
MANY_KINDS = 4096
"""So many kinds of calls are remembered."""
_OURS = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent.parent, Path(torch.__file__).parent))
"""Folders whose frames are not where a user called from."""


class Mode:
    """What is compared: all (True), eager calls (None), or nothing (False)."""

    on: bool | None = None


class _Running(threading.local):
    """What this thread runs."""

    call: str = ""
    """The call of a sharded model, whose collectives are fixed by its graph; '' outside of any."""


_running = _Running()


@contextlib.contextmanager
def running(call: str) -> Iterator[None]:
    """While it is open, collectives belong to this call of a sharded model."""
    before, _running.call = _running.call, call
    try:
        yield
    finally:
        _running.call = before


def running_call() -> str:
    """The call of a sharded model that this thread runs; '' where it runs none."""
    return _running.call


class Header(NamedTuple):
    """What one rank says of its next call."""

    digest: int
    """A hash of the whole call: what must be the same on all ranks."""
    value: int
    """A number that may differ."""
    call: str
    site: str
    """Where the call is made."""


def remember(met: set[Any], kind: Any) -> None:
    """A call that was compared. The set is the same on all who compare, so it is emptied at the same call."""
    if len(met) == MANY_KINDS:
        met.clear()
    met.add(kind)


def compares_each(group: Group) -> bool:
    """Whether each eager call is compared."""
    return Mode.on is True or (Mode.on is None and group.fragile)


def to_compare(group: Group, met: set[Any], kind: Any) -> bool:
    """Whether an eager call is to be compared; its kind then counts as met."""
    if group.size == 1 or Mode.on is False or (kind in met and not compares_each(group)):
        return False
    remember(met, kind)
    return True


def note(group: Group, text: str) -> None:
    """Notes a collective that is not compared, for the next comparison; `text` is the same on all ranks."""
    group.talk.history = zlib.crc32(text.encode(), group.talk.history)
    group.talk.recent.append(text)


def forget(group: Group) -> None:
    """After an error that all ranks see, each call counts as new."""
    group.talk.met.clear()
    group.talk.messages.clear()


def _fail(group: Group) -> None:
    group.talk.failed = True
    forget(group)


# --- comparing -------------------------------------------------------------------------------------------------------


def announce(group: Group, call: Callable[[], str], of: str = "", *, eager: bool = False) -> None:
    """Compares a call that follows from another one, where each is compared.

    Args:
        of: where the call was made whose gradient this is.
        eager: whether that was an eager call.
    """
    if Mode.on is True or (eager and compares_each(group)):
        meet(group, call, of=of)


def meet(
    group: Group, call: Callable[[], str], value: Callable[[], int] = int, of: str = "", *, symmetric: bool = False
) -> list[int]:
    """Compares the ranks' next calls, and tells all ranks' values.

    Args:
        call: says what must be the same on all ranks; where it raises, the others hear of it.
        value: a number of this rank's own, asked after `call`.
        symmetric: whether all ranks do the same, so that with `debug(True)` they call from the same line.

    Raises:
        DistributedError: the calls differ, or a rank made none within the timeout: on every rank that made one.
        Exception: what `call` raises, where it raises the same on every rank.
    """
    if group.size == 1:
        call()
        return [value()]
    failure: Exception | None = None
    try:
        text = call()
    except Exception as error:
        failure, text = error, f"refused: {_first_line(error)}"
    site = f"backward of {of}" if of else where_called()
    history = f" after {group.talk.history:x}" if group.talk.history else ""
    compared = f"{text} {site if symmetric and Mode.on is True else ''}{history}"
    header = _header(text, site, 0 if failure else value(), compared)
    heard, silent = _swap(group, header, group.timeout_seconds)
    here = f"{text} ({site})"
    if silent:
        raise _missing(group, here, heard, silent) from failure
    if len({header.digest for header in heard.values()}) > 1:
        _fail(group)
        raise _different(group, here, heard) from failure
    group.talk.recent.clear()
    if failure is not None:
        raise failure
    return [heard[rank].value for rank in range(group.size)]


def _different(group: Group, here: str, heard: Mapping[int, Header]) -> DistributedError:
    what, attempt = "the ranks are about to do different things", "the same calls with the same shapes and dtypes"
    if len({header.call for header in heard.values()}) > 1:
        return DistributedError(
            what, where=here, why=_told(heard), attempt=f"{attempt} in the same order on every rank"
        )
    if len({header.site for header in heard.values()}) > 1:
        advice = f"{attempt}, from one line: debug(True) takes calls from different lines for different calls"
        return DistributedError(what, where=here, why=_told(heard), attempt=advice)
    return DistributedError(
        "the ranks have done different things since they last compared",
        where=here,
        why=f"this rank: {'; '.join(group.talk.recent) or 'nothing'}",
        attempt="backward() and calls of models in the same order on every rank; debug(True) names the first of them",
    )


def failed(group: Group, call: str, error: Exception) -> DistributedError:
    """The error for a collective that torch.distributed gave up, with what the other ranks say about it."""
    heard, silent = ({}, {}) if group.control is None else _swap(group, _header(f"{call} failed", "", 0), GRACE_SECONDS)
    _fail(group)
    others = {rank: header for rank, header in heard.items() if rank != group.rank}
    nothing = f"no word from {_ranks(silent)}: stopped, dead, or in another call" if silent else ""
    return DistributedError(
        f"{call} failed on rank {group.rank} of {group.size}",
        where=where_called(),
        why="; ".join(text for text in (_reason(error), nothing, _told(others)) if text),
        attempt="look at what the silent ranks printed last; torchshard.distributed.debug(True) compares each call",
    )


def compare_with(
    group: Group, rank: int, call: str, site: str, tags: tuple[int, int]
) -> Callable[[float | None], None]:
    """Tells one rank what this one does, and gives what waits for its word (so many seconds; None: ever) and compares.

    Args:
        tags: of what is told, and of what is heard.

    Raises:
        DistributedError: it does something else, or said nothing in time.
    """
    mine, held = _header(call, site, 0), torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    silent = dict[int, str]()
    coming = _attempt(silent, rank, dist.irecv, held, group_src=rank, group=group.control, tag=tags[1])
    going = _attempt(silent, rank, dist.isend, _packed(mine), group_dst=rank, group=group.control, tag=tags[0])

    def compare(seconds: float | None) -> None:
        left = timedelta(days=1) if seconds is None else timedelta(seconds=seconds)
        for work in (coming, going):
            _attempt(silent, rank, _wait, work, left)
        if silent:
            raise _missing(group, f"{call} ({site})", {}, silent)
        heard = {group.rank: mine, rank: _unpacked(held)}
        if heard[rank].digest != mine.digest:
            _fail(group)
            raise DistributedError(
                "what is sent is not what is received",
                where=f"{call} ({site})",
                why=_told(heard),
                attempt="the same shape and dtype in send and recv, and as many of them, in the same order",
            )

    return compare


def late(group: Group, rank: int, call: str, site: str) -> DistributedError:
    """The error for a message that did not come in time."""
    return _missing(group, f"{call} ({site})", {}, {rank: TIME_UP})


def hang_up(group: Group) -> None:
    """Ends whatever waits for messages of a group, which can send none from then on."""
    for held in (group.control, group.process_group):
        if held is None or "cpu:gloo" not in dist.get_backend_config(held):
            continue
        for rank in (rank for rank in range(group.size) if rank != group.rank):
            with contextlib.suppress(RuntimeError):  # gloo closes all connections where one wait takes too long
                _wait(dist.irecv(torch.empty(1), group_src=rank, group=held, tag=NO_TAG), timedelta(milliseconds=1))
    for thread in group.talk.waiting:
        thread.is_done(GRACE_SECONDS)


def _missing(group: Group, here: str, heard: Mapping[int, Header], silent: Mapping[int, str]) -> DistributedError:
    _fail(group)
    reasons = "; ".join(dict.fromkeys(silent.values()))
    return DistributedError(
        f"{_ranks(silent)} did not come to a call within {group.timeout_seconds:g} s, or went away",
        where=here,
        why="; ".join([*([_told(heard)] if heard else []), f"no word from {_ranks(silent)} ({reasons})"]),
        attempt="the same calls, and the same debug(...), on every rank; a rank that is only slow needs a longer "
        "init_process_group(timeout_seconds=...)",
    )


def _swap(group: Group, mine: Header, seconds: float) -> tuple[dict[int, Header], dict[int, str]]:
    """Tells all ranks and hears all: (what each that spoke said, why each other one is silent)."""
    heard, silent = {group.rank: mine}, dict[int, str]()
    peers = [rank for rank in range(group.size) if rank != group.rank]
    sent, got = _packed(mine), {rank: torch.zeros(HEADER_BYTES, dtype=torch.uint8) for rank in peers}
    deadline = time.monotonic() + seconds

    coming = {r: _attempt(silent, r, dist.irecv, got[r], group_src=r, group=group.control) for r in peers}
    going = {r: _attempt(silent, r, dist.isend, sent, group_dst=r, group=group.control) for r in peers}
    for works in (coming, going):
        for rank, work in works.items():
            _attempt(silent, rank, _wait, work, timedelta(seconds=max(0.001, deadline - time.monotonic())))
    heard.update({rank: _unpacked(got[rank]) for rank in peers if rank not in silent})
    return heard, silent


def _attempt(silent: dict[int, str], rank: int, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A step of talking to a rank, which is silent from where it fails on."""
    try:
        return None if rank in silent else step(*args, **kwargs)
    except RuntimeError as error:
        silent[rank] = _reason(error)


def _wait(work: Any, left: timedelta) -> None:
    work.wait(left)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _reason(error: Exception) -> str:
    text = _first_line(error)
    if "imed out" in text:
        return TIME_UP
    return "a connection is closed" if "Connection" in text else text[:300]


def digest(text: str) -> int:
    """62 bits of a hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _header(call: str, site: str, value: int, compared: str = "") -> Header:
    return Header(digest(compared or call), value, call[:600], site[-200:])


def _packed(header: Header) -> Tensor:
    held = "\n".join([str(header.digest), str(header.value), header.site.replace("\n", " "), header.call]).encode()
    return torch.frombuffer(bytearray(held[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _unpacked(held: Tensor) -> Header:
    text = held.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    hashed, value, site, call = text.split("\n", 3)
    return Header(int(hashed), int(value), call, site)


def _told(heard: Mapping[int, Header]) -> str:
    said: dict[str, list[int]] = {}
    for rank, header in sorted(heard.items()):
        said.setdefault(f"{header.call} ({header.site})" if header.site else header.call, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in said.items())


def _ranks(ranks: Any) -> str:
    held = sorted(ranks)
    return f"rank{'s' if len(held) > 1 else ''} {', '.join(map(str, held))}"


# --- saying what and where -------------------------------------------------------------------------------------------


def forward_site() -> str:
    """Where a call is made, for the checks of its gradient."""
    return where_called() if Mode.on is True else ""


def where_called() -> str:
    """The graph node that is running, or the line of the caller's own code."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name.startswith("<eval_with_key>"):
            return f"node {linecache.getline(name, frame.f_lineno).partition(' = ')[0].strip()}"
        if not name.startswith(_OURS) and not name.startswith("<"):
            break
        frame = frame.f_back
    column = f":{_column(frame)}" if Mode.on is True else ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}{column} in {frame.f_code.co_name}"


def _column(frame: FrameType) -> int:
    """Where in its line a frame calls."""
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return position[2] or 0
