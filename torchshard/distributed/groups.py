"""The model-parallel group of this process, and the names under which graphs find groups.

A graph holds a group's name, not the group: it can be printed, saved, and run again in another process. Names:
`model` is the group that `init_process_group` made, `data` the one across the model-parallel ones;
`simulated/<rank>/<world>` is no group at all, and lets a graph be checked for any rank without processes.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchshard.core.errors import DistributedError, InputError
from torchshard.distributed.checks import Mode, announce, forget, hang_up, meet

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
    control: Any = None
    """A gloo group of the same ranks, over which they agree and send objects; None for a group of one."""
    timeout_seconds: float = 60.0
    """How long a rank waits for the others to come to a call."""
    simulated: bool = False
    fragile: bool = False
    """Whether the backend aborts a process or garbles its memory where ranks' calls differ in size, as gloo does."""
    talk: Talk = field(default_factory=lambda: Talk(), compare=False, repr=False)


RECENT = 16
"""As many of the collectives that were not compared an error lists."""


@dataclass
class Talk:
    """What the ranks of a group have told each other so far."""

    met: set[Any] = field(default_factory=set)
    """The kinds of calls that all have compared."""
    messages: dict[tuple[int, int], set[Any]] = field(default_factory=dict)
    """(from, to) -> the kinds of messages that these two have compared."""
    failed: bool = False
    """Whether a call has failed: what the others do is not known then."""
    latest: dict[int, Any] = field(default_factory=dict)
    """Rank -> the latest of what is to be received from it, where that waits for a comparison."""
    waiting: list[Any] = field(default_factory=list)
    """The threads that wait for messages."""
    models: int = 0
    """How many models were sharded over the group."""
    history: int = 0
    """A rolling hash of the collectives that were not compared."""
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The latest of those since the ranks last compared anything."""


ALONE = Group(0, 1)
"""The group of a process that is in none."""
_groups: dict[str, Group] = {}
_stores: dict[tuple[str | None, ...], Any] = {}
"""Environment -> the store by which its ranks find each other, with rank and world size. It outlives the groups: what
rank 0 keeps can't be made again while others still use it."""
_times = itertools.count(1)
"""How many times `torch.distributed` was initialised here: names in the store are never used again."""
_began: list[bool] = []
"""Whether the groups' `torch.distributed` was initialised here."""
_made: list[Any] = []
"""The process groups that were made here, to be destroyed with ours."""


def init_process_group(
    group_size: int | str = -1,
    *,
    mesh: Any = None,
    backend: str | None = None,
    timeout_seconds: float = 60.0,
    start_seconds: float | None = None,
    collective_seconds: float | None = None,
) -> None:
    """Cuts the world into model-parallel groups of `group_size` consecutive ranks, or along a DeviceMesh's dimension.

    Uses `torch.distributed` as it was initialised; initialises it under `torchrun`; alone, makes a world of one. The
    data-parallel groups lie across: with four ranks and `group_size=2` the model-parallel groups are {0, 1} and {2, 3},
    the data-parallel ones {0, 2} and {1, 3}. All processes of the world must call it.

    Args:
        group_size: ranks per group; -1: one group of all. A text is taken for the backend, as `torch.distributed` does.
        mesh: a one-dimensional `DeviceMesh`, such as `mesh["tp"]`: its ranks are this process's group. A process that
            the mesh leaves out is in no group: its rank is -1.
        backend: for the case that it initialises `torch.distributed`; by default NCCL where CUDA is, else gloo.
        timeout_seconds: how long a rank waits for the others to come to a call, before each of them raises: as long as
            the slowest rank may load data, or write a checkpoint.
        start_seconds: how long the ranks may take to find each other; by default `timeout_seconds`.
        collective_seconds: how long a collective may take; by default `timeout_seconds`. Groups of a
            `torch.distributed` that was initialised before are made anew, for they have these timeouts.

    Raises:
        DistributedError: it is initialised already, the world does not divide by `group_size`, the mesh has more
            dimensions than one, or the ranks ask for different groups.
        InputError: a wait is no number above 0.
    """
    if isinstance(group_size, str):
        backend, group_size = group_size, -1
    if is_initialized():
        raise DistributedError(
            "the model-parallel group is initialised already",
            where="init_process_group",
            why=f"this process is rank {get_rank()} of {get_group_size()}",
            attempt="call torchshard.distributed.destroy_process_group() first",
        )
    waits = _waits(timeout_seconds, start_seconds, collective_seconds)
    began = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if began:
        _begin(backend, waits)
    _began.append(began)
    try:
        _groups.update(_make_groups(group_size, mesh, waits))
        atexit.register(_at_exit)
    except Exception:
        _forget()
        raise


class Waits(NamedTuple):
    """For how many seconds a rank waits."""

    call: float
    """For the others to come to a call."""
    start: float
    """For the ranks to find each other."""
    collective: float
    """For a collective to end."""


def _waits(call: float, start: float | None, collective: float | None) -> Waits:
    waits = Waits(call, call if start is None else start, call if collective is None else collective)
    if not all(isinstance(seconds, int | float) and 0 < seconds < math.inf for seconds in waits):
        raise InputError(
            f"{' and '.join(map(repr, dict.fromkeys(waits)))} are not finite numbers of seconds above 0",
            where="init_process_group(timeout_seconds=..., start_seconds=..., collective_seconds=...)",
            attempt="timeout_seconds=60; of a timedelta, its total_seconds()",
        )
    return waits


def _begin(backend: str | None, waits: Waits) -> None:
    """Initialises torch.distributed from torchrun's environment."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    start = timedelta(seconds=waits.start)
    try:
        place = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")))
        if place not in _stores:
            _stores[place] = next(dist.rendezvous("env://", timeout=start))
        held, rank, world = _stores[place]
        store = dist.PrefixStore(f"torchshard/{next(_times)}", held)
        limit = timedelta(seconds=waits.collective)
        dist.init_process_group(chosen, store=store, rank=rank, world_size=world, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            "the ranks did not find each other",
            where=f"init_process_group, rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
            why=str(error).partition("\n")[0],
            attempt="the same MASTER_ADDR and MASTER_PORT for all of them, as torchrun sets; all started within "
            f"start_seconds={waits.start:g}",
        ) from error


def _make_groups(group_size: int, mesh: Any, waits: Waits) -> dict[str, Group]:
    """This process's model-parallel group, and its data-parallel one: the ranks of the same place in each."""
    if not dist.is_initialized():
        _model_ranks(1, group_size)
        return {MODEL: Group(0, 1), DATA: Group(0, 1)}
    world = dist.get_world_size()
    everyone = list(range(world))
    control = _new_group(everyone, waits.call, "gloo") if world > 1 else None
    all_ranks = Group(dist.get_rank(), world, None, control, waits.start)
    asked = f"init_process_group({'mesh=...' if mesh is not None else f'group_size={group_size}'})"
    meet(all_ranks, lambda: asked)
    model = _model_ranks(world, group_size) if mesh is None else _mesh_ranks(world, group_size, mesh, control)
    data = [[ranks[place] for ranks in model if place < len(ranks)] for place in range(max(map(len, model)))]
    controls = [control if ranks == everyone else None for ranks in model]
    made = {MODEL: _own_group(model, waits, controls), DATA: _own_group(data, waits)}
    meet(all_ranks, lambda: f"{asked}, made")  # one that destroys its groups would cut off who is still connecting
    return made


def _model_ranks(world: int, group_size: int) -> list[list[int]]:
    """The world's ranks, group by group."""
    size = world if group_size == -1 else group_size
    if size < 1 or world % size:
        raise DistributedError(
            f"a world of {world} ranks does not divide into groups of {group_size}",
            where="init_process_group(group_size=...)",
            why=f"{world} / {group_size} is not whole" if size > 0 else "a group has at least one rank",
            attempt=f"a group_size among {[n for n in range(1, world + 1) if world % n == 0]}, or -1 for all",
        )
    return [list(range(start, start + size)) for start in range(0, world, size)]


def _mesh_ranks(world: int, group_size: int, mesh: Any, control: Any) -> list[list[int]]:
    if mesh.ndim != 1 or group_size != -1:
        raise DistributedError(
            f"a mesh of {mesh.ndim} dimensions with group_size={group_size} is no model-parallel group",
            where="init_process_group(mesh=...)",
            why="the group is that of one dimension, and the mesh says its size",
            attempt='one dimension by its name, such as mesh["tp"], and no group_size',
        )
    everyone: list[Any] = [None] * world
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


def _own_group(groups: list[list[int]], waits: Waits, controls: Sequence[Any] | None = None) -> Group:
    """Makes these groups, all of them on every process, and gives the own one.

    Args:
        controls: for groups that are to have a control group, those that there are; None: they have none.
    """
    rank, world, own = dist.get_rank(), dist.get_world_size(), Group(-1, -1, dist.GroupMember.NON_GROUP_MEMBER)
    for i, ranks in enumerate(groups):
        whole = _began[-1] and len(ranks) == world
        made = dist.group.WORLD if whole else _new_group(ranks, waits.collective)
        control = None
        if controls is not None and len(ranks) > 1:
            control = controls[i] or _new_group(ranks, waits.call, "gloo")
        if rank in ranks:
            fragile = len(ranks) > 1 and "gloo" in dist.get_backend_config(made)
            own = Group(ranks.index(rank), len(ranks), made, control, waits.call, fragile=fragile)
    return own


def _new_group(ranks: list[int], seconds: float, backend: str | None = None) -> Any:
    try:
        made = dist.new_group(ranks, timeout=timedelta(seconds=seconds), backend=backend)
    except RuntimeError as error:
        raise DistributedError(
            f"ranks {ranks} of the world could not make a group",
            where=f"init_process_group, rank {dist.get_rank()} of {dist.get_world_size()}",
            why=str(error).partition("\n")[0],
            attempt="call init_process_group on every rank, with the same arguments",
        ) from error
    _made.append(made)
    return made


def is_initialized() -> bool:
    """Whether this process has a model-parallel group."""
    return MODEL in _groups


def destroy_process_group() -> None:
    """Forgets the groups (they can then be made again), and ends `torch.distributed` where we began it."""
    try:
        group, failing = own_group(), sys.exc_info()[0] is not None
        if not failing and not group.talk.failed:  # where an error ends the work, nobody is waited for
            announce(group, lambda: "destroy_process_group()")
    finally:
        _forget()


def _forget() -> None:
    _end_waiting()
    atexit.unregister(_at_exit)
    _groups.clear()
    began = _began.pop() if _began else False
    while _made:
        made = _made.pop()
        if not began and dist.is_initialized() and made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)
    if began and dist.is_initialized():
        dist.destroy_process_group()


def _at_exit() -> None:
    """Ends what a program has left: where groups are still there, gloo's threads abort a process that ends. Others may
    wait for their ranks when they are ended."""
    _end_waiting()
    if _began and _began[-1] and dist.is_initialized() and dist.get_backend() == "gloo":
        _forget()


def _end_waiting() -> None:
    """Ends the threads that wait for messages: a process that ends while one waits in a backend is aborted."""
    for group in _groups.values():
        if not all(thread.is_done() for thread in group.talk.waiting):
            hang_up(group)


def debug(on: bool | None = True) -> None:
    """Sets which calls the ranks compare before they communicate; a difference is one error on every rank.

    Within a group all ranks must call it.

    Args:
        on: True: each call, each collective node of a graph, and each step of a backward, at the cost of a message to
            each rank, and also the line that calls (calls that send the same in another order are different calls);
            None (as it begins): each call of a sharded model, and eager calls, with gloo each of them, with NCCL each
            when its like is new; False: none but those by which the ranks tell each other sizes.

    Raises:
        DistributedError: the ranks of the group don't all call it.
    """
    if is_initialized():
        group = _groups[MODEL]
        meet(group, lambda: f"debug({on})")
        forget(group)
    Mode.on = on


def lookup(name: str) -> Group:
    """The group of a name.

    Raises:
        DistributedError: there is no such group in this process.
    """
    if name.startswith("simulated/"):
        _, rank, world = name.split("/")
        return Group(int(rank), int(world), simulated=True)
    group = _named(name)
    if group.size < 1:
        raise DistributedError(
            "this process is in no model-parallel group",
            where=f"group {name!r}",
            why="the mesh that init_process_group was given leaves it out",
            attempt="make the call on the ranks of the mesh alone",
        )
    return group


def _named(name: str) -> Group:
    if name in _groups:
        return _groups[name]
    raise DistributedError(
        "there is no model-parallel group in this process",
        where=f"group {name!r}",
        attempt="call torchshard.distributed.init_process_group() first",
    )


def simulated_name(rank: int, world: int) -> str:
    """The name of a group that exists only on paper."""
    return f"simulated/{rank}/{world}"


def get_group() -> Any:
    """torch.distributed's process group of the model-parallel group; None where this process is a world of its own.

    In a process that the mesh leaves out it is `GroupMember.NON_GROUP_MEMBER`, for None would mean the whole world.

    Raises:
        DistributedError: `init_process_group` was not called.
    """
    return _named(MODEL).process_group


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
    """torch.distributed's group of the processes that have this rank in their model-parallel groups; as `get_group`."""
    return _named(DATA).process_group


def get_data_parallel_rank() -> int:
    """This process's rank in its data-parallel group; -1 in none, 0 when nothing is initialised."""
    return _groups[DATA].rank if is_initialized() else 0


def get_data_parallel_size() -> int:
    """The ranks of this process's data-parallel group; -1 in none, 1 when nothing is initialised."""
    return _groups[DATA].size if is_initialized() else 1


def own_group() -> Group:
    """The model-parallel group; where nothing is initialised, or this process is in none, `ALONE`."""
    group = _groups.get(MODEL, ALONE)
    return group if group.size > 0 else ALONE


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
