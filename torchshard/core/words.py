"""Words: how a tensor is distributed over the ranks of a mesh of several axes, one layout per axis.

    model: S(0; 7x8) . data: S(0)

The letters are applied one after the other, each to what the one before has left: each rank of `model` holds its heads,
and of those each rank of `data` a slice. So a word's meaning is recursion: split by the first letter, and what comes of
that by the others; join in the other order. Its gradient's word has the dual of each letter, and a conversion changes
one letter, which must be the last one that splits its dim. Axes without a letter hold the whole, or equal slices.

The order of letters is not that of the mesh: weights are split over the model axis first, and what that leaves over the
data axis (FSDP within tensor parallelism, for which PyTorch needs a `_StridedShard`).

People read words in the shapes of tensors, which are those of the whole: each dim says which axes split it, in order.

    f32[8,512,64@tp]               a slice of the last dim on each rank of tp, and equal on all others
    f32[8@dp,2304@tp(768+768+768)] split over two axes; each rank of tp has a slice of each of three parts
    f32[4096@tp@dp,64]             split over tp, and what each rank has over dp
    f32[8,512] P@tp                each rank of tp has a partial sum
    f32[8,512] R@tp                each rank has the whole, and a partial sum of its gradient

As JAX's `float32[8@X,4]`, and its `{U:X}` and `{R:X}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from torchshard.core import layouts
from torchshard.core.layouts import I, Layout, Shard, is_whole, parse_layout
from torchshard.core.mesh import MODEL, Mesh, MeshAxis, Place


class Cut(NamedTuple):
    """A letter as one rank of its axis has it."""

    layout: Layout
    rank: int
    size: int
    """The number of ranks along the axis."""


Cuts: TypeAlias = tuple[Cut, ...]
"""How one rank's slice of a tensor is cut out of the whole, one cut after the other."""


class Letter(NamedTuple):
    """The layout over one axis of what earlier letters have left."""

    axis: MeshAxis
    layout: Layout

    def __repr__(self) -> str:
        return f"{self.axis}: {self.layout}"


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
    """Returns a word as text that `parse` reads: 'model: S(0) . data: S(0)'; 'I' if the value is whole."""
    return _AND.join(f"{axis.name}: {layout}" for axis, layout in of) or str(I)


_AND = " . "


def short_text(of: Word) -> str:
    """Returns a word as text; of one letter over the model's axis, the layout alone."""
    return str(of[0].layout) if [axis.name for axis, _ in of] == [MODEL] else text(of)


def split_text(shape: Sequence[object], of: Word, dtype: str = "") -> str:
    """Returns the type of a whole tensor with how the ranks hold it: 'f32[8,64@tp]', 'f32[8,64] P@tp'."""
    dims, after = [str(size) for size in shape], ""
    for axis, layout in of:
        if isinstance(layout, Shard):
            dims[layout.dim] += f"@{axis}" + (f"({layout.parts_text})" if layout.parts else "")
        else:
            after += f" {layout}@{axis}"
    return f"{dtype}[{','.join(dims)}]{after}"


def letter_names(given: str) -> list[str]:
    """Returns the names of the axes of a word's letters, as `text` or `short_text` give it."""
    return [letter.partition(": ")[0] if ": " in letter else MODEL for letter in given.split(_AND)]


def parse(given: str, mesh: Mesh) -> Word:
    """Returns the word that `text` or `short_text` give for a mesh with these axes.

    Raises:
        ValueError: the text is no word, or names an axis that the mesh does not have.
    """
    return word(*letters(given, mesh))


def letters(given: str, mesh: Mesh) -> list[Letter]:
    """Returns the letters of such a text as they are spelled, with those that `word` leaves out."""
    if given == str(I):
        return []
    named = zip(letter_names(given), given.split(_AND), strict=True)
    return [Letter(mesh.axis(name), parse_layout(letter.removeprefix(f"{name}: "))) for name, letter in named]


def over(of: Word, axis: str) -> Layout:
    """Returns a word's letter over an axis."""
    return next((layout for letter, layout in of if letter.name == axis), I)


def is_split(of: Word) -> bool:
    """Returns whether ranks hold slices of a tensor, and not the whole."""
    return any(isinstance(layout, Shard) for _, layout in of)


def cuts(of: Word, place: Place) -> Cuts:
    """Returns how the rank at a place holds a tensor."""
    return tuple(Cut(layout, place[axis.name], axis.size) for axis, layout in of)


def all_cuts(of: Word) -> list[Cuts]:
    """Returns how the ranks that hold different slices of a tensor hold them, in the order of their numbers."""
    split = [letter for letter in of if isinstance(letter.layout, Shard)]
    along = [[Cut(layout, rank, axis.size) for rank in range(axis.size)] for axis, layout in split]
    return list(itertools.product(*along))


def split(tensor: Tensor, of: Word, place: Place) -> Tensor:
    """Returns what the rank at a place holds of a whole tensor."""
    for cut in cuts(of, place):
        tensor = layouts.split(tensor, *cut)
    return tensor


def local_shape(shape: Sequence[int], of: Cuts) -> tuple[int, ...]:
    """Returns the shape of what a rank holds of a tensor of global `shape`."""
    for cut in of:
        shape = layouts.local_shape(shape, *cut)
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
