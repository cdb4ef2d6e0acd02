"""The ranks compare what they are about to do, before the first collective: a difference is one error on every rank.

A digest of the facts goes around in one small all-reduce; only where the digests differ do the facts themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from torchshard.distributed.groups import Group
from torchshard.errors import ShardError

Facts = Mapping[str, str]
"""What is compared, item by item, for the error's text."""


def digest(text: str) -> int:
    """62 bits of a hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _device(group: Group) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group.process_group) == "nccl" else "cpu")


class Agreement:
    """An exchange of digests that is under way until it is settled."""

    def __init__(
        self, group: Group, facts: Facts | Callable[[], Facts], mine: int, error: type[ShardError], what: str
    ) -> None:
        """Begins the exchange.

        Args:
            facts: what the digest is of; called only where the digests differ.
            mine: the digest of this rank's facts.
            what: the error's first line.
        """
        self._group, self._facts, self._error, self._what = group, facts, error, what
        self._work: Any = None
        if group.size > 1:
            self._bounds = torch.tensor([mine, -mine], dtype=torch.int64, device=_device(group))
            self._work = dist.all_reduce(self._bounds, dist.ReduceOp.MAX, group.process_group, async_op=True)

    def settle(self) -> None:
        """Waits for the other ranks, and raises the error on every rank if their digests differ; once."""
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        highest, lowest = self._bounds.tolist()
        if highest == -lowest:
            return
        own = dict(self._facts() if callable(self._facts) else self._facts)
        everyone: list[Any] = [None] * self._group.size
        dist.all_gather_object(everyone, own, group=self._group.process_group)
        where, why = _first_difference(everyone), _shown(everyone)
        raise self._error(self._what, where=where, why=why, attempt="the same call on every rank")


def agree(group: Group, facts: Facts | Callable[[], Facts], mine: int, error: type[ShardError], what: str) -> None:
    """Raises `error` on every rank if the ranks' digests differ."""
    Agreement(group, facts, mine, error, what).settle()


def _first_difference(everyone: list[dict[str, str]]) -> str:
    keys = list(dict.fromkeys(key for facts in everyone for key in facts))
    return next((key for key in keys if len({facts.get(key) for facts in everyone}) > 1), "an unnamed fact")


def _shown(everyone: list[dict[str, str]]) -> str:
    key = _first_difference(everyone)
    return "; ".join(f"rank {rank}: {facts.get(key, 'nothing'):.200}" for rank, facts in enumerate(everyone))
