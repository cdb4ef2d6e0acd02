"""Memory that one process writes and the other processes of its machine read.

Each rank of a group owns a segment: an anonymous file (`memfd_create`). It has no name in any
folder, only processes of the same user can open it, and the kernel frees it when the last process
that maps it ends, however it ends. A rank writes only to its own segment and maps the others'
read-only, so each segment has one writer.

A segment has more addresses than a machine has memory; only written pages exist.
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
"""The index of the first word after a segment's token."""

SPINS = 1000
"""How often a wait polls, yielding to other threads, before it sleeps."""
SLICE_SECONDS = 0.1
"""How often a sleeping wait checks that the other rank is alive."""


def below_autograd(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function with plain tensor ops: no autograd, subclasses or modes."""
    with (
        # `_AutoDispatchBelow...`, `_DisableTorchDispatch`: Python has no public guards of dispatch (PyTorch 2.13.0).
        torch._C._AutoDispatchBelowADInplaceOrView(),
        torch._C.DisableTorchFunctionSubclass(),
        torch._C._DisableTorchDispatch(),
    ):
        return fn(*args, **kwargs)


class Machine(NamedTuple):
    """Constants of a processor architecture."""

    futex: int
    """The number of the futex system call."""
    membarrier: int | None
    """The number of the membarrier system call; None if stores become visible in order."""


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
    """Returns the reason why this machine does not support segments, or ''."""
    if sys.platform != "linux":
        return f"shared memory of ranks needs Linux, this is {sys.platform}"
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        return f"shared memory of ranks needs os.{missing[0]}, which this Python lacks"
    if platform.machine() not in _MACHINES:
        return f"shared memory of ranks knows {', '.join(_MACHINES)}, this is {platform.machine()}"
    return ""


class Address(NamedTuple):
    """The location of a segment for other processes."""

    process: int
    descriptor: int
    token: str
    """A secret at the segment's start: in another container, its number means another process."""


class _Mapping:
    """A segment in this process's address space."""

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        """Maps the file of a descriptor.

        Raises:
            OSError: this process has too little address space.
        """
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.memory = mmap.mmap(descriptor, SEGMENT_BYTES, mmap.MAP_SHARED, access)
        # otherwise a core dump would include the segment's 64 GiB of addresses
        self.memory.madvise(mmap.MADV_DONTDUMP)
        self.words = memoryview(self.memory).cast("q")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a tensor of read-only memory warns; nothing writes to it
            self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        self._tensors = dict[tuple[int, torch.dtype, torch.Size], Tensor]()
        self._pointers = dict[int, ctypes.c_void_p]()

    def pointer(self, word: int) -> ctypes.c_void_p:
        """Returns a word's address for a system call."""
        if word not in self._pointers:
            self._pointers[word] = ctypes.c_void_p(self.address + word * WORD_BYTES)
        return self._pointers[word]

    def tensor(self, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Returns the contiguous tensor at an offset."""
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
        """Creates an empty segment.

        Raises:
            Unreachable: this machine, or this process's limits, forbid it.
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
        """Sets a word; a process that sees the number sees all earlier reads and writes done."""
        if self._barrier is not None:
            _syscall(self._barrier, _GLOBAL_EXPEDITED, 0, 0)
        self.words[word] = number

    def publish(self, word: int, number: int) -> None:
        """Sets a word in order, and wakes the processes that wait for it."""
        self.set(word, number)
        self.wake(word)

    def wake(self, word: int) -> None:
        """Wakes the processes that wait for a word, without changing it."""
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
            Unreachable: it belongs to another machine, container or user.
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
        """Checks that the writing process still runs.

        Raises:
            Gone: it has ended.
        """
        if self._poll.poll(0):
            raise Gone("its process has ended")

    def wait(self, word: int, number: int, deadline: float, interrupted: Callable[[], None] | None = None) -> None:
        """Waits until a word is at least a number.

        Args:
            deadline: on the clock of `time.monotonic`.
            interrupted: called before each sleep; raises to end the wait.

        Raises:
            Gone: the writing process has ended.
            TimeoutError: the deadline has passed.
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
                if words[word] >= number:  # the number arrived just before the failure
                    return
                raise
            self._sleep(word, seen, min(left, SLICE_SECONDS))

    def _sleep(self, word: int, seen: int, seconds: float) -> None:
        """Sleeps until the word changes or the time is up; returns at once if it has changed."""
        time_out = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        expected = ctypes.c_uint32(seen & 0xFFFFFFFF)  # a futex is the lower half of a word
        _syscall(self._futex, self.pointer(word), _FUTEX_WAIT, expected, ctypes.byref(time_out), None, 0)
