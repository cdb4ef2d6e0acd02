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


def agree(group: Group, facts: Facts | Callable[[], Facts], mine: int, error: type[ShardError], what: str) -> None:
    """Raises `error` on every rank if the ranks' digests differ.

    Args:
        facts: what the digest is of; called only where the digests differ.
        mine: the digest of this rank's facts.
        what: the error's first line.
    """
    if group.size == 1:
        return
    bounds = torch.tensor([mine, -mine], dtype=torch.int64, device=_device(group))
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group.process_group)
    highest, lowest = bounds.tolist()
    if highest == -lowest:
        return
    own = dict(facts() if callable(facts) else facts)
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, own, group=group.process_group)
    raise error(what, where=_first_difference(everyone), why=_shown(everyone), attempt="the same call on every rank")


def _first_difference(everyone: list[dict[str, str]]) -> str:
    keys = list(dict.fromkeys(key for facts in everyone for key in facts))
    return next((key for key in keys if len({facts.get(key) for facts in everyone}) > 1), "an unnamed fact")


def _shown(everyone: list[dict[str, str]]) -> str:
    key = _first_difference(everyone)
    return "; ".join(f"rank {rank}: {facts.get(key, 'nothing'):.200}" for rank, facts in enumerate(everyone))
