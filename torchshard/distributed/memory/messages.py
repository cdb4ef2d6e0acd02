"""Messages from one rank to another: the receiver finds them by their tags, in the order in which they were sent."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from typing import NamedTuple

from torch import Tensor

from torchshard.distributed.memory.segment import SLICE_SECONDS, below_autograd
from torchshard.distributed.memory.stream import LETTERS, RING, Board, Different, Post, Stopped, call_of

PAUSE_SECONDS = 1e-4


class _Letter(NamedTuple):
    number: int
    post: Post


class Letters:
    """The messages of a rank, to and from the others of its group."""

    def __init__(self, board: Board) -> None:
        """Begins with none."""
        self._board = board
        self._sent = [0] * board.size
        self._seen = [0] * board.size
        self._taken = [0] * board.size
        self._taken_before = [set[int]() for _ in range(board.size)]
        self._arrived = defaultdict[tuple[int, int], deque[_Letter]](deque)
        self._awaited = defaultdict[tuple[int, int], deque["Receipt"]](deque)

    def send(self, tensor: Tensor, rank: int, tag: int, text: str) -> None:
        """Posts a message: a copy, so that the tensor may change at once.

        Raises:
            Stopped: the receiver has ended, or takes no messages.
        """
        board = self._board
        with board.lock:
            number = self._sent[rank]
            deadline = time.monotonic() + board.seconds
            while number - board.others[rank].words[board.taken(board.rank)] >= RING:
                if time.monotonic() > deadline:
                    raise Stopped(rank, f"it has taken none of the last {RING} messages")
                board.others[rank].check_alive()
                time.sleep(PAUSE_SECONDS)
            start = board.write(call_of(text), (tensor,), (tag,), LETTERS + rank, number)
            board.own.words[board.letter(rank, number)] = start
            board.own.publish(board.sent(rank), number + 1)
            self._sent[rank] += 1

    def receive(self, tensor: Tensor, rank: int | None, tag: int, text: str) -> Receipt:
        """Asks for the next message of a tag, after those that were asked for before.

        Args:
            tensor: takes its data.
            rank: the sender; None: whoever comes first.
        """
        receipt = Receipt(self, tensor, rank, tag, text)
        if rank is not None:
            with self._board.lock:
                self._awaited[rank, tag].append(receipt)
        return receipt

    def deliver(self, ranks: list[int]) -> None:
        """Hands the messages of ranks that have come to those that asked for them."""
        board = self._board
        with board.lock:
            for rank in ranks:
                words = board.others[rank].words
                while self._seen[rank] < words[board.sent(board.rank)]:
                    number = self._seen[rank]
                    post = board.read(rank, words[board.letter(board.rank, number)])
                    self._arrived[rank, post.values[0]].append(_Letter(number, post))
                    self._seen[rank] += 1
            for key, awaited in self._awaited.items():
                while awaited and self._arrived[key]:
                    awaited.popleft().take(self._arrived[key].popleft())

    def next_of_any(self, tag: int) -> _Letter | None:
        """A message of a tag that nobody has asked for by its sender."""
        with self._board.lock:
            for rank in self._board.others:
                if not self._awaited[rank, tag] and self._arrived[rank, tag]:
                    return self._arrived[rank, tag].popleft()
        return None

    def count(self, rank: int) -> int:
        """How many messages a rank has sent to this one so far."""
        board = self._board
        return board.others[rank].words[board.sent(board.rank)]

    def wait(self, rank: int, count: int, deadline: float) -> None:
        """Waits until a rank has sent more messages than a number."""
        board = self._board
        board.wait(rank, board.sent(board.rank), count + 1, deadline)

    def took(self, rank: int, number: int) -> None:
        """The memory of a message can be used again."""
        board = self._board
        with board.lock:
            self._taken_before[rank].add(number)
            while self._taken[rank] in self._taken_before[rank]:
                self._taken_before[rank].remove(self._taken[rank])
                self._taken[rank] += 1
            board.own.set(board.taken(rank), self._taken[rank])


class Receipt:
    """A message that is awaited."""

    def __init__(self, letters: Letters, tensor: Tensor, rank: int | None, tag: int, text: str) -> None:
        """Names what is awaited."""
        self._letters, self._tensor, self._tag, self._text = letters, tensor, tag, text
        self.rank = rank
        self._letter: _Letter | None = None
        self._done = False

    def take(self, letter: _Letter) -> None:
        """This is the message."""
        self._letter, self.rank = letter, letter.post.rank

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        self._look()
        return self._done or self._letter is not None

    def _look(self) -> None:
        board = self._letters._board
        self._letters.deliver(list(board.others) if self.rank is None else [self.rank])
        if self.rank is None and self._letter is None and (found := self._letters.next_of_any(self._tag)):
            self.take(found)

    def wait(self, seconds: float) -> None:
        """Waits for the message, and copies its data.

        Raises:
            Stopped: the sender has ended, or sent nothing in time.
            Different: it has another size or dtype.
        """
        deadline = time.monotonic() + seconds
        while True:
            count = 0 if self.rank is None else self._letters.count(self.rank)
            if self.is_completed():
                break
            if self.rank is None:
                self._pause(deadline)
            else:  # it is none of those counted, which another thread may have delivered
                self._letters.wait(self.rank, count, deadline)
        if self._done:
            return
        assert self._letter is not None
        (number, post), board = self._letter, self._letters._board
        self._done = True
        try:
            if post.digest != call_of(self._text).digest:
                raise Different({post.rank: board.text(post), board.rank: self._text})
            if self._tensor.numel():
                below_autograd(self._tensor.copy_, board.data(post, self._tensor.dtype, self._tensor.shape))
        finally:
            self._letters.took(post.rank, number)

    def _pause(self, deadline: float) -> None:
        for rank, other in self._letters._board.others.items():
            other.check_alive()
            if time.monotonic() > deadline:
                raise Stopped(rank, "the time was up")
        os.sched_yield()
        time.sleep(min(PAUSE_SECONDS, SLICE_SECONDS))
