"""The ranks compare what they are about to do, before the first collective: a difference is one error on every rank.

A digest of the facts goes around in one small all-reduce; only where the digests differ do the facts themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import ShardError
from torchshard.distributed.checks import announce, digest
from torchshard.distributed.groups import Group
from torchshard.distributed.wire import begin, finish

T = TypeVar("T")
Facts = Mapping[str, str]
"""What is compared, item by item, for the error's text."""


def fingerprint(tensor: Tensor) -> int:
    """63 bits that depend on every bit of a tensor's values and on their order (the mixing of splitmix64, summed)."""
    held = as_bytes(tensor)
    whole = held[: len(held) // 8 * 8].view(torch.int64)
    total = sum((b + 1) << (8 * i) for i, b in enumerate(held[len(whole) * 8 :].tolist()))
    for start in range(0, len(whole), _CHUNK):
        words = whole[start : start + _CHUNK]
        mixed = words + torch.arange(start + 1, start + 1 + len(words), device=held.device) * _GOLDEN
        for shift, factor in _MIXING:
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += int((mixed ^ (mixed >> 31)).sum())
    return total & (2**63 - 1)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's values in their order as bytes, of a memory that begins at a multiple of eight: words can be read."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.itemsize % 8:  # one element counts as contiguous, not here
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


_CHUNK = 1 << 20
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def agree(
    group: Group,
    facts: Facts | Callable[[], Facts],
    mine: int,
    error: Callable[..., ShardError],
    what: str,
    unlike: int = 0,
    near: Near | None = None,
) -> bool:
    """Raises `error` on every rank if the ranks' digests differ; its `where` is the name of the fact that differs.

    Args:
        facts: what the digest is of; called only where the digests differ.
        mine: the digest of this rank's facts.
        what: the error's first line.
        unlike: another number of this rank's.
        near: a number that must be the same up to rounding, and its fact.

    Returns:
        whether `unlike` is the same on all ranks.
    """
    if group.size == 1:
        return False
    announce(group, lambda: "comparing what the sharded model does")
    value, scale, name = near or Near()
    highest, lowest = _bounds(group, mine, unlike, _ordered(value), _ordered(scale))
    largest, spread = _number(highest[3]), _number(highest[2]) - _number(lowest[2])
    close = spread <= TOLERANCE * largest
    if highest[0] == lowest[0] and close:
        return highest[1] == lowest[1]
    own = dict(facts() if callable(facts) else facts) if close else {name: f"{value:.12g}"}
    everyone: list[Any] = [None] * group.size
    begin(group, "comparing what the ranks do", dist.all_gather_object, everyone, own, group=group.control)
    raise error(what, where=_first_difference(everyone), why=_shown(everyone), attempt="the same call on every rank")


class Near(NamedTuple):
    """What is compared up to rounding."""

    value: float = 0.0
    scale: float = 0.0
    """How large it could be."""
    name: str = ""


TOLERANCE = 1e-3
"""Of a number's scale: what ranks may differ by."""


def _ordered(number: float) -> int:
    """An integer in the order of the floats."""
    (held,) = struct.unpack("<q", struct.pack("<d", number))
    return held if held >= 0 else -(held & (2**63 - 1))


def _number(ordered: int) -> float:
    """The float of an `_ordered` one."""
    held = ordered if ordered >= 0 else -ordered | -(2**63)
    made: float = struct.unpack("<d", struct.pack("<q", held))[0]
    return made


def _bounds(group: Group, *mine: int) -> tuple[list[int], list[int]]:
    """Of each number, the ranks' highest and lowest."""
    what, bounds = "comparing what the ranks do", torch.tensor([*mine, *(-n for n in mine)])
    finish(group, what, begin(group, what, dist.all_reduce, bounds, dist.ReduceOp.MAX, group.control, async_op=True))
    held = bounds.tolist()
    return held[: len(mine)], [-n for n in held[len(mine) :]]


def together(group: Group, error: Callable[..., ShardError], what: str, make: Callable[[], T]) -> T:
    """What `make` gives, once it has given something on every rank: where it fails on one, every rank raises."""
    made, failure = None, None
    try:
        made = make()
    except Exception as caught:
        failure = caught
    text = "" if failure is None else str(failure)
    agree(group, {"what it gave": text or "what was asked for"}, digest(text), error, what)
    if failure is not None:
        raise failure
    return cast(T, made)


def _first_difference(everyone: list[dict[str, str]]) -> str:
    keys = list(dict.fromkeys(key for facts in everyone for key in facts))
    return next((key for key in keys if len({facts.get(key) for facts in everyone}) > 1), "an unnamed fact")


def _shown(everyone: list[dict[str, str]]) -> str:
    key = _first_difference(everyone)
    return "; ".join(f"rank {rank}: {facts.get(key, 'nothing'):.200}" for rank, facts in enumerate(everyone))
