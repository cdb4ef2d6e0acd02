"""Shardings: how a tensor is distributed over the ranks of a mesh, one placement per axis.

    model: S(0; 7x8) . data: S(0)

The placements are applied one after the other, each to the slices that the one before leaves: each rank of `model` has
its heads, and of those each rank of `data` a slice. So a sharding is a recursion: split by the first placement, and
the slices by the others; join in the opposite order. The gradient's sharding has the dual of each placement, and a
conversion changes one placement, which must be the last one that splits its dim. Over an axis without a placement the
tensor is replicated: the ranks along it have equal slices, or all of it.

The order of placements is not that of the mesh: weights are split over the model axis first, and their slices over the
data axis (FSDP within tensor parallelism, for which PyTorch needs a `_StridedShard`).

People read shardings in the types of tensors, whose shapes are global: each dim names the axes that split it, in order.

    f32[8,512,64@tp]               a slice of the last dim on each rank of tp, equal on all other axes
    f32[8@dp,2304@tp(768+768+768)] split over two axes; each rank of tp has a slice of each of three parts
    f32[4096@tp@dp,64]             split over tp, and each slice over dp
    f32[8,512] P@tp                each rank of tp has a partial sum
    f32[8,512] R@tp                each rank has all of it, and a partial sum of its gradient

As JAX's `float32[8@X,4]`, and its `{U:X}` and `{R:X}`; the class is named after `jax.sharding.Sharding`.
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
    """A placement as one rank of its axis has it."""

    layout: Layout
    rank: int
    size: int
    """The number of ranks along the axis."""


Cuts: TypeAlias = tuple[Cut, ...]
"""How one rank's slice of a tensor is cut out of the full tensor, one cut after the other."""


class Placement(NamedTuple):
    """The layout over one axis of the slices that earlier placements leave."""

    axis: MeshAxis
    layout: Layout

    def __repr__(self) -> str:
        return f"{self.axis}: {self.layout}"


class Sharding(tuple[Placement, ...]):
    """The placements of a tensor, first to last. It prints as '(tp: S(0), dp: S(0))'."""

    __slots__ = ()

    @classmethod
    def of(cls, *placements: tuple[MeshAxis, Layout]) -> Sharding:
        """Returns the sharding with these placements, in one spelling: shardings compare by equality.

        Placements that are invariant, or over an axis of one rank, are left out. Only placements that split the same
        dim have an order of their own; others give the same slices in any order.
        """
        kept = [Placement(axis, layout) for axis, layout in placements if layout != I and axis.size > 1]
        return cls(sorted(kept, key=_order))

    @classmethod
    def parse(cls, given: str, mesh: Mesh) -> Sharding:
        """Returns the sharding whose `text` or `short_text` this is.

        Args:
            mesh: has the axes that the text names.

        Raises:
            ValueError: the text is no sharding, or names an axis that the mesh does not have.
        """
        return cls.of(*placements_in(given, mesh))

    @property
    def dual(self) -> Sharding:
        """The sharding of the gradient."""
        return Sharding.of(*((axis, layouts.dual(layout)) for axis, layout in self))

    @property
    def text(self) -> str:
        """The sharding as `parse` reads it: 'model: S(0) . data: S(0)'; 'I' if nothing is split."""
        return _AND.join(f"{axis.name}: {layout}" for axis, layout in self) or str(I)

    @property
    def short_text(self) -> str:
        """As `text`; with one placement, over the model's axis, the layout alone."""
        return str(self[0].layout) if [axis.name for axis, _ in self] == [MODEL] else self.text

    @property
    def is_split(self) -> bool:
        """Whether ranks have slices of the tensor."""
        return any(isinstance(layout, Shard) for _, layout in self)

    def over(self, axis: str) -> Layout:
        """Returns the layout over the axis with this name."""
        return next((layout for each, layout in self if each.name == axis), I)

    def cuts(self, place: Place) -> Cuts:
        """Returns how the slice of the rank at a place is cut out."""
        return tuple(Cut(layout, place[axis.name], axis.size) for axis, layout in self)

    def all_cuts(self) -> list[Cuts]:
        """Returns how each distinct slice is cut out, in the order of the ranks."""
        split = [each for each in self if isinstance(each.layout, Shard)]
        along = [[Cut(layout, rank, axis.size) for rank in range(axis.size)] for axis, layout in split]
        return list(itertools.product(*along))

    def local(self, tensor: Tensor, place: Place) -> Tensor:
        """Returns the slice of a full tensor that the rank at a place has."""
        for cut in self.cuts(place):
            tensor = layouts.split(tensor, *cut)
        return tensor

    def join(self, pieces: Iterable[Tensor], mesh: Mesh) -> list[Tensor]:
        """Returns the full tensor from the ranks' slices, once for each place on the axes that replicate it.

        Args:
            pieces: in the order of `mesh.places()`.
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
    return (placement.layout.dim, "") if isinstance(placement.layout, Shard) else (-1, placement.axis.name)


def axis_names(given: str) -> list[str]:
    """Returns the names of the axes in a sharding's `text` or `short_text`."""
    return [each.partition(": ")[0] if ": " in each else MODEL for each in given.split(_AND)]


def placements_in(given: str, mesh: Mesh) -> list[Placement]:
    """Returns the placements in such a text as they are spelled, with those that `Sharding.of` leaves out."""
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
