"""The mesh of ranks that a program runs on: its axes, and a rank's coordinate on an axis.

A layout describes how a value is split across the ranks of one axis. Planning and rewriting use an
axis but not a rank; `localize` and later stages use a coordinate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, cast

from torchshard.core.layouts import BATCH, SEQUENCE

MODEL = "model"
"""The name of the model-parallel axis. Graphs use it as the group's name until a rank runs them."""
DATA = "data"
"""The name of the axis across the model-parallel groups."""


SHORT = {MODEL: "tp", DATA: "dp"}
"""The axis names that users read if they named no axes."""


def data_names(number: int) -> list[str]:
    """Returns the names of `number` axes across the model-parallel groups, outermost first."""
    return [DATA] if number == 1 else [f"{DATA}{i}" for i in range(1, number + 1)]


Data: TypeAlias = Literal["replicate", "shard", "shard_grad_op"]
"""How ranks that split the batch store weights. "replicate": in full, as in DDP. "shard": as
slices, gathered for the forward and again for the backward, as in FSDP and ZeRO-3. "shard_grad_op":
as slices gathered once, as in ZeRO-2."""
Holds: TypeAlias = Literal["weights", "replicate", "shard", "shard_grad_op", "sequence", "sequence_shard"]
"""The use of an axis: "weights" splits the weights that ranks compute with; "sequence" and "sequence_shard" split the
sequence, and store weights as "replicate" and "shard" do; the others split the batch."""
_STORED: Mapping[Holds, Data] = {"sequence": "replicate", "sequence_shard": "shard"}
"""How ranks that split the sequence store weights."""


@dataclass(frozen=True)
class MeshAxis:
    """An axis of a device mesh. Axes compare by name and size, whatever they split."""

    size: int
    """The number of ranks along it."""
    name: str = MODEL
    label: str = field(default="", compare=False)
    """The user's name for it, if any."""
    holds: Holds = field(default="weights", compare=False)

    def __str__(self) -> str:
        return self.label or SHORT.get(self.name, self.name)

    @property
    def data(self) -> Data | None:
        """How the ranks store weights if they split a call's inputs; None if they split the weights."""
        return None if self.holds == "weights" else _STORED.get(self.holds, cast(Data, self.holds))

    @property
    def dim(self) -> int:
        """The dim of a call's inputs that the ranks split: the batch, or the sequence."""
        return SEQUENCE if self.holds in _STORED else BATCH

    def coordinate(self, rank: int, group: str = "") -> Coordinate:
        """Returns the coordinate of a rank; `group` is its group's name, by default the axis name."""
        return Coordinate(self, rank, group or self.name)

    def simulated(self, among: str = "") -> list[Coordinate]:
        """Returns the coordinates of all ranks, for a simulation in one process.

        Args:
            among: distinguishes groups of the same axis; see `simulated_name`.
        """
        return [self.coordinate(rank, simulated_name(rank, self.size, among)) for rank in range(self.size)]


def ranks_text(axes: Sequence[MeshAxis]) -> str:
    """Returns the number of ranks along axes, outermost first: '2 ranks', '2 × 4 ranks (dp × tp)'."""
    axes = [axis for axis in axes if axis.size > 1]
    sizes = " × ".join(str(axis.size) for axis in axes) or "1"
    is_named = len(axes) > 1 and all(axis.label for axis in axes)
    names = f" ({' × '.join(axis.label for axis in axes)})" if is_named else ""
    return f"{sizes} rank{'s' * bool(axes)}{names}"


def mesh_option(mesh: Mapping[str, int | tuple[int, Holds]]) -> str:
    """Returns a user's mesh as the command line writes it: 'dp=2:shard,tp=4'."""
    items = [(name, (given,) if isinstance(given, int) else given) for name, given in mesh.items()]
    return ",".join(f"{name}={':'.join(map(str, parts))}" for name, parts in items)


Place: TypeAlias = Mapping[str, int]
"""A rank's position on a mesh: the name of each axis, in order -> its rank on it."""


@dataclass(frozen=True)
class Mesh:
    """The axes of the ranks, outermost first: consecutive ranks differ in the last one.

    A model is split over a mesh in which all axes but the last split the batch or the sequence. The
    last one splits the weights. It may split inputs if it is the only axis, and has one rank if only
    inputs are split over several axes.
    """

    axes: tuple[MeshAxis, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def last(self) -> MeshAxis:
        """The axis that a model is split over first."""
        return self.axes[-1]

    @property
    def across(self) -> tuple[MeshAxis, ...]:
        """All axes except the last; they split the batch."""
        return self.axes[:-1]

    @property
    def without_idle(self) -> Mesh:
        """The mesh without the axes of one rank, but for the last axis."""
        return Mesh((*(axis for axis in self.across if axis.size > 1), self.last))

    @property
    def parts(self) -> int:
        """The number of parts that the ranks split a call's inputs into."""
        return math.prod(axis.size for axis in self.of_inputs)

    @property
    def of_inputs(self) -> tuple[MeshAxis, ...]:
        """The axes that split a call's inputs, outermost first."""
        return tuple(axis for axis in self.axes if axis.data)

    @property
    def parts_of_dims(self) -> dict[int, int]:
        """Dim of a call's inputs -> the number of parts that it is split into."""
        found = dict[int, int]()
        for axis in self.of_inputs:
            found[axis.dim] = found.get(axis.dim, 1) * axis.size
        return found

    def places(self) -> list[dict[str, int]]:
        """Returns the places of all ranks, in rank order."""
        names = [axis.name for axis in self.axes]
        ranks = itertools.product(*(range(axis.size) for axis in self.axes))
        return [dict(zip(names, numbers, strict=True)) for numbers in ranks]

    def place(self, number: int) -> dict[str, int]:
        """Returns the place of the rank with this number."""
        found = dict[str, int]()
        for axis in reversed(self.axes):
            number, found[axis.name] = divmod(number, axis.size)
        return {axis.name: found[axis.name] for axis in self.axes}

    def axis(self, name: str) -> MeshAxis:
        """Returns the axis with this name.

        Raises:
            ValueError: the mesh lacks it.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ValueError(f"no axis {name!r} in a mesh of {', '.join(axis.name for axis in self.axes)}")


@dataclass(frozen=True)
class Coordinate:
    """One rank on an axis."""

    axis: MeshAxis
    rank: int
    group: str
    """The name by which this rank's collectives find their process group."""


def simulated_name(rank: int, size: int, among: str = "") -> str:
    """Returns the name of a simulated group, which lacks a process group.

    Args:
        among: distinguishes the group from others of the same axis at different places on the other
            axes.
    """
    return f"simulated/{rank}/{size}" + (f"/{among}" if among else "")


class Simulated(NamedTuple):
    """A rank of a simulated group."""

    rank: int
    size: int
    among: str
    """Distinguishes the group from others of the same axis."""


def simulated(name: str) -> Simulated | None:
    """Returns the rank of a name that `simulated_name` returned; None for any other name."""
    prefix, *parts = name.split("/")
    return Simulated(int(parts[0]), int(parts[1]), "/".join(parts[2:])) if prefix == "simulated" else None
