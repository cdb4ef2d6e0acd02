"""Memory that one process writes and the other processes of its machine read.

Each rank of a group has a segment of its own: an anonymous file (`memfd_create`), which no name in a folder leads to,
which only processes of the same user can open, and which the kernel frees when the last process that maps it ends,
however it ends. A rank writes only to its own segment and maps the others' read-only: each segment has one writer.

A segment has more addresses than a machine has memory; only pages that were written exist.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
SEGMENT_BYTES = 1 << 36
WORD_BYTES = 8
_TOKEN_BYTES = 16
FIRST_WORD = _TOKEN_BYTES // WORD_BYTES
"""The words of a segment begin behind its token."""

SPINS = 1000
"""So often does a wait look, and let other threads of the machine run, before it sleeps."""
SLICE_SECONDS = 0.1
"""A sleeping wait looks this often whether the other rank still lives."""


def below_autograd(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function whose ops see tensors as a backend does: as memory, without autograd, subclasses and modes."""
    with (
        torch._C._AutoDispatchBelowADInplaceOrView(),
        torch._C.DisableTorchFunctionSubclass(),
        torch._C._DisableTorchDispatch(),
    ):
        return fn(*args, **kwargs)


class Machine(NamedTuple):
    """What differs between processors."""

    futex: int
    """The number of the system call."""
    membarrier: int | None
    """That of the call which orders memory; None where processors see each other's stores in their order."""


_MACHINES = {"x86_64": Machine(202, None), "aarch64": Machine(98, 283)}
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 2**31 - 1
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4
_syscall: Callable[..., int] = ctypes.CDLL(None).syscall if sys.platform == "linux" else lambda *_: -1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Unreachable(RuntimeError):
    """A process can't share memory with another one."""


class Gone(RuntimeError):
    """The process that owns a segment has ended."""


def supported() -> str:
    """Why this machine has no segments; '' if it has."""
    if sys.platform != "linux":
        return f"shared memory of ranks needs Linux, this is {sys.platform}"
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        return f"shared memory of ranks needs os.{missing[0]}, which this Python lacks"
    if platform.machine() not in _MACHINES:
        return f"shared memory of ranks knows {', '.join(_MACHINES)}, this is {platform.machine()}"
    return ""


class Address(NamedTuple):
    """By what another process finds a segment."""

    process: int
    descriptor: int
    token: str
    """A secret that the segment begins with: numbers of processes mean something else in another container."""


class _Mapping:
    """A segment in this process's addresses."""

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        """Maps the file of a descriptor.

        Raises:
            OSError: this process has no room for it.
        """
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.memory = mmap.mmap(descriptor, SEGMENT_BYTES, mmap.MAP_SHARED, access)
        self.memory.madvise(mmap.MADV_DONTDUMP)
        self.words = memoryview(self.memory).cast("q")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a tensor of memory that can't be written warns; nothing writes to it
            self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        self._tensors = dict[tuple[int, torch.dtype, torch.Size], Tensor]()
        self._pointers = dict[int, ctypes.c_void_p]()

    def pointer(self, word: int) -> ctypes.c_void_p:
        """The address of a word, as a system call takes it."""
        if word not in self._pointers:
            self._pointers[word] = ctypes.c_void_p(self.address + word * WORD_BYTES)
        return self._pointers[word]

    def tensor(self, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """The tensor that lies, contiguous, at an offset."""
        key = (offset, dtype, shape)
        found = self._tensors.get(key)
        if found is None:
            if len(self._tensors) >= 512:
                self._tensors.clear()
            found = self._bytes[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            self._tensors[key] = found
        return found


class OwnSegment(_Mapping):
    """A segment that this process writes."""

    def __init__(self) -> None:
        """Makes an empty one.

        Raises:
            Unreachable: this machine, or this process's limits, allow none.
        """
        if reason := supported():
            raise Unreachable(reason)
        try:
            descriptor = os.memfd_create("torchshard", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, SEGMENT_BYTES)
            super().__init__(descriptor, writable=True)
        except OSError as error:
            raise Unreachable(f"this process can't map {SEGMENT_BYTES >> 30} GiB of addresses: {error}") from error
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.memory[:_TOKEN_BYTES] = token
        self.found_at = Address(os.getpid(), descriptor, token.hex())
        machine = _MACHINES[platform.machine()]
        self._futex, self._barrier = machine.futex, machine.membarrier
        if self._barrier is not None:
            _syscall(self._barrier, _REGISTER_GLOBAL_EXPEDITED, 0, 0)

    def set(self, word: int, number: int) -> None:
        """Sets a word, after all reads and writes before it: who sees the number sees those done."""
        if self._barrier is not None:
            _syscall(self._barrier, _GLOBAL_EXPEDITED, 0, 0)
        self.words[word] = number

    def publish(self, word: int, number: int) -> None:
        """As `set`, and wakes the processes that wait for the word."""
        self.set(word, number)
        self.wake(word)

    def wake(self, word: int) -> None:
        """Wakes the processes that wait for a word, whatever it says."""
        _syscall(self._futex, self.pointer(word), _FUTEX_WAKE, _EVERYONE)

    def give_back(self, start: int, stop: int) -> None:
        """Frees the pages of a range, which then reads as zeros."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, stop // page * page
        if first < last:
            self.memory.madvise(mmap.MADV_REMOVE, first, last - first)


class OtherSegment(_Mapping):
    """A segment that another process writes."""

    def __init__(self, address: Address) -> None:
        """Maps the segment at an address.

        Raises:
            Unreachable: this process can't open it: it is on another machine, in another container, or of another user.
        """
        where = f"/proc/{address.process}/fd/{address.descriptor}"
        if reason := supported():
            raise Unreachable(reason)
        try:
            descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.pread(descriptor, _TOKEN_BYTES, 0).hex() != address.token:
                    raise Unreachable(f"{where} is something else here: another machine or container")
                super().__init__(descriptor, writable=False)
            finally:
                os.close(descriptor)
            life = os.pidfd_open(address.process)
        except OSError as error:
            raise Unreachable(f"{where} can't be opened here: {error.strerror}") from error
        self._poll = select.poll()
        self._poll.register(life, select.POLLIN)
        weakref.finalize(self, os.close, life)
        self._futex = _MACHINES[platform.machine()].futex

    def check_alive(self) -> None:
        """Checks that the process that writes still runs.

        Raises:
            Gone: it has ended.
        """
        if self._poll.poll(0):
            raise Gone("its process has ended")

    def wait(self, word: int, number: int, deadline: float, interrupted: Callable[[], None] | None = None) -> None:
        """Waits until a word is at least a number.

        Args:
            deadline: as `time.monotonic` counts.
            interrupted: called before each sleep; raises to end the wait.

        Raises:
            Gone: the process that writes has ended.
            TimeoutError: the time was up.
        """
        words = self.words
        for _ in range(SPINS):
            if words[word] >= number:
                return
            os.sched_yield()
        while (seen := words[word]) < number:
            left = deadline - time.monotonic()
            try:
                if interrupted is not None:
                    interrupted()
                self.check_alive()
                if left <= 0:
                    raise TimeoutError("the time was up")
            except Exception:
                if words[word] >= number:  # it came just before
                    return
                raise
            self._sleep(word, seen, min(left, SLICE_SECONDS))

    def _sleep(self, word: int, seen: int, seconds: float) -> None:
        """Sleeps, unless the word has changed, until it does or the time is up."""
        time_out = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        expected = ctypes.c_uint32(seen & 0xFFFFFFFF)  # a futex is the lower half of a word
        _syscall(self._futex, self.pointer(word), _FUTEX_WAIT, expected, ctypes.byref(time_out), None, 0)
