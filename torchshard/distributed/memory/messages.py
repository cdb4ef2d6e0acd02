"""Messages between two ranks; the receiver matches them by tag, in sending order."""

from __future__ import annotations

import time
from collections import defaultdict, deque

from torch import Tensor

from torchshard.distributed.memory.board import LETTERS, LETTERS_RING, Board, Different, Post, Stopped, call_of
from torchshard.distributed.memory.segment import below_autograd
from torchshard.distributed.memory.stream import Ended

PAUSES = (1e-4, 5e-3)
"""Seconds between polls for a message from any rank: first, and maximum."""


class Letters:
    """The messages between a rank and the others of its group."""

    def __init__(self, board: Board) -> None:
        """Starts without messages."""
        self.board = board
        self._sent = [0] * board.size
        self._seen = [0] * board.size
        self._taken = [Ended() for _ in range(board.size)]
        self._arrived = defaultdict[tuple[int, int], deque[tuple[int, Post]]](deque)
        self._awaited = defaultdict[tuple[int, int], deque["Receipt"]](deque)

    def send(self, tensor: Tensor, rank: int, tag: int, text: str) -> None:
        """Posts a copy of a tensor, so the tensor may change at once.

        Raises:
            Stopped: the receiver has ended, or accepts no messages.
        """
        board = self.board
        board.check()
        board.check_other(rank)
        deadline = time.monotonic() + board.seconds
        while True:
            with board.lock:
                number = self._sent[rank]
                if number - board.others[rank].words[board.taken(board.rank)] < LETTERS_RING:
                    start = board.write(call_of(text), (tensor,), (tag,), LETTERS + rank, number)
                    board.own.words[board.letter(rank, number)] = start
                    board.own.publish(board.sent(rank), number + 1)
                    self._sent[rank] += 1
                    return
            board.check_other(rank)
            if time.monotonic() > deadline:
                raise Stopped(rank, f"it has taken none of the last {LETTERS_RING} messages")
            time.sleep(PAUSES[0])

    def receive(self, tensor: Tensor, rank: int | None, tag: int, text: str) -> Receipt:
        """Requests the next message with a tag, after earlier requests.

        Args:
            tensor: receives the data.
            rank: the sender; None: any rank.
        """
        self.board.check()
        receipt = Receipt(self, tensor, rank, tag, text)
        if rank is not None:
            with self.board.lock:
                self._awaited[rank, tag].append(receipt)
        return receipt

    def withdraw(self, receipt: Receipt) -> None:
        """Cancels a request; the next request gets the message."""
        with self.board.lock:
            for awaited in self._awaited.values():
                if receipt in awaited:
                    awaited.remove(receipt)

    def deliver(self) -> None:
        """Matches arrived messages with requests."""
        board = self.board
        with board.lock:
            for rank, other in board.others.items():
                while self._seen[rank] < other.words[board.sent(board.rank)]:
                    number = self._seen[rank]
                    post = board.read(rank, other.words[board.letter(board.rank, number)])
                    self._arrived[rank, post.values[0]].append((number, post))
                    self._seen[rank] += 1
            for key in [key for key, awaited in self._awaited.items() if awaited]:
                while self._awaited[key] and self._arrived[key]:
                    self._awaited[key].popleft().take(*self._arrived[key].popleft())

    def deliver_any(self, receipt: Receipt, tag: int) -> None:
        """Matches a request for any rank with an arrived message not requested by sender."""
        self.deliver()
        with self.board.lock:
            for rank in self.board.others:
                if not receipt.is_done and not self._awaited[rank, tag] and self._arrived[rank, tag]:
                    receipt.take(*self._arrived[rank, tag].popleft())

    def took(self, rank: int, number: int) -> None:
        """Releases the memory of a message."""
        board = self.board
        with board.lock:
            if self._taken[rank].add(number):
                board.own.set(board.taken(rank), self._taken[rank].below)


class Receipt:
    """An awaited message."""

    def __init__(self, letters: Letters, tensor: Tensor, rank: int | None, tag: int, text: str) -> None:
        """Stores the request."""
        self._letters, self._tensor, self._tag, self._text = letters, tensor, tag, text
        self.rank = rank
        self.is_done = False
        self._failure: Exception | None = None

    def take(self, number: int, post: Post) -> None:
        """Copies the data of the matched message."""
        board, self.rank = self._letters.board, post.rank
        try:
            expected = call_of(self._text)
            if post.digest != expected.digest:
                raise Different({post.rank: board.call(post), board.rank: expected})
            if self._tensor.numel():
                below_autograd(self._tensor.copy_, board.data(post, self._tensor.dtype, self._tensor.shape))
        except Exception as error:
            self._failure = error
        self._letters.took(post.rank, number)
        self.is_done = True

    def is_completed(self) -> bool:
        """Returns whether the message has arrived."""
        if not self.is_done:
            self._letters.deliver() if self.rank is not None else self._letters.deliver_any(self, self._tag)
        return self.is_done

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the message.

        Raises:
            Stopped: the sender has ended or timed out.
            Different: the message has another size or dtype.
        """
        board = self._letters.board
        deadline = time.monotonic() + (board.seconds if seconds is None else seconds)
        pause, longest = PAUSES
        try:
            while not self.is_done:
                rank = self.rank
                count = 0 if rank is None else board.others[rank].words[board.sent(board.rank)]
                if self.is_completed():
                    break
                if rank is not None:  # another thread may have delivered the counted messages, so wait for one more
                    board.wait(rank, board.sent(board.rank), count + 1, deadline)
                    continue
                self._check_any(deadline)
                time.sleep(pause)
                pause = min(2 * pause, longest)
        except Stopped as error:
            self._letters.withdraw(self)
            self._failure, self.is_done = error, True
        if self._failure is not None:
            raise self._failure

    def _check_any(self, deadline: float) -> None:
        """Raises Stopped if no other rank can send any more, or on time-out."""
        gone = list[Stopped]()
        board = self._letters.board
        for rank in board.others:
            try:
                board.check_other(rank)
            except Stopped as error:
                gone.append(error)
        if len(gone) == len(board.others) and not self.is_completed():
            raise gone[0]
        if time.monotonic() > deadline:
            raise Stopped(next(iter(board.others)), "the time was up, for a message of any rank")
