"""Words: how a tensor is distributed over the ranks of a mesh of several axes, one layout per axis.

    model: S(0; 7x8) . data: S(0)

The letters are applied one after the other, each to what the one before has left: each rank of `model` holds its heads,
and of those each rank of `data` a slice. So a word's meaning is recursion: split by the first letter, and what comes of
that by the others; join in the other order. Its gradient's word has the dual of each letter, and a conversion changes
one letter, which must be the last one that splits its dim. Axes without a letter hold the whole, or equal slices.

The order of letters is not that of the mesh: weights are split over the model axis first, and what that leaves over the
data axis (FSDP within tensor parallelism, for which PyTorch needs a `_StridedShard`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from torchshard.core import layouts
from torchshard.core.layouts import I, Layout, Shard, is_whole, parse_layout
from torchshard.core.mesh import Mesh, MeshAxis, Place


class Letter(NamedTuple):
    """The layout over one axis of what earlier letters have left."""

    axis: MeshAxis
    layout: Layout

    def __str__(self) -> str:
        return f"{self.axis.name}: {self.layout}"


Word: TypeAlias = tuple[Letter, ...]
"""The letters, first to last; an axis without one holds what the others leave, invariant."""
WHOLE: Word = ()


def word(*letters: tuple[MeshAxis, Layout]) -> Word:
    """Returns the word of these letters, in one spelling: without those of invariant values and of axes of one rank.

    Only letters that split one dim have an order of their own; others give the same slices in any order.
    """
    kept = [Letter(axis, layout) for axis, layout in letters if layout != I and axis.size > 1]
    return tuple(sorted(kept, key=_place_in_word))


def _place_in_word(letter: Letter) -> tuple[int, str]:
    return (letter.layout.dim, "") if isinstance(letter.layout, Shard) else (-1, letter.axis.name)


def dual(of: Word) -> Word:
    """Returns the word of the gradient of a value with this word."""
    return word(*((axis, layouts.dual(layout)) for axis, layout in of))


def text(of: Word) -> str:
    """Returns a word as text: 'model: S(0) . data: S(0)'; 'I' if the value is whole."""
    return " . ".join(map(str, of)) or str(I)


def parse(given: str, mesh: Mesh) -> Word:
    """Returns the word that `text` gives for a mesh with these axes.

    Raises:
        ValueError: the text is no word, or names an axis that the mesh does not have.
    """
    if given == str(I):
        return WHOLE
    letters = []
    for part in given.split(" . "):
        found = re.fullmatch(r"(\w+): (.+)", part)
        if found is None:
            raise ValueError(f"invalid letter {part!r}: expected an axis and a layout, such as 'data: S(0)'")
        letters.append((mesh.axis(found[1]), parse_layout(found[2])))
    return word(*letters)


def split(tensor: Tensor, of: Word, place: Place) -> Tensor:
    """Returns what the rank at a place holds of a whole tensor."""
    for axis, layout in of:
        tensor = layouts.split(tensor, layout, place[axis.name], axis.size)
    return tensor


def local_shape(shape: Sequence[int], of: Word, place: Place) -> tuple[int, ...]:
    """Returns the shape of what the rank at a place holds of a tensor of global `shape`."""
    for axis, layout in of:
        shape = layouts.local_shape(shape, layout, place[axis.name], axis.size)
    return tuple(shape)


def join(pieces: Sequence[Tensor], of: Word, mesh: Mesh) -> list[Tensor]:
    """Returns the whole tensor from what each rank holds, once for each place on the axes where it is whole.

    Args:
        pieces: in the order of `mesh.places()`.
    """
    held = {tuple(place.values()): piece for place, piece in zip(mesh.places(), pieces, strict=True)}
    for axis, layout in reversed(of):
        if is_whole(layout):
            continue
        at, along = mesh.axes.index(axis), dict[tuple[int, ...], list[Tensor]]()
        for numbers, piece in held.items():
            along.setdefault((*numbers[:at], *numbers[at + 1 :]), []).append(piece)
        held = {(*others[:at], 0, *others[at:]): layouts.join(group, layout) for others, group in along.items()}
    return list(held.values())
