"""The model-parallel group of this process, and the names under which graphs find groups.

A graph holds a group's name, not the group: it can be printed, saved, and run again in another process. Names:
`model` is the group that `init_process_group` made, `data` the one across the model-parallel ones;
`simulated/<rank>/<world>` is no group at all, and lets a graph be checked for any rank without processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchshard.errors import DistributedError, InputError

MODEL = "model"
"""The name of the group that `init_process_group` makes."""
DATA = "data"
"""The name of the group across the model-parallel ones."""


@dataclass(frozen=True)
class Group:
    """A process's place in a group."""

    rank: int
    size: int
    process_group: Any = None
    """torch.distributed's group; None for a group of one or a simulated one."""
    simulated: bool = False


_groups: dict[str, Group] = {}
_began: list[bool] = []
"""Whether the groups' `torch.distributed` was initialised here."""
_sides: dict[Group, Any] = {}
"""Groups whose backend sends from a GPU -> gloo groups of the same ranks."""
_made: list[Any] = []
"""The process groups that were made here, to be destroyed with ours."""


def init_process_group(
    group_size: int = -1, *, mesh: Any = None, backend: str | None = None, timeout_seconds: float = 60.0
) -> None:
    """Cuts the world into model-parallel groups of `group_size` consecutive ranks, or along a DeviceMesh's dimension.

    Uses `torch.distributed` as it was initialised; initialises it under `torchrun`; alone, makes a world of one. The
    data-parallel groups lie across: with four ranks and `group_size=2` the model-parallel groups are {0, 1} and {2, 3},
    the data-parallel ones {0, 2} and {1, 3}. All processes of the world must call it.

    Args:
        group_size: ranks per group; -1: one group of all.
        mesh: a one-dimensional `DeviceMesh`, such as `mesh["tp"]`: its group is this process's. A process that the mesh
            leaves out is in no group: its rank is -1.
        backend: for the case that it initialises `torch.distributed`; by default NCCL where CUDA is, else gloo.
        timeout_seconds: of the collectives of what it initialises.

    Raises:
        DistributedError: it is initialised already, the world does not divide by `group_size`, or the mesh has more
            dimensions than one.
    """
    if is_initialized():
        raise DistributedError(
            "the model-parallel group is initialised already",
            where="init_process_group",
            why=f"this process is rank {get_rank()} of {get_group_size()}",
            attempt="call torchshard.distributed.destroy_process_group() first",
        )
    began = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if began:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_seconds))
    try:
        _groups[MODEL], _groups[DATA] = _groups_of(_model_ranks(group_size, mesh), mesh)
    except DistributedError:
        if began:
            dist.destroy_process_group()
        raise
    _began.append(began)


def _model_ranks(group_size: int, mesh: Any) -> list[list[int]]:
    """The world's ranks, group by group."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh is not None:
        return _mesh_ranks(group_size, mesh, world)
    size = world if group_size == -1 else group_size
    if size < 1 or world % size:
        raise DistributedError(
            f"a world of {world} ranks does not divide into groups of {group_size}",
            where="init_process_group(group_size=...)",
            why=f"{world} / {group_size} is not whole" if size > 0 else "a group has at least one rank",
            attempt=f"a group_size among {[n for n in range(1, world + 1) if world % n == 0]}, or -1 for all",
        )
    return [list(range(start, start + size)) for start in range(0, world, size)]


def _mesh_ranks(group_size: int, mesh: Any, world: int) -> list[list[int]]:
    if mesh.ndim != 1 or group_size != -1:
        raise DistributedError(
            f"a mesh of {mesh.ndim} dimensions with group_size={group_size} is no model-parallel group",
            where="init_process_group(mesh=...)",
            why="the group is that of one dimension, and the mesh says its size",
            attempt='one dimension by its name, such as mesh["tp"], and no group_size',
        )
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mesh.mesh.tolist() if mesh.get_coordinate() is not None else [])
    return sorted(ranks for i, ranks in enumerate(everyone) if ranks and ranks[0] == i)


def _groups_of(model: list[list[int]], mesh: Any) -> tuple[Group, Group]:
    """This process's model-parallel group, and its data-parallel one: the ranks of the same place in each."""
    if not dist.is_initialized():
        return Group(0, 1), Group(0, 1)
    data = [[ranks[place] for ranks in model if place < len(ranks)] for place in range(max(map(len, model)))]
    held = None if mesh is None or mesh.get_coordinate() is None else mesh.get_group()
    return _own_group(model, held), _own_group(data, None)


def _own_group(groups: list[list[int]], held: Any) -> Group:
    """Makes these groups, all of them on every process, and gives the own one: `held`, where that is there already."""
    rank, own = dist.get_rank(), Group(-1, -1)
    for ranks in groups:
        if held is not None:
            made = held
        elif ranks == list(range(dist.get_world_size())):
            made = dist.group.WORLD
        else:
            made = dist.new_group(ranks)
            _made.append(made)
        if rank in ranks:
            own = Group(ranks.index(rank), len(ranks), made)
    return own


def is_initialized() -> bool:
    """Whether this process has a model-parallel group."""
    return MODEL in _groups


def destroy_process_group() -> None:
    """Forgets the groups (they can then be made again), and ends `torch.distributed` where we began it."""
    _groups.clear()
    _sides.clear()
    began = _began.pop() if _began else False
    while _made:
        made = _made.pop()
        if not began and dist.is_initialized() and made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)
    if began and dist.is_initialized():
        dist.destroy_process_group()


def lookup(name: str) -> Group:
    """The group of a name.

    Raises:
        DistributedError: there is no such group in this process.
    """
    if name in _groups:
        return _groups[name]
    if name.startswith("simulated/"):
        _, rank, world = name.split("/")
        return Group(int(rank), int(world), simulated=True)
    raise DistributedError(
        "there is no model-parallel group in this process",
        where=f"group {name!r}",
        attempt="call torchshard.distributed.init_process_group() first",
    )


def simulated_name(rank: int, world: int) -> str:
    """The name of a group that exists only on paper."""
    return f"simulated/{rank}/{world}"


def get_group() -> Any:
    """torch.distributed's process group of the model-parallel group; None where this process is alone or in none."""
    return lookup(MODEL).process_group


def get_rank() -> int:
    """This process's rank in its model-parallel group; -1 in none, 0 when nothing is initialised."""
    return _groups[MODEL].rank if is_initialized() else 0


def get_group_size() -> int:
    """The ranks of this process's model-parallel group; -1 in none, 1 when nothing is initialised."""
    return _groups[MODEL].size if is_initialized() else 1


def get_world_size() -> int:
    """The same as `get_group_size`: the world of this process's model-parallel group."""
    return get_group_size()


def get_data_parallel_group() -> Any:
    """torch.distributed's group of the processes that have this rank in their model-parallel groups."""
    return lookup(DATA).process_group


def get_data_parallel_rank() -> int:
    """This process's rank in its data-parallel group; -1 in none, 0 when nothing is initialised."""
    return _groups[DATA].rank if is_initialized() else 0


def get_data_parallel_size() -> int:
    """The ranks of this process's data-parallel group; -1 in none, 1 when nothing is initialised."""
    return _groups[DATA].size if is_initialized() else 1


def communication_device(group: Group) -> torch.device:
    """Where tensors must lie that the group's backend sends."""
    return torch.device("cuda" if dist.get_backend(group.process_group) == "nccl" else "cpu")


def own_group() -> Group:
    """The model-parallel group; where nothing is initialised, a group of this process alone."""
    return lookup(MODEL) if is_initialized() else Group(0, 1)


def peer(group: Group, rank: int, name: str) -> int:
    """A rank within a group.

    Raises:
        InputError: the group has no such rank.
    """
    if not 0 <= rank < group.size:
        raise InputError(
            f"there is no rank {rank} in the group",
            where=f"{name}={rank}",
            why=f"the model-parallel group has {group.size} ranks; {name} counts within it",
            attempt=f"{name}=0 to {group.size - 1}",
        )
    return rank


def side_group(group: Group) -> Any:
    """A group of the same ranks that sends from the CPU's memory: the group itself, or a gloo one, made once."""
    if communication_device(group).type == "cpu":
        return group.process_group
    if group not in _sides:
        ranks = dist.get_process_group_ranks(group.process_group)
        _sides[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _made.append(_sides[group])
    return _sides[group]
