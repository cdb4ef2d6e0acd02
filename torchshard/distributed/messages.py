"""Messages from one rank to another, compared where they are to be: what is sent with what is received.

The sender says what it sends and the receiver what it expects, both at once and without waiting; the sender compares
when it waits, the receiver behind its program's back. A message that does not fit is then never received, for a backend
would write it where it does not fit, and any order of calls that is right without comparing is right with it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchshard.core.layouts import type_text
from torchshard.distributed.checks import compare_with, digest, late, to_compare, where_called
from torchshard.distributed.groups import Group
from torchshard.distributed.kernels import as_sent
from torchshard.distributed.wire import begin, finish

SENDER, RECEIVER = 1, 2
"""The tags of what senders and receivers say."""


class Later:
    """What a function that waits for a group's messages gives, called in a thread."""

    def __init__(self, group: Group, fn: Callable[[], Any]) -> None:
        self._fn, self._given, self._failure = fn, list[Any](), list[Exception]()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        group.talk.waiting[:] = [*(other for other in group.talk.waiting if not other.is_done()), self]

    def _run(self) -> None:
        try:
            self._given.append(self._fn())
        except Exception as error:
            self._failure.append(error)

    def is_done(self, seconds: float | None = 0.0) -> bool:
        """Whether it has given something or failed, after so many seconds (None: in the end)."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def get(self) -> Any:
        """What it gives, or raises."""
        self.is_done(None)
        if self._failure:
            raise self._failure[0]
        return self._given[0]


class Awaited:
    """A message under way. A backend says that it has come only to who waits, so where it is asked a thread waits."""

    def __init__(self, group: Group, wait: Callable[[], None]) -> None:
        self._group, self._wait = group, wait
        self._later: Later | None = None

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        self._later = self._later or Later(self._group, self._wait)
        return self._later.is_done()

    def wait(self) -> None:
        """Waits for the message to have been sent, or to have come.

        Raises:
            DistributedError: the other rank does something else, or nothing.
        """
        self._wait() if self._later is None else self._later.get()


def sending(held: Tensor, dst: int, group: Group) -> Awaited:
    """Begins to send a contiguous tensor."""
    compared, said, site = _told(held, group, group.rank, dst)
    compare = compare_with(group, dst, said, site, (SENDER, RECEIVER)) if compared else None
    work = begin(
        group, "send", dist.isend, as_sent(held), group_dst=dst, group=group.process_group, tag=_tag(held, group)
    )

    def wait() -> None:
        if compare is not None:
            compare(group.timeout_seconds)
        finish(group, "send", work)

    return Awaited(group, wait)


def receiving(held: Tensor, src: int, group: Group) -> Awaited:
    """Begins to receive into a contiguous tensor, after what is to be received from this rank before."""

    def post() -> Any:
        tag = _tag(held, group)
        return begin(group, "receive", dist.irecv, as_sent(held), group_src=src, group=group.process_group, tag=tag)

    compared, said, site = _told(held, group, src, group.rank)
    before: Later | None = group.talk.latest.get(src)
    if not compared and (before is None or before.is_done()):
        work = post()
        return Awaited(group, lambda: finish(group, "receive", work))
    compare = compare_with(group, src, said, site, (RECEIVER, SENDER)) if compared else None

    def posted() -> Any:
        if before is not None:
            before.is_done(None)
        if compare is not None:
            compare(None)
        return post()

    posting = group.talk.latest[src] = Later(group, posted)

    def wait() -> None:
        if not posting.is_done(group.timeout_seconds):
            raise late(group, src, said, site)
        finish(group, "receive", posting.get())

    return Awaited(group, wait)


def _tag(held: Tensor, group: Group) -> int:
    """A number of a message's dtype and shape: what does not fit is not received, rather than written over memory."""
    said = type_text(held.dtype, held.shape)
    return FIRST_TAG + digest(said) % TAGS if group.fragile else 0


FIRST_TAG, TAGS = 16, 2**30
"""The tags of messages of tensors, above those of what is said of them."""


def _told(held: Tensor, group: Group, src: int, dst: int) -> tuple[bool, str, str]:
    """Whether a message is to be compared, what is said of it, and where it is called."""
    compared = to_compare(group, group.talk.messages.setdefault((src, dst), set()), (held.dtype, held.shape))
    said = f"{type_text(held.dtype, held.shape)} from rank {src} to rank {dst}"
    return compared, said, where_called() if compared else ""
