"""The memory of each rank in a step, grouped by ranks with slices of equal shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchshard.compiler.what_if import program_of
from torchshard.core.sharding import local_shape
from torchshard.plans.plan import Plan

MOST = 64
"""With more ranks than this, only the first and the last are computed."""


class RankMemory(NamedTuple):
    """The memory of each of several ranks with slices of equal shapes."""

    ranks: tuple[int, ...]
    nbytes: Mapping[str, float]
    """Kind -> bytes per rank, without 'peak'; for a loaded plan only the parameters."""
    of: int = 0
    """The total number of ranks, if they are too many to compute the memory of each; else 0."""

    @property
    def total(self) -> float:
        """Bytes per rank."""
        return sum(self.nbytes.values())

    @property
    def name(self) -> str:
        """'rank 3', 'ranks 0-2, 5'."""
        runs = [list(run) for _, run in itertools.groupby(enumerate(self.ranks), lambda place: place[1] - place[0])]
        texts = [f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
        return f"rank{'s' * (len(self.ranks) > 1)} {', '.join(texts)}{f' of {self.of}' if self.of else ''}"


def memory_of_ranks(plan: Plan) -> list[RankMemory]:
    """Each rank's memory by kind, in a training step or in a call."""
    places = [*itertools.product(*(range(each.world_size) for each in plan.axes))]
    groups: dict[Shapes, list[int]] = {}
    for rank, place in enumerate(places):
        if len(places) <= MOST or rank in (0, len(places) - 1):
            groups.setdefault(_shapes(plan, (place[-1], *place[:-1])), []).append(rank)
    of = len(places) if len(places) > MOST else 0
    return [RankMemory(tuple(ranks), _held(plan, shapes, ranks[0]), of) for shapes, ranks in groups.items()]


Shapes = tuple[tuple[int, ...], ...]


def _shapes(plan: Plan, place: Sequence[int]) -> Shapes:
    """The local shapes of all parameters and buffers.

    Args:
        place: the rank's place on the weights' axis, then its places on the other axes.
    """
    return tuple(local_shape(stored.shape, plan.cuts(name, place)) for name, stored in plan.stored.items())


def _held(plan: Plan, shapes: Shapes, rank: int) -> dict[str, float]:
    program = program_of(plan)
    found = (plan.step_memory if rank == 0 else {}) or (program.memory_of(rank) if program else {})
    if found:
        return {kind: size for kind, size in found.items() if kind != "peak"}
    sizes = (stored.itemsize for stored in plan.stored.values())
    return {"parameters": float(sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True)))}
