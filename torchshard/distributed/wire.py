"""Starts collectives of torch.distributed and waits for them, turning failures into one error type.

All data goes through these few functions; only headers (`handshake`) and group creation call
torch.distributed directly. PyTorch reports a broken connection, a time-out or a refused size as a
RuntimeError of the backend; here it becomes a DistributedError with the call and the other ranks'
reports.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchshard.core.errors import DistributedError
from torchshard.distributed.call_site import verified_site
from torchshard.distributed.group import CheckLevel, Group
from torchshard.distributed.handshake import collective_failed, different_error, headers_of, missing_error
from torchshard.distributed.memory import Call, Different, Stopped, start

T = TypeVar("T")
POLL_SECONDS = 1e-4


class Work(Protocol):
    """A communication under way: torch.distributed's Work, or a message (`messages.Transfer`)."""

    def wait(self) -> object:
        """Waits for the end."""

    def is_completed(self) -> bool:
        """Returns whether `wait` would return at once."""


def begin(group: Group, call: str, fn: Callable[..., T], /, *args: object, **kwargs: object) -> T:
    """Calls a function of torch.distributed that returns a Work.

    Raises:
        DistributedError: it fails at once.
    """
    carries = fn is start and _carries(group)
    if _open.comparison is not None and not carries and any(map(group.compares_first, _devices(args))):
        settle()
    try:
        return fn(*args, **kwargs)
    except RuntimeError as error:
        raise _error(group, call, error) from error


def _error(group: Group, call: str, error: RuntimeError) -> DistributedError:
    here = f"{call} ({verified_site(group)})"
    if isinstance(error, Different):
        settle()  # its error explains the difference better
        group.handshake.fail()
        return different_error(group, here, headers_of(error))
    if isinstance(error, Stopped) and error.rank != group.rank:
        return missing_error(group, here, {}, {error.rank: error.why})
    return collective_failed(group, call, error)


def _devices(args: Iterable[object]) -> list[torch.device]:
    return [argument.device for argument in args if isinstance(argument, Tensor)]


def finish(group: Group, call: str, work: Work | None, devices: Sequence[torch.device] = ()) -> None:
    """Waits for a Work; None is complete: torch.distributed returns it outside of a group.

    Args:
        devices: of the sent tensors; may be empty if they are on the CPU.

    Raises:
        DistributedError: a rank is gone, timed out, or sent something else.
    """
    if work is None:
        return
    try:
        work.wait()
        if group.level is CheckLevel.ALL and not all(map(group.aborts_on_mismatch, devices)):
            _wait_for_device(work, group.timeouts.collective)
    except RuntimeError as error:
        raise _error(group, call, error) from error
    if group.memory is not None:
        settle()


def _wait_for_device(work: Work, seconds: float) -> None:
    """Waits for the end on the host.

    NCCL's `wait` only blocks the device, and its watchdog would end the process.
    """
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"it did not end within {seconds:g} s")
        time.sleep(POLL_SECONDS)


def _begin_own(group: Group, fn: Callable[..., Work | None], /, *args: object, **kwargs: object) -> Work | None:
    """Begins a collective of torch.distributed on a group's own process group."""
    if group.memory is not None:
        return begin(group, fn.__name__, start, fn, group.memory, *args, **kwargs)
    return begin(group, fn.__name__, fn, *args, group=group.process_group, async_op=True, **kwargs)


def collective(group: Group, fn: Callable[..., Work | None], /, *args: object, **kwargs: object) -> None:
    """Runs a collective of torch.distributed on a group's own process group."""
    finish(group, fn.__name__, _begin_own(group, fn, *args, **kwargs), _devices(args))


def note(group: Group, call: Call) -> None:
    """Attaches a call's text to the next data, if ranks communicate through memory."""
    if not _carries(group):
        settle()
    if group.memory is not None:
        group.memory.note(call)


def _carries(group: Group) -> bool:
    """Returns whether a comparison waits to be sent with the group's next data."""
    return group.memory is not None and group.memory.rider is not None


class _Open(threading.local):
    comparison: Callable[[], object] | None = None


_open = _Open()


@contextlib.contextmanager
def settling(group: Group, comparison: Callable[[], object]) -> Iterator[None]:
    """Runs a block during a comparison between ranks, which ends with the block at the latest.

    If mismatched data would abort the ranks, the comparison ends before the first communication;
    through memory, before data of the first communication is used.

    Args:
        comparison: ends it; raises an error on every rank if the ranks differ.
    """
    _open.comparison = comparison
    try:
        yield
    except Exception:
        settle()  # if the ranks diverge, every rank raises: that explains more than the resulting error
        raise
    else:
        settle()
    finally:
        _open.comparison = None
        if group.memory is not None:
            group.memory.rider = None  # left by an interrupted call


def has_comparison() -> bool:
    """Whether this thread has begun a comparison that has not ended."""
    return _open.comparison is not None


def settle() -> None:
    """Ends this thread's comparison, if any."""
    comparison, _open.comparison = _open.comparison, None
    if comparison is not None:
        comparison()


class Pending(NamedTuple):
    """A communication under way, and the computation of its result."""

    result: Callable[[], Tensor]
    """Computes the result from received data, after the wait."""
    work: Work | None = None
    """None without communication."""
    group: Group | None = None
    """The group of a collective; None for a message, which raises its own errors."""
    call: str = ""
    """The called function of torch.distributed."""
    devices: Sequence[torch.device] = ()
    """The devices of the sent tensors."""

    @classmethod
    def of(
        cls,
        result: Callable[[], Tensor],
        group: Group,
        fn: Callable[..., Work | None],
        /,
        *args: object,
        **kwargs: object,
    ) -> Pending:
        """Starts a collective of torch.distributed on a group's own process group."""
        return cls(result, _begin_own(group, fn, *args, **kwargs), group, fn.__name__, _devices(args))

    def wait(self) -> Tensor:
        """Waits, and returns the result."""
        if self.group is not None:
            finish(self.group, self.call, self.work, self.devices)
        elif self.work is not None:
            self.work.wait()
        return self.result()


class Handle:
    """A communication that runs while this process computes."""

    def __init__(self, pending: Pending, result: Callable[[], Tensor] | None = None) -> None:
        self._pending, self._wait = pending, result or pending.wait
        self._tensor: Tensor | None = None

    def is_completed(self) -> bool:
        """Returns whether `wait` would return at once."""
        return self._tensor is not None or self._pending.work is None or self._pending.work.is_completed()

    def wait(self) -> Tensor:
        """Waits, and returns the result with its gradient; the same tensor each time."""
        if self._tensor is None:
            self._tensor = self._wait()
        return self._tensor
