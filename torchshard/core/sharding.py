"""Shardings: how a tensor is distributed over the ranks of a mesh, one placement per axis.

    model: S(0; 7x8) . data: S(0)

Placements are applied in order, each to the slices of the previous one: each rank of `model` has
its heads, and each rank of `data` a slice of those heads. So a sharding is a recursion: split by
the first placement, then split the slices by the others; join in reverse order. The gradient's
sharding has the dual of each placement. A conversion changes one placement, which must be the last
one that splits its dim. The tensor is replicated over an axis without a placement.

Placements may be in a different order than the mesh axes: weights are split over the model axis
first, and their slices over the data axis (FSDP within tensor parallelism, for which PyTorch needs
a `_StridedShard`).

Users read shardings in tensor types. The shape is global, and each dim names the axes that split
it, in order.

    f32[8,512,64@tp]               a slice of the last dim on each rank of tp, equal on all other axes
    f32[8@dp,2304@tp(768+768+768)] split over two axes; each rank of tp has a slice of each of three parts
    f32[4096@tp@dp,64]             split over tp, and each slice over dp
    f32[8,512] P@tp                each rank of tp has a partial sum
    f32[8,512] R@tp                each rank has all of it, and a partial sum of its gradient

The notation follows JAX's `float32[8@X,4]`, `{U:X}` and `{R:X}`; the class is named after
`jax.sharding.Sharding`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from torchshard.core import layouts
from torchshard.core.layouts import I, Layout, Shard, is_whole, parse_layout
from torchshard.core.mesh import MODEL, Mesh, MeshAxis, Place


class Cut(NamedTuple):
    """A placement for one rank of its axis."""

    layout: Layout
    rank: int
    size: int
    """The number of ranks along the axis."""


Cuts: TypeAlias = tuple[Cut, ...]
"""The cuts, in order, that take one rank's slice out of the full tensor."""


class Placement(NamedTuple):
    """The layout over one axis, applied to the slices of earlier placements."""

    axis: MeshAxis
    layout: Layout

    def __repr__(self) -> str:
        return f"{self.axis}: {self.layout}"


class Sharding(tuple[Placement, ...]):
    """The placements of a tensor, first to last. It prints as '(tp: S(0), dp: S(0))'."""

    __slots__ = ()

    @classmethod
    def of(cls, *placements: tuple[MeshAxis, Layout]) -> Sharding:
        """Returns the canonical sharding with these placements; shardings compare by equality.

        Placements that are invariant, or over an axis of one rank, are omitted. Order matters only
        among placements that split the same dim; others give the same slices in any order.
        """
        kept = [Placement(axis, layout) for axis, layout in placements if layout != I and axis.size > 1]
        return cls(sorted(kept, key=_order))

    @classmethod
    def parse(cls, given: str, mesh: Mesh) -> Sharding:
        """Returns the sharding from its `text` or `short_text`.

        Args:
            mesh: has the axes that the text names.

        Raises:
            ValueError: the text is not a sharding, or names an axis that the mesh does not have.
        """
        return cls.of(*placements_in(given, mesh))

    @property
    def dual(self) -> Sharding:
        """The sharding of the gradient."""
        return Sharding.of(*((axis, layouts.dual(layout)) for axis, layout in self))

    @property
    def text(self) -> str:
        """The text that `parse` reads: 'model: S(0) . data: S(0)'; 'I' without placements."""
        return _AND.join(f"{axis.name}: {layout}" for axis, layout in self) or str(I)

    @property
    def short_text(self) -> str:
        """Only the layout if the one placement is over the model axis: 'S(0)'; otherwise `text`."""
        return str(self[0].layout) if [axis.name for axis, _ in self] == [MODEL] else self.text

    @property
    def is_split(self) -> bool:
        """Whether ranks have slices of the tensor."""
        return any(isinstance(layout, Shard) for _, layout in self)

    def over(self, axis: str) -> Layout:
        """Returns the layout over the axis with this name."""
        return next((layout for each, layout in self if each.name == axis), I)

    def cuts(self, place: Place) -> Cuts:
        """Returns the cuts that give the slice of the rank at a place."""
        return tuple(Cut(layout, place[axis.name], axis.size) for axis, layout in self)

    def all_cuts(self) -> list[Cuts]:
        """Returns the cuts of each distinct slice, in rank order."""
        split = [each for each in self if isinstance(each.layout, Shard)]
        along = [[Cut(layout, rank, axis.size) for rank in range(axis.size)] for axis, layout in split]
        return list(itertools.product(*along))

    def local(self, tensor: Tensor, place: Place) -> Tensor:
        """Returns the slice of a full tensor for the rank at a place."""
        for cut in self.cuts(place):
            tensor = layouts.split(tensor, *cut)
        return tensor

    def join(self, pieces: Iterable[Tensor], mesh: Mesh) -> list[Tensor]:
        """Returns the full tensor from the ranks' slices, once per place on axes that replicate it.

        Args:
            pieces: the slices, in the order of `mesh.places()`.
        """
        held = {tuple(place.values()): piece for place, piece in zip(mesh.places(), pieces, strict=True)}
        for axis, layout in reversed(self):
            if is_whole(layout):
                continue
            at, along = mesh.axes.index(axis), dict[tuple[int, ...], list[Tensor]]()
            for numbers, piece in held.items():
                along.setdefault((*numbers[:at], *numbers[at + 1 :]), []).append(piece)
            held = {(*others[:at], 0, *others[at:]): layouts.join(group, layout) for others, group in along.items()}
        return list(held.values())


UNSHARDED = Sharding()
_AND = " . "


def _order(placement: Placement) -> tuple[int, str]:
    # sorting is stable, so placements that split the same dim keep their order
    return (placement.layout.dim, "") if isinstance(placement.layout, Shard) else (-1, placement.axis.name)


def axis_names(given: str) -> list[str]:
    """Returns the names of the axes in a sharding's `text` or `short_text`."""
    return [each.partition(": ")[0] if ": " in each else MODEL for each in given.split(_AND)]


def placements_in(given: str, mesh: Mesh) -> list[Placement]:
    """Returns the placements in a sharding's text as written, even those that `Sharding.of` omits."""
    if given == str(I):
        return []
    named = zip(axis_names(given), given.split(_AND), strict=True)
    return [Placement(mesh.axis(name), parse_layout(each.removeprefix(f"{name}: "))) for name, each in named]


def split_text(shape: Sequence[object], sharding: Sharding, dtype: str = "") -> str:
    """Returns the type of a tensor of global `shape` with its sharding: 'f32[8,64@tp]', 'f32[8,64] P@tp'."""
    dims, after = [str(size) for size in shape], ""
    for axis, layout in sharding:
        if isinstance(layout, Shard):
            dims[layout.dim] += f"@{axis}" + (f"({layout.parts_text})" if layout.parts else "")
        else:
            after += f" {layout}@{axis}"
    return f"{dtype}[{','.join(dims)}]{after}"


def local_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Returns the shape of a rank's slice of a tensor of global `shape`."""
    for cut in cuts:
        shape = layouts.local_shape(shape, *cut)
    return tuple(shape)
