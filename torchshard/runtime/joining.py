"""Finds this process's place among the ranks of a mesh; makes the groups if they are missing."""

from __future__ import annotations

import os
from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchshard.compiler.meshes import MeshLike, read_mesh
from torchshard.core.errors import DistributedError, InputError
from torchshard.core.mesh import DATA, Holds, Mesh, MeshAxis
from torchshard.distributed.group import Group, is_initialized
from torchshard.distributed.grouping import Wanted
from torchshard.distributed.process_groups import along_data_axes, init_for_mesh, init_process_group, is_made_for_mesh
from torchshard.distributed.ranks import Ranks

DIFFERENT = "the ranks have different meshes"
SAME_MESH = "the same mesh= on every rank"


def join_ranks(mesh: MeshLike) -> Ranks:
    """Returns the ranks of a mesh, with this process's place among them.

    It makes missing groups, like `init_process_group`.

    Raises:
        InputError: the mesh does not fit these ranks; see `read_mesh`.
        DistributedError: `init_process_group` has made groups that differ from the mesh's.
    """
    if mesh is None or isinstance(mesh, (int, str)):
        if not is_initialized():
            init_process_group()
        everyone = Ranks.own()
        if is_made_for_mesh():
            everyone.run_on_all(partial(_check_named, mesh), DistributedError, DIFFERENT)
            everyone.verify({"the mesh": "none"}, DIFFERENT, SAME_MESH)
        return _of_one_axis(everyone.group, read_mesh(mesh, everyone.group.size).last)
    if not is_initialized():
        init_for_mesh(partial(_wanted, mesh))
    everyone = Ranks.own()
    axes = everyone.run_on_all(partial(_axes_of, mesh, everyone), DistributedError, DIFFERENT)
    everyone.verify({"the mesh": ", ".join(f"{axis} {axis.size}" for axis in axes.axes)}, DIFFERENT, SAME_MESH)
    ranks = _of_one_axis(everyone.group, axes.last)
    if axes.across:
        ranks = Ranks(everyone.group, everyone.replicas, along_data_axes([a.size for a in axes.across]), axes.axes)
    groups = _device_mesh(mesh)
    if groups is not None:
        ranks.run_on_all(partial(_check_groups, groups, ranks), DistributedError, "the mesh is not one of the groups")
    return ranks


def _of_one_axis(group: Group, axis: MeshAxis) -> Ranks:
    return Ranks(group, axes=(MeshAxis(1, DATA), axis))


def _device_mesh(mesh: MeshLike) -> DeviceMesh | None:
    """The DeviceMesh of a mesh that is one, or one with what its axes hold."""
    groups = mesh[0] if isinstance(mesh, tuple) else mesh
    return groups if isinstance(groups, DeviceMesh) else None


def _check_named(mesh: int | Holds | None) -> None:
    """Checks that ranks split the batch only along named axes, once groups were made for a mesh.

    Raises:
        InputError: they would split it without names.
    """
    if isinstance(mesh, str):
        raise InputError(
            "the ranks divide the batch, and no mesh says which ranks",
            where=f"mesh={mesh!r}",
            why="another model's mesh has made groups of ranks; without named axes the batch of some would be left out",
            attempt="the other model's mesh= here too; or destroy_process_group() between the two models",
        )


def _wanted(mesh: MeshLike) -> Wanted:
    """Returns the groups that a mesh requires.

    Raises:
        InputError: see `read_mesh`.
    """
    axis, groups = read_mesh(mesh, _world_size()).last, _device_mesh(mesh)
    if groups is not None and axis.label:  # '' if all axes split the batch
        return Wanted(mesh=groups[axis.label])
    return Wanted(axis.size)


def _axes_of(mesh: MeshLike, ranks: Ranks) -> Mesh:
    """Returns the mesh of these ranks.

    Raises:
        InputError: see `read_mesh`.
        DistributedError: the mesh has different groups from these ranks.
    """
    axes = read_mesh(mesh, _world_size())
    group, replicas, size = ranks.group, ranks.replicas, axes.last.size
    if (group.size, replicas.size) == (size, axes.size // size):
        return axes
    made_by = "init_process_group"
    attempt = f"init_process_group(group_size={size}), or none: shard makes them"
    if is_made_for_mesh():
        made_by = "another model's mesh"
        attempt = f'mesh={{"dp": {replicas.size}, "tp": {group.size}}}; or destroy_process_group() between the models'
    raise DistributedError(
        f"the groups are {replicas.size} of {group.size} ranks, and the mesh has {axes.size // size} of {size}",
        where="mesh=",
        why=f"{made_by} has made the groups; the mesh is { {str(axis): axis.size for axis in axes.axes} }",
        attempt=attempt,
    )


def _check_groups(mesh: DeviceMesh, ranks: Ranks) -> None:
    """Checks that a mesh has the groups of these ranks along its axes.

    Raises:
        DistributedError: it has others.
    """
    for axis, group in reversed([*zip(ranks.axes, ranks.groups.values(), strict=True)]):
        if group.size == 1:
            continue
        name = axis.label
        of_mesh, of_group = map(dist.get_process_group_ranks, (mesh.get_group(name), group.process_group))
        if set(of_mesh) != set(of_group):
            raise DistributedError(
                f"the mesh has other ranks along {name!r} than the groups",
                where="mesh=",
                why="the groups were made before, by init_process_group or for another mesh",
                attempt="one mesh for all models; or init_process_group(mesh=mesh[...]), before anything else is made",
            )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
