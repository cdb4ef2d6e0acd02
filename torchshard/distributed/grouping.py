"""Divides the world's ranks into model-parallel and data-parallel groups, and creates their process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, cast

import torch.distributed as dist

from torchshard.core.errors import DistributedError, first_line
from torchshard.core.mesh import DATA, MODEL
from torchshard.distributed.consistency import verify_call
from torchshard.distributed.facts import run_on_all_ranks
from torchshard.distributed.group import ALONE, Group, HandshakeState, Timeouts
from torchshard.distributed.memory import BACKEND as MEMORY
from torchshard.distributed.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Wanted(NamedTuple):
    """The requested groups, as arguments of `init_process_group`."""

    group_size: int = -1
    mesh: DeviceMesh | None = None


def make_groups(read: Callable[[], Wanted], timeouts: Timeouts, owned: World) -> dict[str, Group]:
    """This process's model-parallel group, and its data-parallel one: the ranks of the same place in each."""
    if not dist.is_initialized():
        _model_ranks(1, read().group_size)
        return {name: Group(0, 1, name, handshake=_new_handshake()) for name in (MODEL, DATA)}
    world = dist.get_world_size()
    everyone = list(range(world))
    control = _new_group(everyone, timeouts.verify, owned, cpu_backend()) if world > 1 else None
    starting = timeouts._replace(verify=timeouts.start)
    all_ranks = Group(dist.get_rank(), world, "world", control=control, timeouts=starting, handshake=_new_handshake())
    group_size, mesh = run_on_all_ranks(all_ranks, read, DistributedError, "the ranks could not agree on their groups")
    request = f"init_process_group({'mesh=...' if mesh is not None else f'group_size={group_size}'})"
    verify_call(all_ranks, lambda: request)
    model = _model_ranks(world, group_size) if mesh is None else _mesh_ranks(world, group_size, mesh, control)
    data = [[ranks[place] for ranks in model if place < len(ranks)] for place in range(max(map(len, model)))]
    controls = [control if ranks == everyone else None for ranks in model]
    owned.data_ranks = data
    groups = {
        MODEL: make_own_group(MODEL, model, timeouts, owned, controls),
        DATA: make_own_group(DATA, data, timeouts, owned, [None] * len(data)),
    }
    # a rank that destroys its groups early would cut off ranks that are still connecting
    verify_call(all_ranks, lambda: f"{request}, made")
    return groups


def _new_handshake() -> HandshakeState:
    """Returns the state of a new group, at the level that `debug` set before."""
    return HandshakeState(level=ALONE.level)


def _model_ranks(world: int, group_size: int) -> list[list[int]]:
    """Returns the world's ranks by group."""
    size = world if group_size == -1 else group_size
    if size < 1 or world % size:
        raise DistributedError(
            f"a world of {world} ranks does not divide into groups of {group_size}",
            where="init_process_group(group_size=...)",
            why=f"{world} / {group_size} is not whole" if size > 0 else "a group has at least one rank",
            attempt=f"a group_size among {[n for n in range(1, world + 1) if world % n == 0]}, or -1 for all",
        )
    return [list(range(start, start + size)) for start in range(0, world, size)]


def _mesh_ranks(world: int, group_size: int, mesh: DeviceMesh, control: dist.ProcessGroup | None) -> list[list[int]]:
    if mesh.ndim != 1 or group_size != -1:
        raise DistributedError(
            f"a mesh of {mesh.ndim} dimensions with group_size={group_size} can't be a model-parallel group",
            where="init_process_group(mesh=...)",
            why="the group is that of one dimension, and the mesh says its size",
            attempt='one dimension by its name, such as mesh["tp"], and no group_size',
        )
    everyone: list[list[int]] = [[] for _ in range(world)]
    mine = [] if mesh.get_coordinate() is None else sorted(mesh.mesh.tolist())  # torch.distributed sorts them too
    dist.all_gather_object(everyone, mine, group=control)
    if any(everyone[rank] != ranks for ranks in everyone for rank in ranks):
        raise DistributedError(
            "the ranks' meshes are not parts of one",
            where="init_process_group(mesh=...)",
            why="; ".join(f"rank {rank}: {ranks or 'in none'}" for rank, ranks in enumerate(everyone)),
            attempt="the same dimension of the same mesh on every rank",
        )
    return sorted(ranks for rank, ranks in enumerate(everyone) if ranks and ranks[0] == rank)


def make_own_group(
    name: str, groups: list[list[int]], timeouts: Timeouts, owned: World, controls: Sequence[dist.ProcessGroup | None]
) -> Group:
    """Creates all of these groups, as torch.distributed requires, and returns this process's.

    Args:
        controls: existing control groups; None where one must be created.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    # torch.distributed marks non-members by a number, because None means the whole world
    own = Group(-1, -1, name, cast(dist.ProcessGroup, dist.GroupMember.NON_GROUP_MEMBER))
    for i, ranks in enumerate(groups):
        whole = owned.owns_torch_distributed and len(ranks) == world
        through_memory = cpu_backend() == MEMORY or (len(ranks) > 1 and owned.share_memory(ranks))
        backend = MEMORY if through_memory else None
        seconds = timeouts.longest if through_memory else timeouts.collective
        process_group = dist.group.WORLD if whole else _new_group(ranks, seconds, owned, backend)
        control = None
        if len(ranks) > 1:
            shared = process_group if through_memory else controls[i]
            control = shared or _new_group(ranks, timeouts.verify, owned, "gloo")
        if rank in ranks:
            own = Group(
                ranks.index(rank),
                len(ranks),
                name,
                process_group,
                control,
                timeouts,
                gloo_devices=gloo_devices(process_group) if len(ranks) > 1 else frozenset(),
                handshake=_new_handshake(),
            )
    return own


def cpu_backend() -> str:
    """Returns the backend for CPU tensors; before initialisation, the default for new ranks."""
    return "gloo" if dist.is_initialized() and MEMORY not in dist.get_backend_config() else MEMORY


def gloo_devices(process_group: dist.ProcessGroup | None) -> frozenset[str]:
    """The kinds of devices whose tensors travel through gloo: {"cpu"} of "cpu:gloo,cuda:nccl"."""
    backends = (entry.partition(":") for entry in dist.get_backend_config(process_group).split(","))
    return frozenset(device for device, _, backend in backends if backend == "gloo")


def _new_group(ranks: list[int], seconds: float, owned: World, backend: str | None = None) -> dist.ProcessGroup:
    try:
        process_group = dist.new_group(ranks, timeout=timedelta(seconds=seconds), backend=backend)
    except RuntimeError as error:
        raise DistributedError(
            f"ranks {ranks} of the world could not make a group",
            where=f"init_process_group, rank {dist.get_rank()} of {dist.get_world_size()}",
            why=first_line(error),
            attempt="call init_process_group on every rank, with the same arguments",
        ) from error
    owned.process_groups.append(process_group)
    return process_group
