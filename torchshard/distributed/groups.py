"""The model-parallel group of this process, and the names under which graphs find groups.

A graph holds a group's name, not the group: it can be printed, saved, and run again in another process. Names:
`model` is the group that `init_process_group` made; `simulated/<rank>/<world>` is no group at all, and lets a graph
be checked for any rank without processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchshard.errors import DistributedError

MODEL = "model"
"""The name of the group that `init_process_group` makes."""


@dataclass(frozen=True)
class Group:
    """A process's place in a group."""

    rank: int
    size: int
    process_group: Any = None
    """torch.distributed's group; None for a group of one or a simulated one."""
    simulated: bool = False


_groups: dict[str, Group] = {}
_owned: list[bool] = []


def init_process_group(group_size: int = -1, *, backend: str | None = None, timeout_seconds: float = 60.0) -> None:
    """Cuts the world into model-parallel groups of `group_size` consecutive ranks.

    Uses `torch.distributed` as it was initialised; initialises it under `torchrun`; alone, makes a world of one.

    Args:
        group_size: ranks per group; -1: one group of all.
        backend: for the case that it initialises `torch.distributed`; by default NCCL where CUDA is, else gloo.
        timeout_seconds: of the collectives of what it initialises.

    Raises:
        DistributedError: it is initialised already, or the world does not divide by `group_size`.
    """
    if is_initialized():
        raise DistributedError(
            "the model-parallel group is initialised already",
            where="init_process_group",
            why=f"this process is rank {get_rank()} of {get_group_size()}",
            attempt="call torchshard.distributed.destroy_process_group() first",
        )
    owned = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if owned:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_seconds))
    try:
        _groups[MODEL] = _make_group(group_size)
    except DistributedError:
        if owned:
            dist.destroy_process_group()
        raise
    _owned.append(owned)


def _make_group(group_size: int) -> Group:
    world = dist.get_world_size() if dist.is_initialized() else 1
    size = world if group_size == -1 else group_size
    if size < 1 or world % size:
        raise DistributedError(
            f"a world of {world} ranks does not divide into groups of {group_size}",
            where="init_process_group(group_size=...)",
            why=f"{world} / {group_size} is not whole" if size > 0 else "a group has at least one rank",
            attempt=f"a group_size among {[n for n in range(1, world + 1) if world % n == 0]}, or -1 for all",
        )
    if not dist.is_initialized():
        return Group(0, 1)
    if size == world:
        return Group(dist.get_rank(), world, dist.group.WORLD)
    mine, at = None, dist.get_rank() // size
    for start in range(0, world, size):
        made = dist.new_group(list(range(start, start + size)))
        mine = made if start == at * size else mine
    return Group(dist.get_rank() % size, size, mine)


def is_initialized() -> bool:
    """Whether this process has a model-parallel group."""
    return MODEL in _groups


def destroy_process_group() -> None:
    """Forgets the group (it can then be made again), and ends `torch.distributed` where we began it."""
    _groups.clear()
    if _owned and _owned.pop() and dist.is_initialized():
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
    """torch.distributed's process group of the model-parallel group; None where this process is alone."""
    return lookup(MODEL).process_group


def get_rank() -> int:
    """This process's rank in its model-parallel group; 0 when nothing is initialised."""
    return _groups[MODEL].rank if is_initialized() else 0


def get_group_size() -> int:
    """The ranks of this process's model-parallel group; 1 when nothing is initialised."""
    return _groups[MODEL].size if is_initialized() else 1


def get_world_size() -> int:
    """The same as `get_group_size`: the world of this process's model-parallel group."""
    return get_group_size()
