"""Reads the user's mesh: which axis splits the weights, and which axes split the batch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Protocol, TypeAlias

from torchshard.core.errors import InputError
from torchshard.core.mesh import DATA, SHORT, Data, Mesh, MeshAxis, data_names
from torchshard.core.types import is_count
from torchshard.plans.machine import check_data


class DeviceMesh(Protocol):
    """The attributes read from `torch.distributed.device_mesh.DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks of each axis."""


MeshLike: TypeAlias = Mapping[str, int] | DeviceMesh
"""Axis names with their numbers of ranks, outermost first, or PyTorch's mesh."""
DataLike: TypeAlias = Data | Mapping[str, Data]
"""How ranks store weights over the axes that split the batch; by name, unless these are all axes but
the last."""

_BATCH_AXIS = re.compile(r"((d|dd|fsd|hsd)p|data|batch|replica|replicate)(_|$)")
"""Names that other libraries use for axes that split the batch."""


def read_mesh(world_size: int, mesh: MeshLike | None, data: DataLike | None) -> Mesh:
    """The mesh of `world_size` ranks that share the work.

    Raises:
        InputError: the mesh has a different number of ranks or several axes for the weights, or
            `data` names an unknown axis.
    """
    if mesh is None:
        if isinstance(data, Mapping):
            raise _error("there is no mesh whose axes it could name", "data=", 'mesh={"dp": 2, "tp": 4}')
        if data is not None:
            check_data(data)
        return Mesh((MeshAxis(world_size, label=SHORT[DATA] if data else "", holds=data or "weights"),))
    sizes = mesh_sizes(mesh)
    total = math.prod(sizes.values())
    if total != world_size:
        text = " x ".join(map(str, sizes.values()))
        what = f"a mesh of {text} has {total} ranks, and there are {world_size}"
        raise _error(what, "mesh=", f"{total} ranks, or another mesh")
    by_name = _data_by_name(list(sizes), data)
    for name in list(by_name):  # with several axes, an axis of one rank can't split the batch
        if sizes[name] == 1 and len(sizes) > 1:
            del sizes[name], by_name[name]
    split = [name for name in sizes if name not in by_name]
    if len(split) > 1:
        raise _error(
            f"there is one axis for the weights; in this mesh {', '.join(split)} do not divide the batch",
            "mesh=",
            f'data={by_name | dict.fromkeys(split[:-1], "replicate")}, or "shard"',
        )
    if isinstance(mesh, Mapping) and split and list(sizes) != [*by_name, *split]:
        order = ", ".join(f"{name!r}: {sizes[name]}" for name in (*by_name, *split))
        raise _error(
            "consecutive ranks divide the batch, and ranks far apart the weights", "mesh=", f"the order {{{order}}}"
        )
    if len(sizes) == 1:
        ((name, size),) = sizes.items()
        return Mesh((MeshAxis(size, label=name, holds=by_name.get(name, "weights")),))
    across = [
        MeshAxis(sizes[label], name, label, holds)
        for name, (label, holds) in zip(data_names(len(by_name)), by_name.items(), strict=True)
    ]
    last = MeshAxis(sizes[split[0]], label=split[0]) if split else MeshAxis(1, holds="replicate")
    return Mesh((*across, last))


def checked_world_size(world_size: int | None, mesh: MeshLike | None) -> int:
    """The given number of ranks, or a mesh's.

    Raises:
        InputError: the number is not an int of 1 or more.
    """
    if world_size is None and mesh is not None:
        return math.prod(mesh_sizes(mesh).values())
    if not is_count(world_size):
        what = f"{world_size!r} is no number of ranks"
        raise InputError(what, where="world_size=", why="it is an int of 1 or more", attempt="2")
    return world_size


def mesh_sizes(mesh: MeshLike) -> dict[str, int]:
    """Axis names of a mesh, outermost first -> number of ranks.

    Raises:
        InputError: it is not a mesh, or its axes are unnamed.
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
        if not is_count(size):
            raise _error(f"the mesh has {size!r} ranks along {name!r}", "mesh=", '{"dp": 2, "tp": 4}')
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise _error(f"{name!r} is no name of an axis", "mesh=", "letters, digits, _ and -, such as 'dp'")
    if not sizes:
        raise _error("a mesh without axes has no ranks", "mesh=", '{"dp": 2, "tp": 4}')
    return sizes


def _data_by_name(names: list[str], data: DataLike | None) -> dict[str, Data]:
    """The axes that split the batch: the named axes, or all but the last of several."""
    if not isinstance(data, Mapping):
        if data is not None:
            check_data(data)
        if _BATCH_AXIS.match(names[-1]) and (len(names) > 1 or data is None):
            raise _of_the_batch(names, data or "replicate")
        return {} if data is None and len(names) == 1 else dict.fromkeys(names[:-1] or names, data or "replicate")
    for name, kind in data.items():
        check_data(kind)
        if name not in names:
            raise _error(f"the mesh has no axis {name!r}", "data=", " or ".join(map(repr, names)))
    return {name: data[name] for name in names if name in data}


def _of_the_batch(names: list[str], data: Data) -> InputError:
    """The error for a last axis that is named like a batch axis, but not given in `data`."""
    ways = ", ".join(f"{name!r}: {data!r}" for name in names if _BATCH_AXIS.match(name))
    return InputError(
        f"over {names[-1]!r}, the last axis, the weights would be divided, and not the batch",
        where="mesh=",
        why="of several axes all but the last divide the batch, and one axis alone divides the weights",
        attempt=f"the axis of the weights last; or say what divides the batch: data={{{ways}}}",
    )


def _error(what: str, where: str, attempt: str) -> InputError:
    why = "a mesh names its axes, outermost first: consecutive ranks differ in the last one"
    return InputError(what, where=where, why=why, attempt=attempt)
