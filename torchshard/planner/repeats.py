"""Finds repeated blocks of a graph by structure: runs of equal blocks, each of which reads the one before it.

A node is an `Item`: references to its operands, and a key for everything else. Two items match at a distance of
`period` if their keys are equal and their references are equal, each pair either relative to the items' positions (the
block's own values, the block before) or absolutely (a mask that all blocks share).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchshard.planner.constants import MAX_PERIODS, MIN_BLOCKS, MULTIPLES


@dataclass(frozen=True)
class Reference:
    """An operand of an item."""

    absolute: int
    """The identity of the value."""
    position: int
    """The position of the item that makes the value; for a placeholder, of the first item that reads it."""
    slot: int = 0
    """For a placeholder, its number among the operands of that item."""


@dataclass(frozen=True)
class Item:
    """One node of a graph."""

    key: Hashable
    references: tuple[Reference, ...] = ()
    begins: bool = False
    """Whether blocks should begin here, if a run has such an item."""


@dataclass(frozen=True)
class Repetition:
    """`count` blocks of `period` items each, starting at item `start`."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The position after its last item."""
        return self.start + self.period * self.count

    def block_of(self, position: int) -> int:
        """Returns the block that contains an item; negative before the run, `count` or more after it."""
        return (position - self.start) // self.period


def find_runs(items: Sequence[Item]) -> list[Repetition]:
    """Returns disjoint runs in order of their start, found greedily by the number of items that they spare."""
    periods, users = _periods(items), _last_readers(items)
    found = _found(items, users, periods)
    if 2 * sum(run.period * run.count for run in found) < len(items):  # layers may alternate
        multiples = dict.fromkeys(times * period for times in MULTIPLES for period in periods[: MAX_PERIODS // 2])
        found = max(found, _found(items, users, [*periods, *multiples]), key=lambda runs: sum(map(_spared, runs)))
    return found


def _found(items: Sequence[Item], users: Sequence[int], periods: Sequence[int]) -> list[Repetition]:
    found: list[Repetition] = []
    spans = [(0, len(items))]
    while spans:
        low, high = spans.pop()
        runs = [run for period in periods for run in _runs_of(items, users, period, low, high)]
        if runs:
            best = max(runs, key=lambda run: (_spared(run), -run.period))
            found.append(best)
            spans += [(low, best.start), (best.stop, high)]
    return sorted(found, key=lambda run: run.start)


def _spared(run: Repetition) -> int:
    return (run.count - MIN_BLOCKS + 1) * run.period


def _periods(items: Sequence[Item]) -> list[int]:
    """Returns the most frequent distances between consecutive items with equal keys."""
    at: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        at.setdefault(item.key, []).append(i)
    distances = Counter(b - a for places in at.values() if len(places) >= MIN_BLOCKS for a, b in pairwise(places))
    return [distance for distance, _ in distances.most_common(MAX_PERIODS)]


def _last_readers(items: Sequence[Item]) -> list[int]:
    """Returns, for each position, the last position that reads a value made there."""
    last = list(range(len(items)))
    for i, item in enumerate(items):
        for reference in item.references:
            if reference.position >= 0:
                last[reference.position] = max(last[reference.position], i)
    return last


def _match(items: Sequence[Item], i: int, period: int) -> bool:
    here, there = items[i], items[i + period]
    if here.key != there.key or len(here.references) != len(there.references):
        return False
    return all(
        a.absolute == b.absolute
        or (a.slot == b.slot and a.position + period == b.position and a.position >= 0 and i - a.position < 2 * period)
        for a, b in zip(here.references, there.references, strict=True)
    )


def _runs_of(items: Sequence[Item], last: Sequence[int], period: int, low: int, high: int) -> list[Repetition]:
    runs, start = [], low
    for i in range(low, high):
        if i + period >= high or not _match(items, i, period):
            if i + period - start >= MIN_BLOCKS * period:
                run = _aligned(items, last, period, start, i + period)
                runs += _closed(last, run)
            start = i + 1
    return runs


def _aligned(items: Sequence[Item], last: Sequence[int], period: int, start: int, stop: int) -> Repetition:
    """Returns the run within [start, stop) whose blocks begin where they should, or else the fewest values cross."""
    middle = start + ((stop - start) // period // 2) * period

    def crossing(shift: int) -> int:
        boundary = middle + shift
        return sum(last[i] >= boundary for i in range(boundary - period, boundary))

    shifts = range(period)
    keeps_count = (stop - start) % period

    def rank(shift: int) -> tuple[bool, float, int]:
        return not items[start + shift].begins, crossing(shift) - (shift <= keeps_count) * 0.5, shift

    best = min(shifts, key=rank)
    return Repetition(start + best, period, (stop - start - best) // period)


def _closed(last: Sequence[int], run: Repetition) -> list[Repetition]:
    """Returns the longest part of a run in which only a block itself and the next one read an inner block."""
    open_blocks = [
        block
        for block in range(run.count)
        if any(
            last[i] >= run.start + (block + 2) * run.period
            for i in range(run.start + block * run.period, run.start + (block + 1) * run.period)
        )
    ]
    # All blocks may read the first block, and any later item may read the last.
    bounds = [b for b in open_blocks if b > 0]
    edges = [-1, *bounds, run.count]
    begin, end = max(pairwise(edges), key=lambda pair: pair[1] - pair[0])
    first, count = max(begin, 0), end - max(begin, 0)
    return [Repetition(run.start + first * run.period, run.period, count)] if count >= MIN_BLOCKS else []
