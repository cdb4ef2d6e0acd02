"""The memory of each rank in a step, those together that hold slices of the same shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchshard.compiler.what_if import program_of
from torchshard.core.sharding import local_shape
from torchshard.plans.plan import Plan

MOST = 64
"""Of more ranks than these the first and the last are looked at alone."""


class RankMemory(NamedTuple):
    """What ranks of equal slices hold."""

    ranks: tuple[int, ...]
    nbytes: Mapping[str, float]
    """Kind -> bytes of one of them, without 'peak'; of a loaded plan the parameters alone."""
    of: int = 0
    """How many ranks there are, if they are too many to compute the memory of each."""

    @property
    def total(self) -> float:
        """Bytes of one of them."""
        return sum(self.nbytes.values())

    @property
    def name(self) -> str:
        """'rank 3', 'ranks 0-2, 5'."""
        runs = [list(run) for _, run in itertools.groupby(enumerate(self.ranks), lambda place: place[1] - place[0])]
        texts = [f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
        return f"rank{'s' * (len(self.ranks) > 1)} {', '.join(texts)}{f' of {self.of}' if self.of else ''}"


def memory_of_ranks(plan: Plan) -> list[RankMemory]:
    """What each rank takes in a step of training, or in a call, by kind."""
    places = [*itertools.product(*(range(each.world_size) for each in plan.axes))]
    groups: dict[Shapes, list[int]] = {}
    for rank, place in enumerate(places):
        if len(places) <= MOST or rank in (0, len(places) - 1):
            groups.setdefault(_shapes(plan, (place[-1], *place[:-1])), []).append(rank)
    of = len(places) if len(places) > MOST else 0
    return [RankMemory(tuple(ranks), _held(plan, shapes, ranks[0]), of) for shapes, ranks in groups.items()]


Shapes = tuple[tuple[int, ...], ...]


def _shapes(plan: Plan, place: Sequence[int]) -> Shapes:
    """Of the slices of all parameters and buffers; the place is that on the weights' axis, then those on the others."""
    return tuple(local_shape(stored.shape, plan.cuts(name, place)) for name, stored in plan.stored.items())


def _held(plan: Plan, shapes: Shapes, rank: int) -> dict[str, float]:
    program = program_of(plan)
    found = (plan.step_memory if rank == 0 else {}) or (program.memory_of(rank) if program else {})
    if found:
        return {kind: size for kind, size in found.items() if kind != "peak"}
    sizes = (stored.itemsize for stored in plan.stored.values())
    return {"parameters": float(sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True)))}
