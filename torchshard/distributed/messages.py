"""Point-to-point messages; sender and receiver verify that they mean the same message.

The sender sends its message's header, the receiver the expected header, both at once and without
waiting. The sender compares the headers when it waits, the receiver in a thread. A mismatched
message is thus never received (a backend would write it into memory of another size), and any order
of calls that works without verification also works with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.hashing import hash_text
from torchshard.core.layouts import type_text
from torchshard.distributed.call_site import verified_site
from torchshard.distributed.consistency import needs_verification
from torchshard.distributed.eager import check_memory, check_tensor, fill, needs_gradient
from torchshard.distributed.group import Group, own_group, peer
from torchshard.distributed.handshake import exchange_with, late_error
from torchshard.distributed.kernels import as_sent, copied
from torchshard.distributed.wire import Handle, Pending, begin, finish

T = TypeVar("T")
SENDER, RECEIVER = 1, 2
"""The tags of the senders' and the receivers' headers."""
FIRST_TAG, TAGS = 16, 2**30
"""The tags of the messages themselves, above the headers' tags."""


def isend(x: Tensor, dst: int) -> Handle:
    """Starts to send a copy of a tensor to a rank of the group; `wait()` returns the copy."""
    group = own_group()
    check_tensor(group, "isend", x, is_message=True)
    sent = copied(x.detach())
    return Handle(Pending(lambda: sent, start_send(sent, _other(group, dst, "dst"), group)))


def irecv(like: Tensor | Sequence[int], src: int, dtype: torch.dtype | None = None) -> Handle:
    """Starts to receive a tensor from a rank of the group; `wait()` returns it.

    Args:
        like: the shape; or a tensor with the shape, dtype and device of the message, which is
            filled and returned, as by `torch.distributed.irecv`. A tensor that requires a gradient
            is not changed, and another one is returned.
        dtype: with a shape; by default torch's.
    """
    group = own_group()
    if isinstance(like, Tensor):
        check_memory("irecv", like)
        received = torch.empty_like(like, memory_format=torch.contiguous_format).detach()
    else:
        received = torch.empty(tuple(like), dtype=dtype)

    filled = like if isinstance(like, Tensor) and not needs_gradient(like) else None

    def result() -> Tensor:
        return received if filled is None else fill(filled, received)

    return Handle(Pending(result, start_receive(received, _other(group, src, "src"), group)))


def send(x: Tensor, dst: int) -> None:
    """Sends a tensor to a rank of the group, which must receive it."""
    isend(x, dst).wait()


def recv(like: Tensor | Sequence[int], src: int, dtype: torch.dtype | None = None) -> Tensor:
    """Receives a tensor from a rank of the group.

    Args:
        like, dtype: see `irecv`.
    """
    return irecv(like, src, dtype).wait()


def _other(group: Group, rank: int, name: str) -> int:
    if peer(group, rank, name) == group.rank:
        raise InputError(
            "a rank can't send to itself",
            where=f"{name}={rank}",
            why=f"this process is rank {group.rank} of {group.size}",
            attempt="another rank",
        )
    return rank


class WaiterThread(Generic[T]):
    """Runs a function that waits for a group's messages in a thread."""

    def __init__(self, group: Group, fn: Callable[[], T]) -> None:
        self._fn, self._result, self._failure = fn, list[T](), list[Exception]()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        threads = group.handshake.waiter_threads
        threads[:] = [*(thread for thread in threads if not thread.is_done()), self]

    def _run(self) -> None:
        try:
            self._result.append(self._fn())
        except Exception as error:
            self._failure.append(error)

    def is_done(self, seconds: float | None = 0.0) -> bool:
        """Waits up to `seconds` (None: no limit), and returns whether the function has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def get(self) -> T:
        """Waits for the function; returns its result or raises its exception."""
        self.is_done(None)
        if self._failure:
            raise self._failure[0]
        return self._result[0]


class Transfer:
    """A message under way."""

    def __init__(self, group: Group, wait: Callable[[], None], work: dist.Work | None = None) -> None:
        """Stores the group, and the function that waits.

        Args:
            work: reports completion, if the backend is not gloo.
        """
        self._group, self._wait, self._work = group, wait, work
        self._waiter: WaiterThread[None] | None = None

    def is_completed(self) -> bool:
        """Returns whether `wait` would return at once."""
        if self._work is not None:
            return bool(self._work.is_completed())
        # gloo reports completion only to a blocking wait, so a thread waits
        self._waiter = self._waiter or WaiterThread(self._group, self._wait)
        return self._waiter.is_done()

    def wait(self) -> None:
        """Waits until the message has been sent or received.

        Raises:
            DistributedError: the other rank does something else, or does not answer.
        """
        self._wait() if self._waiter is None else self._waiter.get()


def start_send(tensor: Tensor, dst: int, group: Group) -> Transfer:
    """Starts to send a contiguous tensor."""
    verify = None
    if _needs_verification(tensor, group, group.rank, dst):
        signature = _signature(tensor, group.rank, dst)
        verify = exchange_with(group, dst, signature, verified_site(group), (SENDER, RECEIVER))
    work = begin(
        group, "send", dist.isend, as_sent(tensor), group_dst=dst, group=group.process_group, tag=_tag(tensor, group)
    )
    return _posted("send", tensor, group, work, verify)


def start_receive(tensor: Tensor, src: int, group: Group) -> Transfer:
    """Starts to receive into a contiguous tensor, after earlier receives from the same rank."""

    def post() -> dist.Work | None:
        tag = _tag(tensor, group)
        return begin(group, "receive", dist.irecv, as_sent(tensor), group_src=src, group=group.process_group, tag=tag)

    is_verified = _needs_verification(tensor, group, src, group.rank)
    before = group.handshake.last_receive.get(src)
    if not is_verified and (before is None or before.is_done()):
        return _posted("receive", tensor, group, post())
    signature, site = _signature(tensor, src, group.rank), verified_site(group)
    verify = exchange_with(group, src, signature, site, (RECEIVER, SENDER)) if is_verified else None
    if not group.aborts_on_mismatch(tensor.device):
        # the backend orders receives itself, and would run another thread's on that thread's stream
        return _posted("receive", tensor, group, post(), verify)

    def verify_and_post() -> dist.Work | None:
        if before is not None:
            before.is_done(None)
        if verify is not None:
            verify(None)
        return post()

    posting = group.handshake.last_receive[src] = WaiterThread(group, verify_and_post)

    def wait() -> None:
        if not posting.is_done(group.timeouts.verify):
            raise late_error(group, src, signature, site)
        finish(group, "receive", posting.get())

    return Transfer(group, wait)


def _posted(
    call: str,
    tensor: Tensor,
    group: Group,
    work: dist.Work | None,
    verify: Callable[[float | None], None] | None = None,
) -> Transfer:
    """Returns the transfer of a message that was passed to the backend.

    Args:
        verify: waits for the other rank's header.
    """

    def wait() -> None:
        if verify is not None:
            verify(group.timeouts.verify)
        finish(group, call, work, [tensor.device])

    return Transfer(group, wait, None if group.aborts_on_mismatch(tensor.device) else work)


def _needs_verification(tensor: Tensor, group: Group, src: int, dst: int) -> bool:
    verified = group.handshake.verified_sends.setdefault((src, dst), set())
    return needs_verification(group, verified, (tensor.dtype, tensor.shape), tensor.device)


def _signature(tensor: Tensor, src: int, dst: int) -> str:
    return f"{type_text(tensor.dtype, tensor.shape)} from rank {src} to rank {dst}"


def _tag(tensor: Tensor, group: Group) -> int:
    """Returns a tag for a dtype and shape: the backend receives only messages with equal tags."""
    if not group.aborts_on_mismatch(tensor.device):
        return 0
    return FIRST_TAG + hash_text(type_text(tensor.dtype, tensor.shape)) % TAGS
