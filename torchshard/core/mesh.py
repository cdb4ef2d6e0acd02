"""The ranks that a program runs on: one axis of a device mesh, and one rank's coordinate on it.

Layouts say how a value is divided among the ranks of one axis. Planning and rewriting know an axis, but no rank;
`localize` and everything after it know a coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "model"
"""The name of the model-parallel axis: what graphs call its group until a rank runs them."""


@dataclass(frozen=True)
class MeshAxis:
    """An axis of a device mesh."""

    size: int
    """The number of ranks along it."""
    name: str = MODEL

    def coordinate(self, rank: int, group: str = "") -> Coordinate:
        """The coordinate of a rank; `group` is the name of its group, by default the axis's own."""
        return Coordinate(self, rank, group or self.name)

    def simulated(self) -> list[Coordinate]:
        """The coordinates of all ranks, for graphs that run in one process: their groups exist only on paper."""
        return [self.coordinate(rank, simulated_name(rank, self.size)) for rank in range(self.size)]


@dataclass(frozen=True)
class Coordinate:
    """One rank on an axis."""

    axis: MeshAxis
    rank: int
    group: str
    """The name under which this rank's collectives find their process group."""


def simulated_name(rank: int, size: int) -> str:
    """The name of a group that exists only on paper."""
    return f"simulated/{rank}/{size}"


def simulated_coordinate(name: str) -> tuple[int, int] | None:
    """(rank, size) of a name that `simulated_name` made; None for any other name."""
    prefix, *numbers = name.split("/")
    return (int(numbers[0]), int(numbers[1])) if prefix == "simulated" and len(numbers) == 2 else None
