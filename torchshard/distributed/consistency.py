"""Verifies that all ranks make the same call before they communicate; if not, all raise one error.

Backends react to mismatched calls with wrong numbers, aborts or hangs. Therefore each call has a
signature, the text of everything that must match on all ranks, and a key: calls with equal keys
need only one verification.

    verify_call(group, describe)         one header to each rank, before an eager call; also reports missing ranks
    verify_following_call(group, ...)    the same before a call that follows from an earlier one, if each is verified
    gather_bytes(group, call, encode)    all ranks' bytes, after a verification that sends their lengths

    DistributedError: the ranks are about to do different things
      where: reduce() of f32[2,8] (train.py:12 in step)
      why:   ranks 0, 2: reduce() of f32[2,8] (train.py:12 in step); rank 1: gather(dim=1) of f32[2,*] (train.py:15)
      try:   the same calls with the same shapes in the same order on every rank

The group's `CheckLevel` selects the verified calls. Unverified ones (by default, the backward of a
sharded model) go into a rolling hash, which the next verification includes.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import InputError, first_line
from torchshard.distributed.call_site import call_site, verified_site
from torchshard.distributed.group import CheckLevel, Group, own_group, registered_groups
from torchshard.distributed.handshake import different_error, exchange, header, missing_error
from torchshard.distributed.memory import call_of
from torchshard.distributed.wire import begin, finish, note, settle

MAX_VERIFIED = 4096
"""The maximum number of keys to remember."""
SAME_CALL = "the same call on every rank"
"""An error's default advice."""


# --- which calls are verified ----------------------------------------------------------------------------------------


def verifies_each(group: Group, device: torch.device) -> bool:
    """Returns whether ranks verify every eager call on a device, not only new signatures."""
    return group.level is CheckLevel.ALL or (group.level is CheckLevel.NEW and group.compares_first(device))


def needs_verification(group: Group, verified: set[Hashable], key: Hashable, device: torch.device) -> bool:
    """Returns whether to verify an eager call on a device; marks its key as verified."""
    if group.size == 1 or group.level is CheckLevel.OFF or (key in verified and not verifies_each(group, device)):
        return False
    remember(verified, key)
    return True


def remember(verified: set[Hashable], key: Hashable) -> None:
    """Adds a key to a bounded set, which all ranks clear at the same call: their keys are equal."""
    if len(verified) >= MAX_VERIFIED:
        verified.clear()
    verified.add(key)


def announces(group: Group) -> bool:
    """Returns whether data carries a call's text for verification, as through memory."""
    return group.memory is not None and group.level is CheckLevel.NEW


def announce(group: Group, describe_call: Callable[[], str]) -> None:
    """Attaches a call's text to its data, or to the next data, for the ranks to verify.

    Raises:
        DistributedError: this rank can't make the call, and others make a different one.
        Exception: from `describe_call`, if every rank raises the same.
    """
    settle()
    try:
        text = describe_call()
    except Exception:
        verify_call(group, describe_call)
        raise
    note(group, call_of(f"{text}\n{call_site()}"))


def note_unverified(group: Group, text: str) -> None:
    """Adds an unverified collective to the next verification; `text` is the same on all ranks."""
    if group.memory is not None:
        group.memory.note(call_of(text))
        return
    handshake = group.handshake
    handshake.unverified_hash = zlib.crc32(text.encode(), handshake.unverified_hash)
    handshake.recent_unverified.append(text)


def forward_site(group: Group) -> str:
    """Returns a call's line if the verification of its gradient reports it; else ''."""
    return verified_site(group) if group.level is CheckLevel.ALL else ""


class _Running(threading.local):
    call: str = ""


_running = _Running()


@contextlib.contextmanager
def running(call: str) -> Iterator[None]:
    """Marks this thread's collectives as part of a sharded model's call: it fixes their order."""
    before, _running.call = _running.call, call
    try:
        yield
    finally:
        _running.call = before


def running_call() -> str:
    """Returns the sharded model's call that this thread runs; '' outside of one."""
    return _running.call


# --- verifying a call ------------------------------------------------------------------------------------------------


def verify_call(
    group: Group,
    describe_call: Callable[[], str],
    value: Callable[[], int] = int,
    *,
    gradient_of: str = "",
    symmetric: bool = False,
) -> list[int]:
    """Verifies that all ranks make the same next call, and exchanges a number.

    Args:
        describe_call: returns the signature. If it raises because this rank can't make the call,
            all ranks learn of it.
        value: returns a number of this rank; called after `describe_call`.
        gradient_of: the line of the forward call, if this call is a gradient.
        symmetric: whether all ranks do the same; at level ALL, they must then call from one line.

    Returns:
        all ranks' values.

    Raises:
        DistributedError: the calls differ, or a rank timed out. Every rank that made a call raises.
        Exception: the exception of `describe_call`, if every rank raises the same.
    """
    settle()
    if group.size == 1:
        describe_call()
        return [value()]
    failure: Exception | None = None
    try:
        text = describe_call()
    except Exception as error:
        # raised later: the other ranks would wait in vain for this rank's header
        failure, text = error, f"refused: {first_line(error)}"
    site = f"backward of {gradient_of}" if gradient_of else verified_site(group)
    compared = _compared_text(group, text, site if symmetric else "")
    mine = header(text, site, 0 if failure else value(), compared)
    responses, missing = exchange(group, mine, group.timeouts.verify)
    here = f"{text} ({site})"
    if missing:
        raise missing_error(group, here, responses, missing) from failure
    if len({response.digest for response in responses.values()}) > 1:
        group.handshake.fail()
        raise different_error(group, here, responses) from failure
    group.handshake.recent_unverified.clear()
    if failure is not None:
        raise failure
    return [responses[rank].value for rank in range(group.size)]


def _compared_text(group: Group, text: str, site: str) -> str:
    """Returns the text to compare: signature, line (at level ALL), and hash of unverified calls."""
    line = site if group.level is CheckLevel.ALL else ""
    unverified = f" after {group.handshake.unverified_hash:x}" if group.handshake.unverified_hash else ""
    return f"{text} {line}{unverified}"


def verify_following_call(
    group: Group, describe_call: Callable[[], str], gradient_of: str = "", *, eager: torch.device | None = None
) -> bool:
    """Verifies a call that follows from an earlier one, if each call is verified.

    Args:
        eager: the device of the tensors, if the earlier call was eager.

    Returns:
        whether it was verified.
    """
    is_verified = group.level is CheckLevel.ALL or (eager is not None and verifies_each(group, eager))
    if is_verified and announces(group):
        announce(group, describe_call)
    elif is_verified:
        verify_call(group, describe_call, gradient_of=gradient_of)
    return is_verified


# --- all ranks' data -------------------------------------------------------------------------------------------------


def gather_bytes(group: Group, call: str, encode: Callable[[], bytes]) -> list[bytes]:
    """Gathers all ranks' bytes, of any lengths, by rank; if encoding fails on one, all raise."""
    data = b""

    def describe_call() -> str:
        nonlocal data
        data = encode()
        return call

    lengths = verify_call(group, describe_call, lambda: len(data))
    if group.size == 1:
        return [data]
    rows = gather_padded(group, call, data.ljust(max(*lengths, 1), b"\0"))
    return [memory_of(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def gather_padded(group: Group, call: str, data: bytes) -> Tensor:
    """Gathers all ranks' bytes, of equal length, as rows of a matrix."""
    rows = torch.empty(group.size, len(data), dtype=torch.uint8, device="cpu")
    gather, sent = dist.all_gather_single, torch.frombuffer(bytearray(data), dtype=torch.uint8)
    finish(group, call, begin(group, call, gather, rows.flatten(), sent, group=group.control, async_op=True))
    return rows


def memory_of(tensor: Tensor) -> bytes:
    """Returns the bytes of a contiguous CPU tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.itemsize) if tensor.numel() else b""


# --- the level --------------------------------------------------------------------------------------------------------


_LEVELS = {True: CheckLevel.ALL, None: CheckLevel.NEW, False: CheckLevel.OFF}


def debug(on: bool | None = True) -> None:
    """Sets the calls that ranks verify before they communicate; a mismatch raises on every rank.

    Within a group, all ranks must call it. It applies until the group is destroyed; before
    `init_process_group`, it sets the initial level of this process's groups.

    Args:
        on: True: each call, each collective node of a graph, and each step of a backward, at the
            cost of a message to each rank, and also the calling line (calls that send the same
            data in another order are different calls); None (the default level): each call of a
            sharded model, and eager calls: each with gloo, each new signature with NCCL; False:
            only calls that exchange sizes.

    Raises:
        DistributedError: not all ranks of the group call it.
        InputError: `on` is not one of the three.
    """
    if on is not None and not isinstance(on, bool):
        raise InputError(
            f"{on!r} does not say which calls to verify",
            where="debug(on)",
            attempt="debug(True), debug(None) or debug(False)",
        )
    group = own_group()
    verify_call(group, lambda: f"debug({on})")
    for each in registered_groups() or [group]:
        each.handshake.forget()
        each.handshake.level = _LEVELS[on]
