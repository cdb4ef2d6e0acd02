"""Conversions with the sizes and layouts that their tests run, and values that are laid out over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchshard import I, P, R, S
from torchshard.testing import Layout, Shard, split

Case = tuple[str, Layout, Layout, tuple[int, ...]]
"""The conversion's name, the layouts from which and to which, and the full shape."""


def cases() -> Iterator[Case]:
    """Every conversion along first, middle and last dims: even, uneven, fewer than ranks, in segments and in units."""
    shards: list[tuple[Shard, Shard, tuple[int, ...]]] = [
        (S(0), S(1), (12, 4)),
        (S(1), S(0), (5, 7)),
        (S(0), S(2), (1, 3, 5)),
        (S(1, ((4, 1), (3, 1))), S(0), (4, 7)),
        (S(2, ((3, 2),)), S(0, ((2, 1), (4, 1))), (6, 2, 6)),
        (S(0, ((5, 2), (1, 3))), S(1), (13, 2)),
    ]
    for a, b, shape in shards:
        yield "scatter", I, a, shape
        yield "gather", a, I, shape
        yield "reduce_scatter", P, a, shape
        yield "all_gather", a, R, shape
        yield "narrow", R, a, shape
        yield "all_to_all", a, b, shape
        yield "all_to_all", b, a, shape
        yield "pad", a, P, shape
    for shape in [(5, 4), (1,), (), (0, 3)]:
        yield "copy", I, R, shape
        yield "reduce", P, I, shape
        yield "all_reduce", P, R, shape


def spread(layout: Layout, shape: tuple[int, ...], world: int, *, equal: bool = False) -> list[Tensor]:
    """The ranks' parts of a random value; `equal`: a partial sum has equal addends."""
    if layout == P:
        made = [torch.randn(shape, dtype=torch.float64) for _ in range(world)]
        return made[:1] * world if equal else made
    whole = torch.randn(shape, dtype=torch.float64)
    return [split(whole, layout, rank, world).clone() for rank in range(world)]
