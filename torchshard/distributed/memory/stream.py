"""The numbered calls of a group: begun in the same order by each rank, and ended in any order.

Every rank numbers its calls. Beginning a call posts the data on the rank's `Board` and publishes
the number, and never waits; ending it waits for the others' posts of this number, compares headers
and reads. So a wait depends only on the other ranks beginning the same call, and calls may end in
any order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from torchshard.distributed.memory.board import (
    CALLS,
    INDEX,
    POSTED,
    READ,
    RING,
    Board,
    Call,
    Different,
    Post,
    Stopped,
    call_of,
)
from torchshard.distributed.memory.segment import below_autograd


class Rider:
    """Numbers that ranks exchange with their next posts, whatever the calls are."""

    def __init__(self, call: Call, own: Sequence[int]) -> None:
        """Stores the purpose and this rank's numbers."""
        self.call, self.numbers = call, (call.digest, *own)
        self.begun: Begun | None = None
        """The call that carries them."""
        self.of_all: list[list[int]] | None = None
        """All ranks' numbers after their arrival, even if the rest of the posts differs."""

    def take(self, posts: Sequence[Post]) -> None:
        """Stores all ranks' numbers, if all have the same purpose."""
        if all(post.riding[:1] == [self.call.digest] for post in posts):
            self.of_all = [post.riding[1:] for post in posts]


class Begun:
    """A call that this rank has begun."""

    def __init__(
        self, calls: Calls, number: int, call: Call, finish: Callable[[list[Post]], None], rider: Rider | None
    ) -> None:
        """Stores the call.

        Args:
            finish: computes the result from all ranks' posts; runs again if it was interrupted.
        """
        self._calls, self.number, self._call, self._finish, self._rider = calls, number, call, finish, rider
        self._lock = threading.Lock()
        self.is_done = False
        self.failure: Exception | None = None
        self.is_dropped = False
        """Whether its `Exchange` was dropped, so it can't be waited for."""

    def end(self, seconds: float | None = None, *, blocking: bool = True) -> None:
        """Ends it, unless another thread does.

        Args:
            blocking: waits for the other ranks, or for that thread.
        """
        if not self._lock.acquire(blocking=blocking):
            return
        try:
            if not self.is_done and (blocking or self._calls.is_complete(self.number)):
                self._end(seconds)
        finally:
            self._lock.release()

    def _end(self, seconds: float | None) -> None:
        try:
            posts = self._calls.posts(self.number, self._call, seconds)
            if self._rider is not None:
                self._rider.take(posts)
            if any(post.digest != self._call.digest for post in posts):
                raise Different({post.rank: self._calls.board.call(post) for post in posts})
            below_autograd(self._finish, posts)
        except Exception as error:
            self.failure = error
        self.is_done, self._finish = True, _nothing
        self._calls.end(self.number)
        if self.is_dropped and self.failure is not None:
            self._calls.untold.append(self.failure)


def _nothing(posts: list[Post]) -> None:
    pass


class Calls:
    """The calls that all ranks of a group make, in one order."""

    def __init__(self, board: Board) -> None:
        """Starts without calls."""
        self.board = board
        self.begun = 0
        self._ended = Ended()
        self._open = dict[int, Begun]()
        self._noted = list[Call]()
        self.rider: Rider | None = None
        """The numbers to send with the next call."""
        self.untold = list[Exception]()
        """The errors of dropped calls, to be raised by a later wait."""
        self.others = list[Callable[[], None]]()
        """Other work that runs while a wait ends complete calls."""

    def note(self, call: Call) -> None:
        """Describes the next call: ranks compare the description too, and errors show it."""
        self._noted.append(call)

    def begin(
        self, call: Call, sent: Sequence[Tensor], finish: Callable[[list[Post]], None], values: Sequence[int] = ()
    ) -> Begun:
        """Posts this rank's data for the next call.

        Raises:
            Stopped: an earlier call was given up.
            RuntimeError: too many calls are under way, or this process is a fork of the rank.
        """
        board, own = self.board, self.board.own
        board.check()
        with board.lock:
            number = self.begun
            if number >= RING and number - board.read_by_all() >= RING:
                self.end_complete()  # complete calls that were not waited for still occupy the ring
            if number >= RING and number - board.read_by_all() >= RING:
                raise RuntimeError(f"{RING} calls are under way and have not been waited for")
            rider, self.rider = self.rider, None
            if self._noted or rider is not None:
                by = [] if rider is None or rider.call is call else [rider.call]
                call = call.described([*by, *(self._noted or [call])])
                self._noted.clear()
            start = board.write(call, sent, values, CALLS, number, () if rider is None else rider.numbers)
            own.words[INDEX + number % RING] = start
            own.publish(POSTED, number + 1)
            self.begun += 1
            begun = self._open[number] = Begun(self, number, call, finish, rider)
            if rider is not None:
                rider.begun = begun
        return begun

    def refuse(self, why: str) -> None:
        """Announces that this rank can't make the next call."""
        self.end(self.begin(call_of(f"refused: {why}"), (), _nothing).number)

    def is_complete(self, number: int) -> bool:
        """Returns whether all ranks have begun a call."""
        return all(other.words[POSTED] > number for other in self.board.others.values())

    def posts(self, number: int, call: Call, seconds: float | None = None) -> list[Post]:
        """Waits until all ranks have begun a call; returns their posts by rank.

        Raises:
            Stopped: a rank did not begin it.
        """
        board = self.board
        deadline = time.monotonic() + (board.seconds if seconds is None else seconds)
        posts = list[Post]()
        try:
            for rank in range(board.size):
                if rank != board.rank:
                    board.wait(rank, POSTED, number + 1, deadline)
                posts.append(board.read(rank, board.segment(rank).words[INDEX + number % RING]))
        except Stopped as error:
            board.give_up(number, f"gave up {call.text.decode(errors='replace')}: {error}")
            raise
        return posts

    def end(self, number: int) -> None:
        """Records that this rank has finished reading a call."""
        with self.board.lock:
            self._open.pop(number, None)
            if self._ended.add(number):
                self.board.own.set(READ, self._ended.below)

    def end_complete(self) -> None:
        """Ends calls that all ranks have begun, waited for or not, like a threaded backend."""
        with self.board.lock:
            begun = list(self._open.values())
        for each in begun:
            each.end(blocking=False)
        for other in self.others:
            other()


class Numbers:
    """Numbers that ranks exchange with their next calls, or in a call of their own."""

    def __init__(self, calls: Calls, call: Call, own: Sequence[int]) -> None:
        """Stores the purpose and this rank's numbers."""
        self._calls, self._rider = calls, Rider(call, own)
        calls.rider = self._rider

    def begin(self) -> Numbers:
        """Sends them now, if they are not sent yet."""
        if self._rider.begun is None:
            self._calls.rider = self._rider
            self._calls.begin(self._rider.call, (), _nothing)
        return self

    def is_completed(self) -> bool:
        """Returns whether `wait` would return at once."""
        return self._rider.of_all is not None

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the other ranks' numbers.

        Raises:
            Stopped: a rank timed out or ended.
            Different: a rank sends no numbers.
        """
        self.begin()
        assert self._rider.begun is not None
        self._rider.begun.end(seconds)
        if self._rider.of_all is None and self._rider.begun.failure is not None:
            raise self._rider.begun.failure

    @property
    def of_all(self) -> list[list[int]]:
        """All ranks' numbers after the wait, even if they came with calls that differ."""
        return self._rider.of_all or []


class Ended:
    """A set of numbers that end in any order."""

    def __init__(self) -> None:
        """Starts empty."""
        self.below = 0
        """All numbers below it have ended."""
        self._later = set[int]()

    def add(self, number: int) -> bool:
        """Ends a number; returns whether `below` has changed."""
        if number != self.below:
            self._later.add(number)
            return False
        self.below += 1
        while self.below in self._later:
            self._later.remove(self.below)
            self.below += 1
        return True
