"""Places of slices: where in the full tensor a rank's slice lies, as tensors and files record it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torchshard.core.errors import InputError
from torchshard.core.layouts import I
from torchshard.core.mesh import Mesh, MeshAxis, Place
from torchshard.core.sharding import Cut, Cuts, Sharding, axis_names, split_text
from torchshard.weights.following import SliceType

SlicePlace = tuple[str, str, int | tuple[int, ...], int | tuple[int, ...], tuple[int, ...]]
"""The place of a slice: (name, sharding, rank, number of ranks, global shape).

For a sharding with several placements, rank and number are tuples with one entry each.
"""
PLACE = "_torchshard_place"
"""The tensor attribute for the SlicePlace. It is part of the file format: saved tensors have it too."""
NOWHERE: SlicePlace = ("", "I", 0, 1, ())
"""The place of a tensor that is no slice."""


def slice_place(name: str, of: Sharding, place: Place, whole: Sequence[int]) -> SlicePlace:
    """Returns the place of a rank's slice; `place` is the rank's place in the mesh."""
    text, held = of.short_text, of.cuts(place) or (Cut(I, 0, 1),)
    if len(held) == 1:
        return name, text, held[0].rank, held[0].size, tuple(whole)
    return name, text, tuple(cut.rank for cut in held), tuple(cut.size for cut in held), tuple(whole)


def cuts_at(place: SlicePlace) -> Cuts:
    """Returns the cuts that take a slice with this place out of the full tensor."""
    sharding, where = held_at(place)
    return sharding.cuts(where)


def held_at(place: SlicePlace) -> tuple[Sharding, Place]:
    """Returns the sharding of a slice, and its rank's place in the mesh."""
    _, text, rank, size, _ = place
    ranks, sizes_ = (n if isinstance(n, tuple) else (n,) for n in (rank, size))
    names = axis_names(text)
    mesh = Mesh(tuple(MeshAxis(size, name) for name, size in zip(names, sizes_, strict=True)))
    return Sharding.parse(text, mesh), dict(zip(names, ranks, strict=True))


def is_same_slice(a: SlicePlace, b: SlicePlace) -> bool:
    """Returns whether two places are the same slice of the same shape, whatever the names of tensors and axes."""
    try:
        return cuts_at(a) == cuts_at(b) and tuple(a[4]) == tuple(b[4])
    except (ValueError, TypeError, AttributeError, IndexError):  # a file may contain anything
        return False


def place_of(value: object) -> SlicePlace | None:
    """Returns the place of a tensor from a state dict; None for a tensor that is not a slice."""
    return cast(SlicePlace | None, getattr(value, PLACE, None))


def types_of(tensors: Sequence[object], own: Place) -> dict[int, SliceType]:
    """Returns a dict: number of a slice among the tensors -> its type.

    Args:
        own: this rank's place.

    Raises:
        InputError: a slice belongs to another rank.
    """
    found = dict[int, SliceType]()
    for i, place in enumerate(map(place_of, tensors)):
        if place is not None:
            of, where = held_at(place)
            if any(own.get(axis, rank) != rank for axis, rank in where.items()):
                raise InputError(
                    "slices of different ranks are computed with each other",
                    where=f"the slice {place_text(place)} of {place[0]!r}",
                    why=f"this rank's other slices are those at {dict(own)}: the result would be a slice of nothing",
                    attempt="whole tensors: model.full_state_dict(), or a checkpoint by ts.save and ts.load",
                )
            found[i] = SliceType(of, tuple(place[4]))
    return found


def place_text(place: SlicePlace) -> str:
    """Returns a place as text: '[8@tp,4] on rank 1 of 2'."""
    _, text, rank, world, shape = place
    try:
        text = split_text(shape, held_at(place)[0])
    except (ValueError, IndexError):  # a file may contain anything
        pass
    return f"{text} on rank {rank} of {world}"
