"""Creates and destroys this process's model-parallel groups, using torch.distributed's groups."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchshard.core.errors import DistributedError, InputError
from torchshard.core.mesh import DATA, MODEL, data_names
from torchshard.distributed.consistency import verify_following_call
from torchshard.distributed.group import (
    Group,
    Timeouts,
    get_group_size,
    get_rank,
    is_initialized,
    lookup,
    own_group,
    register_groups,
    registered_groups,
)
from torchshard.distributed.grouping import Wanted, make_groups, make_own_group
from torchshard.distributed.handshake import abort_pending_receives
from torchshard.distributed.memory import BACKEND as MEMORY
from torchshard.distributed.world import World, begin_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_SECONDS = 60.0
"""The default time-out for waiting for other ranks."""
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
        register_groups(make_groups(read, timeouts, _world))
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
            made[name] = make_own_group(name, along, everyone.timeouts, _world, [None] * len(along))
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
