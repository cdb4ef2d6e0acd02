"""This process among the ranks of a mesh: its groups, made if there are none yet."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchshard.compiler.meshes import DataLike, MeshLike, RankAxes, mesh_sizes, read_mesh
from torchshard.core.errors import DistributedError, PlanError
from torchshard.core.mesh import DATA, MODEL
from torchshard.distributed.group import is_initialized, lookup
from torchshard.distributed.process_groups import init_process_group
from torchshard.distributed.ranks import Ranks


def join_ranks(mesh: MeshLike | None, data: DataLike | None) -> tuple[Ranks, RankAxes]:
    """The ranks that share the work as a mesh says, with this one's place among them.

    Without groups it makes them, as `init_process_group` does.

    Raises:
        InputError: the mesh is not one of these ranks; see `read_mesh`.
        DistributedError: `init_process_group` has made other groups than the mesh has.
    """
    if mesh is None:
        if not is_initialized():
            init_process_group()
        group = lookup(MODEL)
        return Ranks(group), read_mesh(group.size, None, data)
    axes = read_mesh(_world_size(), mesh, data)
    if axes.division is not None and axes.division.data == "shard":
        raise PlanError(
            "slices of weights over two axes at once can be checked, and not be held yet",
            where=f"data='shard' over {axes.division.name!r}, beside {axes.name!r}",
            why="a rank's parameters are slices over one axis",
            attempt=f'data="replicate"; or {{"{axes.division.name}": {_world_size()}}} with data="shard"',
        )
    if not is_initialized():
        _make_groups(mesh, axes)
    group, replicas = lookup(MODEL), lookup(DATA)
    parts = 1 if axes.division is None else axes.division.axis.size
    if (group.size, replicas.size) != (axes.axis.size, parts):
        raise DistributedError(
            f"the groups are {replicas.size} of {group.size} ranks, and the mesh has {parts} of {axes.axis.size}",
            where="mesh=",
            why=f"init_process_group has made the groups; the mesh is {mesh_sizes(mesh)}",
            attempt=f"init_process_group(group_size={axes.axis.size}), or none: shard makes the groups",
        )
    return Ranks(group, replicas) if axes.division else Ranks(group), axes


def _make_groups(mesh: MeshLike, axes: RankAxes) -> None:
    if not isinstance(mesh, DeviceMesh):
        init_process_group(axes.axis.size)
        return
    init_process_group(mesh=mesh[axes.name])
    if axes.division is not None and mesh.get_local_rank(axes.division.name) != lookup(DATA).rank:
        raise DistributedError(
            f"the mesh counts the ranks of {axes.division.name!r} in another order than the processes have",
            where="mesh=",
            why="the parts of the batch are in ascending order of the processes",
            attempt="a mesh whose ranks ascend along each axis, as init_device_mesh makes it",
        )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
