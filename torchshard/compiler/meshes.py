"""What the user says of the mesh: over which axis the ranks divide the weights, and over which the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torchshard.compiler.constraints import Division
from torchshard.compiler.program import check_world_size
from torchshard.core.errors import InputError
from torchshard.core.mesh import DATA, MODEL, MeshAxis
from torchshard.plans.machine import Data, check_data


class DeviceMesh(Protocol):
    """What is read of `torch.distributed.device_mesh.DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Their numbers of ranks."""


MeshLike: TypeAlias = Mapping[str, int] | DeviceMesh
"""The names of the axes with their numbers of ranks, outermost first, or PyTorch's mesh."""
DataLike: TypeAlias = Data | Mapping[str, Data]
"""How ranks hold weights over the axis over which they divide the batch; by its name, if it is not the first."""


@dataclass(frozen=True)
class RankAxes:
    """How ranks share the work."""

    axis: MeshAxis
    """The axis over which they divide the weights, or the batch if `data` is not None."""
    data: Data | None = None
    division: Division | None = None
    """The axis over which they divide the batch beside the other."""
    name: str = MODEL
    """What the user calls the first of these."""

    @property
    def parts(self) -> int:
        """The number of parts of the batch."""
        if self.division is not None:
            return self.division.axis.size
        return self.axis.size if self.data else 1


def read_mesh(world_size: int, mesh: MeshLike | None, data: DataLike | None) -> RankAxes:
    """How `world_size` ranks share the work.

    Raises:
        InputError: the mesh is none of so many ranks, has more axes than two, or `data` names none of them.
    """
    if mesh is None:
        if isinstance(data, Mapping):
            raise _error("there is no mesh whose axes it could name", "data=", 'mesh={"dp": 2, "tp": 4}')
        return RankAxes(MeshAxis(world_size), data)
    sizes = mesh_sizes(mesh)
    total = math.prod(sizes.values())
    if total != world_size:
        text = " x ".join(map(str, sizes.values()))
        raise _error(f"a mesh of {text} has {total} ranks, and there are {world_size}", "mesh=", "as many ranks")
    by_name = _data_by_name(list(sizes), data)
    if len(sizes) > len(by_name):  # of several axes, one of a single rank divides no batch
        alone = {name for name in by_name if sizes[name] == 1}
        by_name = {name: kind for name, kind in by_name.items() if name not in alone}
        sizes = {name: size for name, size in sizes.items() if name not in alone}
    split = [name for name in sizes if name not in by_name]
    if len(by_name) > 1 or len(split) > 1:
        raise _error(
            f"there is one axis for the batch and one for the weights; this mesh has {', '.join(sizes)}",
            "mesh=",
            '{"dp": 2, "tp": 4}, with data={"dp": "replicate"}',
        )
    if not by_name:
        return RankAxes(MeshAxis(world_size), name=split[0])
    ((name, kind),) = by_name.items()
    if not split:
        return RankAxes(MeshAxis(world_size), kind, name=name)
    if isinstance(mesh, Mapping) and list(sizes) != [name, *split]:
        raise _error(
            "consecutive ranks divide the batch, and ranks far apart the weights",
            "mesh=",
            f"the other order: {{{name!r}: {sizes[name]}, {split[0]!r}: {sizes[split[0]]}}}",
        )
    division = Division(MeshAxis(sizes[name], DATA), kind, name)
    return RankAxes(MeshAxis(sizes[split[0]]), None, division, split[0])


def checked_world_size(world_size: int | None, mesh: MeshLike | None) -> int:
    """The number of ranks that is given, or that of a mesh.

    Raises:
        InputError: it is none.
    """
    if world_size is None and mesh is not None:
        return math.prod(mesh_sizes(mesh).values())
    check_world_size(world_size)
    assert world_size is not None
    return world_size


def mesh_sizes(mesh: MeshLike) -> dict[str, int]:
    """The names of a mesh's axes, outermost first -> their numbers of ranks.

    Raises:
        InputError: it is no mesh, or its axes have no names.
    """
    if isinstance(mesh, Mapping):
        sizes: dict[str, int] = dict(mesh)
    else:
        names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
        if not names or shape is None:
            attempt = 'init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")), or {"dp": 2, "tp": 4}'
            raise _error(f"a {type(mesh).__name__} is no mesh whose axes have names", "mesh=", attempt)
        sizes = dict(zip(names, shape, strict=True))
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or not isinstance(name, str):
            raise _error(f"the mesh has {size!r} ranks along {name!r}", "mesh=", '{"dp": 2, "tp": 4}')
    if not sizes:
        raise _error("a mesh without axes has no ranks", "mesh=", '{"dp": 2, "tp": 4}')
    return sizes


def _data_by_name(names: list[str], data: DataLike | None) -> dict[str, Data]:
    """The axes over which the ranks divide the batch: those that are named, or the first one of several."""
    if not isinstance(data, Mapping):
        if data is not None:
            check_data(data)
        return {} if data is None and len(names) == 1 else {names[0]: data or "replicate"}
    for name, kind in data.items():
        check_data(kind)
        if name not in names:
            raise _error(f"the mesh has no axis {name!r}", "data=", " or ".join(map(repr, names)))
    return dict(data)


def _error(what: str, where: str, attempt: str) -> InputError:
    why = "a mesh names its axes, outermost first: consecutive ranks differ in the last one"
    return InputError(what, where=where, why=why, attempt=attempt)
