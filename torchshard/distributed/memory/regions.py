"""The allocator of a rank's segment: which ranges are in use, by which posts."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

ALIGNMENT = 64
"""In bytes; a cache line."""
KEPT_BYTES = 1 << 25
"""Free ranges longer than this return their pages to the machine."""


def aligned(size: int) -> int:
    """Rounds a number of bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Range(NamedTuple):
    start: int
    stop: int
    channel: int
    number: int


class Regions:
    """Allocates the lowest free range, so a loop writes to the same pages again and again."""

    def __init__(self, start: int, stop: int, give_back: Callable[[int, int], None]) -> None:
        """Starts with one free range.

        Args:
            give_back: frees the pages of a range.
        """
        self._start, self._stop, self._give_back = start, stop, give_back
        self._taken = list[_Range]()

    def take(self, size: int, channel: int, number: int, floor: Callable[[int], int]) -> int:
        """Allocates a range for a post of a channel.

        Args:
            floor: returns the number of a channel below which all readers have read its posts.

        Returns:
            its first byte.

        Raises:
            MemoryError: no free range is large enough.
        """
        if self._taken:
            self._release(floor)
        size = aligned(size)
        at = self._start
        for taken in self._taken:
            if taken.start - at >= size:
                break
            at = taken.stop
        if at + size > self._stop:
            raise MemoryError(f"{size} bytes, beside what others have not read yet, are more than a segment has")
        insort(self._taken, _Range(at, at + size, channel, number))
        return at

    def _release(self, floor: Callable[[int], int]) -> None:
        floors, kept = dict[int, int](), list[_Range]()
        for taken in self._taken:
            if taken.channel not in floors:
                floors[taken.channel] = floor(taken.channel)
            if taken.number >= floors[taken.channel]:
                kept.append(taken)
            elif taken.stop - taken.start > KEPT_BYTES:
                self._give_back(taken.start, taken.stop)
        self._taken = kept
