"""The ranks that a program runs on: one axis of a device mesh, and one rank's coordinate on it.

Layouts say how a value is divided among the ranks of one axis. Planning and rewriting know an axis, but no rank;
`localize` and everything after it know a coordinate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

MODEL = "model"
"""The name of the model-parallel axis: what graphs call its group until a rank runs them."""
DATA = "data"
"""The name of the axis across the model-parallel groups."""


SHORT = {MODEL: "tp", DATA: "dp"}
"""What people read where they gave an axis no name."""


def data_names(number: int) -> list[str]:
    """Returns the names of so many axes across the model-parallel groups, outermost first."""
    return [DATA] if number == 1 else [f"{DATA}{i}" for i in range(1, number + 1)]


Data: TypeAlias = Literal["replicate", "shard", "shard_grad_op"]
"""What ranks that divide the batch hold of the weights: all ("replicate", as in DDP); slices, which are gathered to
compute with, and again in the backward ("shard", as in FSDP and ZeRO-3), or once ("shard_grad_op", as in ZeRO-2)."""
Holds: TypeAlias = Literal["weights", "replicate", "shard", "shard_grad_op"]
"""What the ranks along an axis hold: slices of the weights that they compute with, or parts of the batch."""


@dataclass(frozen=True)
class MeshAxis:
    """An axis of a device mesh. Axes of one name and size are equal, whatever they hold for a model."""

    size: int
    """The number of ranks along it."""
    name: str = MODEL
    label: str = field(default="", compare=False)
    """The user's name for it, if it has one."""
    holds: Holds = field(default="weights", compare=False)

    def __str__(self) -> str:
        return self.label or SHORT.get(self.name, self.name)

    @property
    def data(self) -> Data | None:
        """How the ranks hold weights if they divide the batch; None if they divide the weights."""
        return None if self.holds == "weights" else self.holds

    def coordinate(self, rank: int, group: str = "") -> Coordinate:
        """Returns the coordinate of a rank; `group` is the name of its group, by default that of the axis."""
        return Coordinate(self, rank, group or self.name)

    def simulated(self, among: str = "") -> list[Coordinate]:
        """Returns the coordinates of all ranks, for graphs that are simulated in one process without process groups.

        Args:
            among: as in `simulated_name`.
        """
        return [self.coordinate(rank, simulated_name(rank, self.size, among)) for rank in range(self.size)]


def ranks_text(axes: Sequence[MeshAxis]) -> str:
    """Returns how many ranks there are along these axes, outermost first: '2 ranks', '2 × 4 ranks (dp × tp)'."""
    axes = [axis for axis in axes if axis.size > 1]
    sizes = " × ".join(str(axis.size) for axis in axes) or "1"
    is_named = len(axes) > 1 and all(axis.label for axis in axes)
    names = f" ({' × '.join(axis.label for axis in axes)})" if is_named else ""
    return f"{sizes} rank{'s' * bool(axes)}{names}"


Place: TypeAlias = Mapping[str, int]
"""Where a rank is on a mesh: the name of each axis, in order -> its rank on it."""


@dataclass(frozen=True)
class Mesh:
    """The axes over which the ranks are laid out, outermost first: consecutive ranks differ in the last one.

    Of the mesh that a model is split over, all axes but the last divide the batch. The last one divides the weights;
    it may divide the batch if it is the only one, and has one rank if the others do all.
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
        """The axes beside the last, which divide the batch."""
        return self.axes[:-1]

    @property
    def without_idle(self) -> Mesh:
        """The mesh without the axes of one rank, but for the last axis."""
        return Mesh((*(axis for axis in self.across if axis.size > 1), self.last))

    @property
    def parts(self) -> int:
        """The number of parts of the batch."""
        return math.prod(axis.size for axis in self.axes if axis.data)

    def places(self) -> list[dict[str, int]]:
        """Returns the places of all ranks, in their order."""
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
        """Returns the axis of a name.

        Raises:
            ValueError: there is none.
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
    """The name under which this rank's collectives find their process group."""


def simulated_name(rank: int, size: int, among: str = "") -> str:
    """Returns the name of a simulated group, which has no process group.

    Args:
        among: tells the group from others of the same axis, which have other places on the other axes.
    """
    return f"simulated/{rank}/{size}" + (f"/{among}" if among else "")


class Simulated(NamedTuple):
    """A rank of a simulated group."""

    rank: int
    size: int
    among: str
    """Tells the group from others."""


def simulated(name: str) -> Simulated | None:
    """Returns the rank of a name that `simulated_name` returned; None for any other name."""
    prefix, *parts = name.split("/")
    return Simulated(int(parts[0]), int(parts[1]), "/".join(parts[2:])) if prefix == "simulated" else None
