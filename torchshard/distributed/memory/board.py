"""The board of a group: each rank's posts in its own segment, and which ranks have read them.

A post is a header (the rank's call, as a digest and a text) and its data. It stays in the rank's
segment until all others have read it. `stream` numbers the calls, and ends them in any order.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
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
