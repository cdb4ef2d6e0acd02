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
        """Returns the coordinate of a rank; `group` is the name of its group, by default that of the axis."""
        return Coordinate(self, rank, group or self.name)

    def simulated(self) -> list[Coordinate]:
        """Returns the coordinates of all ranks, for graphs that are simulated in one process without process groups."""
        return [self.coordinate(rank, simulated_name(rank, self.size)) for rank in range(self.size)]


@dataclass(frozen=True)
class Coordinate:
    """One rank on an axis."""

    axis: MeshAxis
    rank: int
    group: str
    """The name under which this rank's collectives find their process group."""


def simulated_name(rank: int, size: int) -> str:
    """Returns the name of a simulated group, which has no process group."""
    return f"simulated/{rank}/{size}"


def simulated_coordinate(name: str) -> tuple[int, int] | None:
    """Returns (rank, size) from a name that `simulated_name` returned; None for any other name."""
    prefix, *numbers = name.split("/")
    return (int(numbers[0]), int(numbers[1])) if prefix == "simulated" and len(numbers) == 2 else None
