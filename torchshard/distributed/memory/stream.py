"""The numbered calls of a group: each rank's posts, and which ranks have read them.

Every rank numbers its calls. A post is a header (the rank's call, as a digest and a text) and its
data; it stays in the rank's own segment until all others have read it. Beginning a call copies the
data and publishes the number, and never waits; ending it waits for the others' posts of this
number, compares headers and reads. So a wait depends only on the other ranks beginning the same
call, and calls may end in any order.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchshard.distributed.memory.regions import ALIGNMENT, Regions, aligned
from torchshard.distributed.memory.segment import (
    FIRST_WORD,
    SEGMENT_BYTES,
    WORD_BYTES,
    Gone,
    OtherSegment,
    OwnSegment,
    below_autograd,
)

PER_LINE = ALIGNMENT // WORD_BYTES
RING = 1024
"""The maximum number of a group's calls under way."""
LETTERS_RING = 1 << 15
"""The maximum number of messages under way from one rank to another."""
MAX_TEXT = 2048
HEADER_WORDS = 4
"""In a post: digest, bytes of text, number of values, number of rider numbers."""

# Counters are a cache line apart, so polling one does not contend with writes to another.
POSTED = FIRST_WORD + PER_LINE
"""The word with the number of calls that this rank has begun."""
READ = POSTED + PER_LINE
"""The word with the number below which this rank has ended all calls."""
GIVEN_UP = READ + PER_LINE
"""The word with one plus the call that this rank has given up; later calls fail too."""
REASON = GIVEN_UP + 1
"""The word with the byte offset of the post that gives the reason."""
INDEX = GIVEN_UP + PER_LINE
"""The words with the byte offsets of the latest calls' posts."""
LINES = INDEX + RING
"""The first of the words that count messages, each in its own cache line."""


CALLS, LETTERS, NOTE = 0, 1, -1
"""The channels of posts: calls; messages, LETTERS + rank; the reason for giving up."""


class Call(NamedTuple):
    """A rank's call, as posted."""

    digest: int
    text: bytes
    """For errors: the call and, after a line break, its call site."""

    def described(self, by: Sequence[Call]) -> Call:
        """Returns this call with the texts of its caller and of calls before that sent nothing."""
        parts = [call.text.partition(b"\n") for call in by]
        text = b"; then ".join([part[0] for part in parts])
        site = next((part[2] for part in parts[::-1] if part[2]), b"")
        return Call(hash((self.digest, *[call.digest for call in by])), text + b"\n" + site if site else text)


@lru_cache(maxsize=4096)
def call_of(text: str) -> Call:
    """Returns a call, identified by the first line of its text."""
    encoded = text.encode(errors="replace")
    return Call(zlib.crc32(encoded.partition(b"\n")[0]), encoded[:MAX_TEXT])


class Post(NamedTuple):
    """One rank's post."""

    rank: int
    start: int
    """The post's first byte in its rank's segment."""
    digest: int
    text_size: int
    values: list[int]
    """Numbers of its rank."""
    riding: list[int]
    """Numbers of a rider."""

    @property
    def data(self) -> int:
        """The data's first byte in its rank's segment."""
        return self.start + aligned(self.text + self.text_size)

    @property
    def text(self) -> int:
        """The text's first byte in the post."""
        return (HEADER_WORDS + len(self.values) + len(self.riding)) * WORD_BYTES


class Different(RuntimeError):
    """The ranks' calls of one number differ."""

    def __init__(self, calls: dict[int, Call]) -> None:
        """Stores each rank's call."""
        texts = "; ".join(f"rank {rank}: {call.text.decode(errors='replace')}" for rank, call in calls.items())
        super().__init__(f"the ranks make different calls: {texts}")
        self.calls = calls


class Refused(RuntimeError):
    """This rank can't make a call with these tensors; the other ranks fail too."""


class Stopped(RuntimeError):
    """A rank has given up, ended, or timed out; the group is unusable."""

    def __init__(self, rank: int, why: str) -> None:
        """Names the rank."""
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why = rank, why


class Board:
    """The segments of a group: where posts are written and read."""

    def __init__(self, own: OwnSegment, others: dict[int, OtherSegment], rank: int, seconds: float) -> None:
        """Stores the segments of a group.

        Args:
            seconds: the default time-out of waits.
        """
        self.own, self.others, self.rank, self.size, self.seconds = own, others, rank, len(others) + 1, seconds
        self._regions = Regions(aligned(self.letter(self.size, 0) * WORD_BYTES), SEGMENT_BYTES, own.give_back)
        self.lock = threading.RLock()
        self._closed = False
        self._process = os.getpid()

    def is_fork(self) -> bool:
        """Returns whether this process is a fork of the rank."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Checks that this process may communicate.

        Raises:
            Stopped: a call was given up before.
            RuntimeError: this process is a fork of the rank.
        """
        if self.is_fork():
            raise RuntimeError("this process is a fork of a rank, and no rank itself: it can't communicate")
        if self.own.words[GIVEN_UP]:
            raise Stopped(self.rank, self.reason(self.rank))

    def check_other(self, rank: int) -> None:
        """Checks that another rank may still answer.

        Raises:
            Stopped: it has ended, or has given up.
        """
        if self._closed:
            raise Stopped(self.rank, "this rank has ended the group")
        other = self.others[rank]
        if other.words[GIVEN_UP]:
            raise Stopped(rank, self.reason(rank))
        try:
            other.check_alive()
        except Gone as error:
            raise Stopped(rank, str(error)) from None

    def write(
        self,
        call: Call,
        sent: Sequence[Tensor],
        values: Sequence[int],
        channel: int,
        number: int,
        riding: Sequence[int] = (),
    ) -> int:
        """Writes a post, the `number`th of its channel.

        Args:
            sent: the data, stored consecutively, each aligned.
            riding: the numbers of a rider.

        Returns:
            its first byte.
        """
        text = call.text[:MAX_TEXT]
        text_at = (HEADER_WORDS + len(values) + len(riding)) * WORD_BYTES
        data_at = aligned(text_at + len(text))
        size = sum(aligned(x.nbytes) for x in sent)
        start = self._regions.take(data_at + size, channel, number, self._floor)
        word = start // WORD_BYTES
        header = (call.digest, len(text), len(values), len(riding), *values, *riding)
        for i, entry in enumerate(header):
            self.own.words[word + i] = entry
        self.own.memory[start + text_at : start + text_at + len(text)] = text
        below_autograd(self._fill, start + data_at, sent)
        return start

    def _fill(self, at: int, sent: Sequence[Tensor]) -> None:
        for x in sent:
            if x.numel():
                self.own.tensor(at, x.dtype, x.shape).copy_(x)
            at += aligned(x.nbytes)

    def read(self, rank: int, start: int) -> Post:
        """Reads the post that begins at a byte of a rank's segment."""
        words, word = self.segment(rank).words, start // WORD_BYTES
        digest, text_size, count, riding = words[word : word + HEADER_WORDS]
        first, end = word + HEADER_WORDS, word + HEADER_WORDS + count
        numbers = words[first : end + riding].tolist() if count or riding else []
        return Post(rank, start, digest, text_size, numbers[:count], numbers[count:])

    def call(self, post: Post) -> Call:
        """Returns the call of a post, as its rank describes it."""
        start = post.start + post.text
        return Call(post.digest, self.segment(post.rank).memory[start : start + post.text_size])

    def reason(self, rank: int) -> str:
        """Returns the reason why a rank has given up."""
        return self.call(self.read(rank, self.segment(rank).words[REASON])).text.decode(errors="replace")

    def data(self, post: Post, dtype: torch.dtype, shape: torch.Size, skipped: int = 0) -> Tensor:
        """Returns a post's data as a read-only tensor.

        Args:
            skipped: the number of data bytes before it.
        """
        return self.segment(post.rank).tensor(post.data + skipped, dtype, shape)

    def segment(self, rank: int) -> OwnSegment | OtherSegment:
        """Returns the segment of a rank."""
        return self.own if rank == self.rank else self.others[rank]

    def wait(self, rank: int, word: int, number: int, deadline: float) -> None:
        """Waits until a word of another rank's segment is at least a number.

        Raises:
            Stopped: the rank has ended, given up, or timed out.
        """
        try:
            self.others[rank].wait(word, number, deadline, lambda: self.check_other(rank))
        except TimeoutError as error:
            raise Stopped(rank, str(error)) from None

    def read_by_all(self) -> int:
        """Returns the number below which all ranks, with this one, have read all posts."""
        return min(segment.words[READ] for segment in (self.own, *self.others.values()))

    def _floor(self, channel: int) -> int:
        if channel == CALLS:
            return self.read_by_all()
        if channel == NOTE:
            return 0
        return self.others[channel - LETTERS].words[self.taken(self.rank)]

    def sent(self, rank: int) -> int:
        """Returns the word that counts a segment owner's messages to a rank."""
        return LINES + rank * PER_LINE

    def taken(self, rank: int) -> int:
        """Returns the word with the number below which the owner has received a rank's messages."""
        return LINES + (self.size + rank) * PER_LINE

    def letter(self, rank: int, number: int) -> int:
        """Returns the word with the byte offset of a message to a rank."""
        return LINES + 2 * self.size * PER_LINE + rank * LETTERS_RING + number % LETTERS_RING

    def close(self, number: int) -> None:
        """Ends this rank's waits, and the others' waits for its calls from a number on."""
        if not self.is_fork():
            self._closed = True
            self.give_up(number, "it has ended the group")

    def give_up(self, number: int, why: str) -> None:
        """Announces that this rank won't end calls from a number on; only the first time counts."""
        if self.own.words[GIVEN_UP] or self.is_fork():
            return
        with self.lock:
            call = Call(0, why.encode()[:MAX_TEXT])
            self.own.words[REASON] = self.write(call, (), (), NOTE, 0)
            self.own.publish(GIVEN_UP, number + 1)
            for word in (POSTED, *(self.sent(rank) for rank in self.others)):
                self.own.wake(word)


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
