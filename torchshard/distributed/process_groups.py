"""Creates and destroys this process's model-parallel groups, using torch.distributed's groups."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist

from torchshard.core.errors import DistributedError, InputError, first_line
from torchshard.core.mesh import DATA, MODEL, data_names
from torchshard.distributed.consistency import verify_call, verify_following_call
from torchshard.distributed.facts import run_on_all_ranks
from torchshard.distributed.group import (
    ALONE,
    Group,
    HandshakeState,
    Timeouts,
    get_group_size,
    get_rank,
    is_initialized,
    lookup,
    own_group,
    register_groups,
    registered_groups,
)
from torchshard.distributed.handshake import abort_pending_receives
from torchshard.distributed.memory import BACKEND as MEMORY
from torchshard.distributed.world import World, begin_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_SECONDS = 60.0
"""The default time-out for waiting for other ranks."""


class Wanted(NamedTuple):
    """The requested groups, as arguments of `init_process_group`."""

    group_size: int = -1
    mesh: DeviceMesh | None = None


_world: World | None = None


def init_process_group(
    group_size: int | str = -1,
    *,
    mesh: DeviceMesh | None = None,
    backend: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    start_seconds: float | None = None,
    collective_seconds: float | None = None,
) -> None:
    """Splits the world into groups of consecutive ranks, or along a DeviceMesh's dimension.

    Uses `torch.distributed` if it is initialised; otherwise initialises it under `torchrun`, or
    creates a world of one. The data-parallel groups cross the model-parallel groups: with four
    ranks and `group_size=2`, the model-parallel groups are {0, 1} and {2, 3}, the data-parallel
    groups {0, 2} and {1, 3}. All processes of the world must call it.

    Args:
        group_size: ranks per group; -1: one group of all. A string is the backend, as for
            `torch.distributed`.
        mesh: a one-dimensional `DeviceMesh`, such as `mesh["tp"]`: its ranks are this process's
            group. A process outside of the mesh is in no group: its rank is -1.
        backend: used if this call initialises `torch.distributed`. By default, without GPUs, ranks
            of one machine communicate through memory ("memory", `torchshard.distributed.memory`),
            and others through gloo; with GPUs, NCCL sends their tensors, and gloo all others.
        timeout_seconds: how long a rank waits for the others to reach a call before each of them
            raises. The slowest rank must load its data, or write a checkpoint, within this time.
        start_seconds: how long the ranks may take to find each other; default `timeout_seconds`.
        collective_seconds: how long a collective may take; default `timeout_seconds`. If
            `torch.distributed` was initialised before, this call makes new groups for it, because
            groups keep their time-outs.

    Raises:
        DistributedError: it is initialised already, the world size is not divisible by
            `group_size`, the mesh has several dimensions, or the ranks request different groups.
        InputError: a time is not a number above 0, or the group size is not a number.
    """
    if isinstance(group_size, str):
        backend, group_size = group_size, -1
    if not isinstance(group_size, int):
        what, attempt = f"{group_size!r} is no number of ranks", "group_size=4; without it, all ranks are one group"
        raise InputError(what, where="group_size=", why=f"it is a {type(group_size).__name__}", attempt=attempt)
    if is_initialized():
        raise DistributedError(
            "the model-parallel group is initialised already",
            where="init_process_group",
            why=f"this process is rank {get_rank()} of {get_group_size()}",
            attempt="call torchshard.distributed.destroy_process_group() first",
        )
    timeouts = _timeouts(timeout_seconds, start_seconds, collective_seconds)
    _initialise(lambda: Wanted(group_size, mesh), backend, timeouts)


def init_for_mesh(read: Callable[[], Wanted]) -> None:
    """Creates the groups of a model's mesh, if the user has not called `init_process_group`.

    Args:
        read: reads the mesh; called when the ranks can report to each other that it failed.

    Raises:
        DistributedError: see `init_process_group`; or another rank could not read its mesh.
        Exception: from `read` on this rank.
    """
    timeouts = _timeouts(TIMEOUT_SECONDS, None, None)
    _initialise(read, None, timeouts)
    assert _world is not None
    _world.for_mesh = True


def _initialise(read: Callable[[], Wanted], backend: str | None, timeouts: Timeouts) -> None:
    global _world
    _world = World(not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ)
    try:
        if _world.owns_torch_distributed:
            begin_world(backend, timeouts, _world)
        register_groups(_make_groups(read, timeouts, _world))
        atexit.register(_at_exit)
    except Exception:
        _end()
        raise


def _timeouts(verify: float, start: float | None, collective: float | None) -> Timeouts:
    timeouts = Timeouts(verify if start is None else start, verify, verify if collective is None else collective)
    wrong = [s for s in timeouts if not isinstance(s, int | float) or not 0 < s < math.inf]
    if wrong:
        raise InputError(
            f"{wrong[0]!r} is not a finite number of seconds above 0",
            where="init_process_group(timeout_seconds=..., start_seconds=..., collective_seconds=...)",
            attempt="timeout_seconds=60; of a timedelta, its total_seconds()",
        )
    return timeouts


def _make_groups(read: Callable[[], Wanted], timeouts: Timeouts, owned: World) -> dict[str, Group]:
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
        MODEL: _own_group(MODEL, model, timeouts, owned, controls),
        DATA: _own_group(DATA, data, timeouts, owned, [None] * len(data)),
    }
    # a rank that destroys its groups early would cut off ranks that are still connecting
    verify_call(all_ranks, lambda: f"{request}, made")
    return groups


def is_made_for_mesh() -> bool:
    """Returns whether the groups were made for a model's mesh."""
    return _world is not None and _world.for_mesh


def along_data_axes(sizes: Sequence[int]) -> tuple[Group, ...]:
    """Returns the groups along a mesh's data axes, splitting the data-parallel group.

    All ranks must call it. The groups are created once, and end with the others. For a single axis,
    the result is the data-parallel group itself.

    Args:
        sizes: the numbers of ranks along the axes, outermost first.

    Raises:
        DistributedError: groups with other sizes exist, or the groups can't be created.
    """
    everyone, names = lookup(DATA), data_names(len(sizes))
    if len(sizes) == 1:
        return (everyone,)
    made = {group.name: group for group in registered_groups()}
    if names[0] not in made:
        assert _world is not None
        for i, name in enumerate(names):
            along = [
                row
                for ranks in _world.data_ranks
                for row in torch.tensor(ranks, device="cpu").reshape(*sizes).movedim(i, -1).flatten(0, -2).tolist()
            ]
            made[name] = _own_group(name, along, everyone.timeouts, _world, [None] * len(along))
        register_groups(made)
    found = [group.size for name, group in made.items() if name not in (MODEL, DATA)]
    if found != [*sizes]:
        raise DistributedError(
            f"the batch is divided over axes of {' x '.join(map(str, found))} ranks already",
            where="mesh=",
            why=f"another model's mesh has made the groups; that of this one has {' x '.join(map(str, sizes))}",
            attempt="one mesh for all models; or destroy_process_group() between them",
        )
    return tuple(made[name] for name in names)


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


def _own_group(
    name: str,
    groups: list[list[int]],
    timeouts: Timeouts,
    owned: World,
    controls: Sequence[dist.ProcessGroup | None],
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


def destroy_process_group() -> None:
    """Destroys the groups, so they can be created again.

    Also ends `torch.distributed` if this library initialised it.
    """
    try:
        group, failing = own_group(), sys.exc_info()[0] is not None
        if not failing and not group.handshake.failures:  # after an error, the other ranks may never get here
            verify_following_call(group, lambda: "destroy_process_group()")
    finally:
        _end()


def _end() -> None:
    global _world
    _end_waiter_threads()
    atexit.unregister(_at_exit)
    register_groups({})
    world, _world = _world, None
    if world is None or not dist.is_initialized():
        return
    if world.owns_torch_distributed:
        dist.destroy_process_group()
        return
    for process_group in reversed(world.process_groups):
        if isinstance(process_group, dist.ProcessGroup):  # this process is a member
            dist.destroy_process_group(process_group)


def _at_exit() -> None:
    """Ends remaining groups: gloo's threads abort a process that exits with groups alive.

    Groups of other backends are left alone: ending them may wait for ranks that are gone.
    """
    _end_waiter_threads()
    if (
        _world is not None
        and _world.owns_torch_distributed
        and dist.is_initialized()
        and dist.get_backend() in ("gloo", MEMORY)
    ):
        _end()


def _end_waiter_threads() -> None:
    """Ends waiting threads: a process that exits while a thread waits in a backend is aborted."""
    for group in registered_groups():
        if not all(thread.is_done() for thread in group.handshake.waiter_threads):
            abort_pending_receives(group)
