"""Messages from one rank to another, compared where they are to be: what is sent with what is received.

The sender says what it sends and the receiver what it expects, both at once and without waiting; each compares when it
waits. A message that does not fit is then never received, for a backend would write it where it does not fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchshard.distributed.checks import compare_with, to_compare, where_called
from torchshard.distributed.groups import Group
from torchshard.distributed.wire import begin, finish
from torchshard.layouts import type_text

SENDER, RECEIVER = 1, 2
"""The tags of what senders and receivers say."""


class Awaited:
    """A message under way. A backend says that it has come only to who waits, so where it is asked a thread waits."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._failure = wait, list[Exception]()
        self._thread: Thread | None = None

    def _run(self) -> None:
        try:
            self._wait()
        except Exception as error:
            self._failure.append(error)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        if self._thread is None:
            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()
        self._thread.join(0)
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the message to have been sent, or to have come.

        Raises:
            DistributedError: the other rank does something else, or nothing.
        """
        if self._thread is None:
            self._wait()
            return
        self._thread.join()
        if self._failure:
            raise self._failure[0]


def sending(held: Tensor, dst: int, group: Group) -> Awaited:
    """Begins to send a contiguous tensor."""
    compare = _comparing(held, group, dst, group.rank, dst)
    work = begin(group, "send", dist.isend, held, group_dst=dst, group=group.process_group)

    def wait() -> None:
        if compare is not None:
            compare()
        finish(group, "send", work)

    return Awaited(wait)


class Line:
    """What one rank waits for from another, in order: a message that is not compared yet holds up those behind it."""

    def __init__(self) -> None:
        self._waiting, self._lock = deque[tuple[list[Any], Callable[[], Any]]](), Lock()

    def join(self, begin: Callable[[], Any], *, at_once: bool) -> Callable[[], Any]:
        """Takes the last place; the result begins all up to it, and gives what `begin` of it gave."""
        begun: list[Any] = []
        if at_once and not self._waiting:
            begun.append(begin())
        else:
            self._waiting.append((begun, begin))
        return lambda: self._advance(begun)

    def _advance(self, begun: list[Any]) -> Any:
        with self._lock:
            while not begun:
                place, first = self._waiting[0]
                place.append(first())
                self._waiting.popleft()
        return begun[0]


def receiving(held: Tensor, src: int, group: Group) -> Awaited:
    """Begins to receive into a contiguous tensor."""
    compare = _comparing(held, group, src, src, group.rank)

    def post() -> Any:
        if compare is not None:
            compare()
        return begin(group, "receive", dist.irecv, held, group_src=src, group=group.process_group)

    begun = group.lines.setdefault(src, Line()).join(post, at_once=compare is None)
    return Awaited(lambda: finish(group, "receive", begun()))


def _comparing(held: Tensor, group: Group, other: int, src: int, dst: int) -> Callable[[], None] | None:
    """What compares a message with what the other rank says of it; None where it is not to be compared."""
    if not to_compare(group, ("message", src, dst, held.dtype, held.shape)):
        return None
    said = f"{type_text(held.dtype, held.shape)} from rank {src} to rank {dst}"
    tags = (SENDER, RECEIVER) if src == group.rank else (RECEIVER, SENDER)
    return compare_with(group, other, said, where_called(), tags)
