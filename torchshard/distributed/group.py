"""A process's place in a group, and the names by which graphs refer to groups.

A graph stores a group's name, not the group: it can be printed, saved, and run again in another
process. Names: `model` is the group that `init_process_group` created, `data` the group across the
model-parallel groups; `simulated/<rank>/<world>` is not a real group and allows checking a graph
for any rank without processes.

A group also contains its ranks' verification state (`HandshakeState`), how much they verify
(`CheckLevel`), and their time-outs (`Timeouts`). All of it ends with the group.
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
"""The maximum number of recent unverified collectives that an error lists."""


class CheckLevel(Enum):
    """The calls that ranks verify before they communicate."""

    ALL = "all"
    """Each eager call, each collective of a graph, each step of backward, and the calling line."""
    NEW = "new"
    """Each call of a sharded model. Eager calls: new signatures over NCCL, otherwise each call."""
    OFF = "off"
    """Only required ones: exchanging sizes and objects, new groups, sharding, new captures."""


class Timeouts(NamedTuple):
    """Time-outs in seconds."""

    start: float = 60.0
    """For the ranks to find each other."""
    verify: float = 60.0
    """For the other ranks to reach a call."""
    collective: float = 60.0
    """For a collective to end."""

    @property
    def longest(self) -> float:
        """For reaching a call and ending it, because through memory one wait does both."""
        return max(self.verify, self.collective)


class Waiter(Protocol):
    """A thread that waits for a message."""

    def is_done(self, seconds: float | None = 0.0) -> bool:
        """Waits up to `seconds` (None: no limit), and returns whether the thread has ended."""


@dataclass
class HandshakeState:
    """The verification state of a group, and its messages under way."""

    level: CheckLevel = CheckLevel.NEW
    verified_calls: set[Hashable] = field(default_factory=set)
    """The keys of verified calls, the same on all ranks."""
    verified_sends: dict[tuple[int, int], set[Hashable]] = field(default_factory=dict)
    """(from, to) -> the keys of the messages that these two ranks have verified."""
    failures: int = 0
    """The number of failed calls; after one, the other ranks' calls are unknown."""
    last_receive: dict[int, Waiter] = field(default_factory=dict)
    """Rank -> the last receive from it, if it waits for verification."""
    waiter_threads: list[Waiter] = field(default_factory=list)
    """The threads that wait for messages."""
    sharded_models: int = 0
    """The number of models sharded over the group, the same on all ranks; it numbers the models."""
    unverified_hash: int = 0
    """A rolling hash of unverified collectives; the next verification includes it."""
    recent_unverified: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """The latest unverified collectives since the last verification."""

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
    """The name by which graphs refer to it."""
    process_group: dist.ProcessGroup | None = None
    """The torch.distributed group; None for a group of one or a simulated one."""
    control: dist.ProcessGroup | None = None
    """A group (gloo or memory) for verification and objects; None for a group of one."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    simulated: bool = False
    gloo_devices: frozenset[str] = frozenset()
    """The device types, such as "cpu", with tensors sent through gloo."""
    handshake: HandshakeState = field(default_factory=HandshakeState, compare=False, repr=False)

    @property
    def coordinate(self) -> Coordinate:
        """This process's coordinate on the group's mesh axis."""
        return MeshAxis(self.size).coordinate(self.rank, self.name)

    @property
    def level(self) -> CheckLevel:
        """The calls that the ranks verify."""
        return self.handshake.level

    @property
    def memory(self) -> Calls | None:
        """The calls of its ranks, if they communicate through memory."""
        return self.process_group.calls if isinstance(self.process_group, MemoryProcessGroup) else None

    def aborts_on_mismatch(self, device: torch.device) -> bool:
        """Returns whether the backend, like gloo, aborts or corrupts memory on mismatched sizes."""
        return device.type in self.gloo_devices

    def compares_first(self, device: torch.device) -> bool:
        """Returns whether ranks compare calls before sending; over NCCL, the device goes on."""
        return self.memory is not None or self.aborts_on_mismatch(device)


ALONE = Group(0, 1)
"""The group of a process without groups; its level is the initial level of new groups."""
_groups: dict[str, Group] = {}
"""Name -> group, from `init_process_group` to `destroy_process_group`."""


def register_groups(groups: dict[str, Group]) -> None:
    """Replaces all groups of this process."""
    _groups.clear()
    _groups.update(groups)


def registered_groups() -> list[Group]:
    """Returns all groups of this process."""
    return list(_groups.values())


def is_initialized() -> bool:
    """Returns whether this process has a model-parallel group."""
    return MODEL in _groups


def lookup(name: str) -> Group:
    """Returns the group of a name.

    Raises:
        DistributedError: this process lacks such a group.
    """
    if name not in _groups:  # checked first, because every collective of a step looks its group up
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
    """Returns the torch.distributed group of the model-parallel group.

    None if this process is alone. In a process that the mesh leaves out, the result is
    `GroupMember.NON_GROUP_MEMBER`, because None would mean the whole world.

    Raises:
        DistributedError: `init_process_group` was not called.
    """
    return _named(MODEL).process_group


def get_rank() -> int:
    """Returns the rank in the model-parallel group; -1 outside of it, 0 before initialisation."""
    return _groups[MODEL].rank if is_initialized() else 0


def get_group_size() -> int:
    """Returns the size of the model-parallel group; -1 outside of it, 1 before initialisation."""
    return _groups[MODEL].size if is_initialized() else 1


def get_world_size() -> int:
    """Returns `get_group_size()`; torch.distributed's `get_world_size` counts all processes."""
    return get_group_size()


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """Returns the torch.distributed group of this process's data-parallel group.

    Its processes have the same rank in their model-parallel groups. None if this process is alone;
    `GroupMember.NON_GROUP_MEMBER` if the mesh leaves it out.

    Raises:
        DistributedError: `init_process_group` was not called.
    """
    return _named(DATA).process_group


def get_data_parallel_rank() -> int:
    """Returns the rank in the data-parallel group; -1 outside of it, 0 before initialisation."""
    return _groups[DATA].rank if is_initialized() else 0


def get_data_parallel_size() -> int:
    """Returns the size of the data-parallel group; -1 outside of it, 1 before initialisation."""
    return _groups[DATA].size if is_initialized() else 1


def own_group() -> Group:
    """Returns the model-parallel group; `ALONE` before initialisation or outside of it."""
    group = _groups.get(MODEL, ALONE)
    return group if group.size > 0 else ALONE


def peer(group: Group, rank: int, name: str) -> int:
    """Returns a rank of a group after checking it.

    Raises:
        InputError: the rank is out of range.
    """
    if not isinstance(rank, int) or not 0 <= rank < group.size:
        raise InputError(
            f"there is no rank {rank!r} in the group",
            where=f"{name}={rank!r}",
            why=f"the model-parallel group has {group.size} ranks; {name} counts within it",
            attempt=f"{name}=0" + (f" to {group.size - 1}" if group.size > 1 else ""),
        )
    return rank
