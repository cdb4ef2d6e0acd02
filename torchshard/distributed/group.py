"""A process's place in a group, and the names under which graphs find groups.

A graph holds a group's name, not the group: it can be printed, saved, and run again in another process. Names:
`model` is the group that `init_process_group` made, `data` the one across the model-parallel ones;
`simulated/<rank>/<world>` is no group at all, and lets a graph be checked for any rank without processes.

A group also holds what its ranks have verified of each other so far (`HandshakeState`), how much they verify
(`CheckLevel`), and how long they wait (`Timeouts`): all of it ends with the group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from torchshard.core.errors import DistributedError, InputError
from torchshard.core.mesh import DATA, MODEL, Coordinate, MeshAxis, simulated
from torchshard.distributed.memory import Calls, MemoryProcessGroup

MAX_RECENT = 16
"""An error lists at most so many of the latest collectives that were not verified."""


class CheckLevel(Enum):
    """Which calls the ranks verify before they communicate."""

    ALL = "all"
    """Each eager call, each collective node of a graph, each step of a backward, and the line that calls."""
    NEW = "new"
    """Each call of a sharded model. Eager calls: over NCCL those whose signature is new, else each."""
    OFF = "off"
    """Only what can't be skipped: exchanges of sizes and objects, making groups, sharding and new captures."""


class Timeouts(NamedTuple):
    """Waits in seconds."""

    start: float = 60.0
    """For the ranks to find each other."""
    verify: float = 60.0
    """For the others to come to a call."""
    collective: float = 60.0
    """For a collective to end."""

    @property
    def longest(self) -> float:
        """For the others to come to a call and for its end, where one wait does both: through memory."""
        return max(self.verify, self.collective)


class Waiter(Protocol):
    """A thread that waits for a message."""

    def is_done(self, seconds: float | None = 0.0) -> bool:
        """Whether the thread has ended, after so many seconds at most (None: no limit)."""


@dataclass
class HandshakeState:
    """What the ranks of a group have verified so far, and which of their messages are under way."""

    level: CheckLevel = CheckLevel.NEW
    verified_calls: set[Hashable] = field(default_factory=set)
    """The keys of verified calls, the same on all ranks."""
    verified_sends: dict[tuple[int, int], set[Hashable]] = field(default_factory=dict)
    """(from, to) -> the keys of the messages that these two ranks have verified."""
    failures: int = 0
    """How many calls have failed; nothing is known about the other ranks' calls after one."""
    last_receive: dict[int, Waiter] = field(default_factory=dict)
    """Rank -> the last receive from it, if that waits for verification."""
    waiter_threads: list[Waiter] = field(default_factory=list)
    """The threads that wait for messages."""
    sharded_models: int = 0
    """How many models were sharded over the group; the number of each is the same on all ranks."""
    unverified_hash: int = 0
    """A rolling hash of the collectives that were not verified; the next verification includes it."""
    recent_unverified: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """The latest of those since the ranks last verified anything."""

    def forget(self) -> None:
        """Makes every call count as new, after an error that all ranks raise."""
        self.verified_calls.clear()
        self.verified_sends.clear()

    def fail(self) -> None:
        """Records that a call has failed on this rank."""
        self.failures += 1
        self.forget()


@dataclass(frozen=True)
class Group:
    """A process's place in a group."""

    rank: int
    size: int
    name: str = MODEL
    """The name under which graphs find it."""
    process_group: dist.ProcessGroup | None = None
    """torch.distributed's group; None for a group of one or a simulated one."""
    control: dist.ProcessGroup | None = None
    """A gloo group of the same ranks, for verification and objects; None for a group of one."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    simulated: bool = False
    gloo_devices: frozenset[str] = frozenset()
    """The kinds of devices ("cpu") whose tensors travel through gloo."""
    handshake: HandshakeState = field(default_factory=HandshakeState, compare=False, repr=False)

    @property
    def coordinate(self) -> Coordinate:
        """This process's coordinate on the group's mesh axis."""
        return MeshAxis(self.size).coordinate(self.rank, self.name)

    @property
    def level(self) -> CheckLevel:
        """Which calls the ranks verify."""
        return self.handshake.level

    @property
    def memory(self) -> Calls | None:
        """The calls of its ranks, if they talk through memory."""
        return self.process_group.calls if isinstance(self.process_group, MemoryProcessGroup) else None

    def aborts_on_mismatch(self, device: torch.device) -> bool:
        """Whether the backend aborts the process or corrupts memory if the ranks' sizes differ, as gloo does."""
        return device.type in self.gloo_devices

    def compares_first(self, device: torch.device) -> bool:
        """Whether the ranks compare what they do before any data are sent; over NCCL the device goes on meanwhile."""
        return self.memory is not None or self.aborts_on_mismatch(device)


ALONE = Group(0, 1)
"""The group of a process that is in none. Its level is the one that the next groups begin with."""
_groups: dict[str, Group] = {}
"""Name -> group, from `init_process_group` to `destroy_process_group`."""


def register_groups(groups: dict[str, Group]) -> None:
    """Replaces all groups of this process."""
    _groups.clear()
    _groups.update(groups)


def registered_groups() -> list[Group]:
    """All groups of this process."""
    return list(_groups.values())


def is_initialized() -> bool:
    """Whether this process has a model-parallel group."""
    return MODEL in _groups


def lookup(name: str) -> Group:
    """The group of a name.

    Raises:
        DistributedError: there is no such group in this process.
    """
    if name not in _groups:  # asked first: every collective of a step looks its group up
        found = simulated(name)
        if found is not None:
            return Group(found.rank, found.size, name, simulated=True)
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


def get_group() -> dist.ProcessGroup | None:
    """torch.distributed's process group of the model-parallel group; None if this process is a world of its own.

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
    """The same as `get_group_size`; torch.distributed's function of this name counts all processes."""
    return get_group_size()


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """torch.distributed's group of the processes that have this rank in their model-parallel groups; as `get_group`."""
    return _named(DATA).process_group


def get_data_parallel_rank() -> int:
    """This process's rank in its data-parallel group; -1 in none, 0 when nothing is initialised."""
    return _groups[DATA].rank if is_initialized() else 0


def get_data_parallel_size() -> int:
    """The ranks of this process's data-parallel group; -1 in none, 1 when nothing is initialised."""
    return _groups[DATA].size if is_initialized() else 1


def own_group() -> Group:
    """The model-parallel group; `ALONE` if nothing is initialised, or this process is in none."""
    group = _groups.get(MODEL, ALONE)
    return group if group.size > 0 else ALONE


def peer(group: Group, rank: int, name: str) -> int:
    """A rank within a group.

    Raises:
        InputError: the group has no such rank.
    """
    if not isinstance(rank, int) or not 0 <= rank < group.size:
        raise InputError(
            f"there is no rank {rank!r} in the group",
            where=f"{name}={rank!r}",
            why=f"the model-parallel group has {group.size} ranks; {name} counts within it",
            attempt=f"{name}=0" + (f" to {group.size - 1}" if group.size > 1 else ""),
        )
    return rank
