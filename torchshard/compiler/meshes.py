"""Reads the user's mesh: its axes, which one splits the weights, and which ones split the batch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias

from torchshard.core.errors import InputError
from torchshard.core.layouts import SEQUENCE
from torchshard.core.mesh import DATA, SHORT, Holds, Mesh, MeshAxis, data_names
from torchshard.core.types import is_count
from torchshard.plans.objective import check_option


class DeviceMesh(Protocol):
    """The attributes read from `torch.distributed.device_mesh.DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks of each axis."""


MeshLike: TypeAlias = (
    int
    | Holds
    | Mapping[str, int | tuple[int, Holds]]
    | DeviceMesh
    | tuple[DeviceMesh, Holds | Mapping[str, Holds]]
    | None
)
"""The ranks, and what each axis of them splits.

    None                                 all ranks split the weights
    8                                    eight ranks split the weights
    "replicate", "shard"                 all ranks split the batch; the word is one of `Holds`
    "sequence", "sequence_shard"         all ranks split the sequence
    {"dp": (2, "shard"), "tp": 4}        axes by name, outermost first: the number of ranks, and what the axis `Holds`
    DeviceMesh                           its axes
    (DeviceMesh, {"dp": "shard"})        its axes, and what some of them hold; a word stands for all but the last
"""

_BATCH_AXIS = re.compile(r"((d|dd|fsd|hsd)p|data|batch|replica|replicate)(_|$)")
"""Names that other libraries use for axes that split the batch."""
_SEQUENCE_AXIS = re.compile(r"(cp|context|sp|seq|sequence|ulysses|ring)(_|$)", re.IGNORECASE)
"""Names that other libraries use for axes that split the sequence: context parallelism."""


class _Axes(NamedTuple):
    """The axes of a user's mesh, outermost first."""

    sizes: dict[str, int]
    holds: dict[str, Holds]
    """What axes hold, where the user says so."""
    is_groups: bool = False
    """Whether the mesh has process groups, so its axes are in any order."""


def read_mesh(mesh: MeshLike, world_size: int | None = None) -> Mesh:
    """Returns the mesh of the ranks that share the work.

    Args:
        world_size: the number of ranks, if it is known otherwise than by the mesh.

    Raises:
        InputError: the mesh has a different number of ranks or several axes for the weights, or the
            number of ranks is missing.
    """
    if mesh is None or isinstance(mesh, (int, str)):
        holds: Holds = "weights"
        if isinstance(mesh, str):
            _check_holds(mesh)
            holds = mesh
        number = mesh if isinstance(mesh, int) else world_size
        if not is_count(number):
            raise InputError(
                "the number of ranks is missing" if number is None else f"{number!r} is no number of ranks",
                where="mesh=",
                why="it is an int of 1 or more, or a dict of axes with their numbers of ranks",
                attempt=f'mesh={{"dp": (2, "{holds}")}}' if isinstance(mesh, str) else "mesh=2",
            )
        _check_size([number], world_size)
        made = MeshAxis(number, holds=holds)
        label = "" if made.data is None else "cp" if made.dim == SEQUENCE else SHORT[DATA]
        return Mesh((replace(made, label=label),))
    axes = _axes(mesh)
    sizes = axes.sizes
    _check_size(list(sizes.values()), world_size)
    by_name = _of_the_batch(axes)
    for name in list(by_name):  # with several axes, an axis of one rank can't split the batch
        if sizes[name] == 1 and len(sizes) > 1:
            del sizes[name], by_name[name]
    split = [name for name in sizes if name not in by_name]
    if len(split) > 1:
        raise _error(
            f"there is one axis for the weights; in this mesh {', '.join(split)} do not divide the batch",
            _text(axes, by_name | dict.fromkeys(split[:-1], "replicate")),
        )
    if not axes.is_groups and split and list(sizes) != [*by_name, *split]:
        what = "consecutive ranks divide the batch, and ranks far apart the weights"
        raise _error(what, _text(axes, axes.holds | by_name))
    if len(sizes) == 1:
        ((name, size),) = sizes.items()
        return Mesh((MeshAxis(size, label=name, holds=by_name.get(name, "weights")),))
    across = [
        MeshAxis(sizes[label], name, label, data)
        for name, (label, data) in zip(data_names(len(by_name)), by_name.items(), strict=True)
    ]
    last = MeshAxis(sizes[split[0]], label=split[0]) if split else MeshAxis(1, holds="replicate")
    return Mesh((*across, last))


def _check_holds(holds: object) -> None:
    """Checks what an axis holds.

    Raises:
        InputError: `holds` is not one of `Holds`.
    """
    why = (
        "the ranks split the weights; 'sequence', 'sequence_shard': the sequence; the others: the batch; "
        "with all weights or slices of them on each rank"
    )
    check_option("mesh", holds, Holds, "use of a mesh's axis", why)


def _check_size(sizes: list[int], world_size: int | None) -> None:
    total = math.prod(sizes)
    if world_size is not None and total != world_size:
        what = f"a mesh of {' x '.join(map(str, sizes))} has {total} ranks, and there are {world_size}"
        raise _error(what, f"{total} ranks, or another mesh")


def _axes(mesh: object) -> _Axes:
    """Reads the axes of a dict or a DeviceMesh.

    Raises:
        InputError: it is not a mesh, or its axes are unnamed.
    """
    sizes, holds = dict[str, int](), dict[str, Any]()
    is_groups = not isinstance(mesh, Mapping)
    if isinstance(mesh, Mapping):
        for name, given in mesh.items():
            sizes[name] = given
            if isinstance(given, (tuple, list)) and len(given) == 2:
                sizes[name], holds[name] = given
    else:
        groups, given = mesh if isinstance(mesh, tuple) and len(mesh) == 2 else (mesh, {})
        names, shape = getattr(groups, "mesh_dim_names", None), getattr(groups, "shape", None)
        if not names or shape is None:
            attempt = 'init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")), or {"dp": 2, "tp": 4}'
            raise _error(f"a {type(groups).__name__} is no mesh whose axes have names", attempt)
        sizes = dict(zip(names, shape, strict=True))
        holds = {**given} if isinstance(given, Mapping) else dict.fromkeys(names[:-1] or names, given)
    for name, size in sizes.items():
        if not is_count(size):
            raise _error(f"the mesh has {size!r} ranks along {name!r}", '{"dp": 2, "tp": 4}, or {"dp": (2, "shard")}')
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise _error(f"{name!r} is no name of an axis", "letters, digits, _ and -, such as 'dp'")
    for name, held in holds.items():
        _check_holds(held)
        if name not in sizes:
            raise _error(f"the mesh has no axis {name!r}", " or ".join(map(repr, sizes)))
    if not sizes:
        raise _error("a mesh without axes has no ranks", '{"dp": 2, "tp": 4}')
    return _Axes(sizes, holds, is_groups)


def _of_the_batch(axes: _Axes) -> dict[str, Holds]:
    """Returns the axes that split a call's inputs, by default all but the last of several.

    An axis named cp, or like other libraries' axes of context parallelism, by default splits the sequence.

    Raises:
        InputError: the last axis is named like an axis of the batch, or one before an axis of the sequence like none
            of the inputs, and does not say what it holds.
    """
    names = list(axes.sizes)
    of_sequence: dict[str, Holds] = {name: "sequence" for name in names if _SEQUENCE_AXIS.match(name)}
    if names[-1] not in axes.holds and _BATCH_AXIS.match(names[-1]):
        holds: dict[str, Holds] = {name: "replicate" for name in names if _BATCH_AXIS.match(name)}
        holds |= of_sequence | axes.holds
        raise InputError(
            f"over {names[-1]!r}, the last axis, the weights would be divided, and not the batch",
            where="mesh=",
            why="of several axes all but the last divide the batch, and one axis alone divides the weights",
            attempt=f"the axis of the weights last; or say what divides the batch: {_text(axes, holds)}",
        )
    strangers = [name for name in names[:-1] if not _BATCH_AXIS.match(name) and name not in of_sequence]
    if names[-1] in of_sequence and strangers and not axes.holds:
        raise InputError(
            f"the mesh does not say what {strangers[0]!r} holds",
            where="mesh=",
            why=f"the last axis, {names[-1]!r}, splits the sequence, and the axis of the weights comes last",
            attempt=_text(axes, {**dict.fromkeys(filter(_BATCH_AXIS.match, names), "replicate"), **of_sequence}),
        )
    of_batch: dict[str, Holds] = {} if axes.holds else dict.fromkeys(names[:-1], "replicate")
    held = of_batch | of_sequence | axes.holds
    return {name: held[name] for name in names if held.get(name, "weights") != "weights"}


def _text(axes: _Axes, holds: Mapping[str, Holds]) -> str:
    """Returns the argument with these words, the axes of the batch first."""
    if axes.is_groups:
        return f"mesh=(mesh, {dict(holds)})"
    order = sorted(axes.sizes, key=lambda name: holds.get(name, "weights") == "weights")
    return f"mesh={ {name: (axes.sizes[name], holds[name]) if name in holds else axes.sizes[name] for name in order} }"


def _error(what: str, attempt: str) -> InputError:
    why = "a mesh names its axes, outermost first: consecutive ranks differ in the last one"
    return InputError(what, where="mesh=", why=why, attempt=attempt)
