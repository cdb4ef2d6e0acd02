"""The world: all processes of a run, how they find each other through torchrun's store, and the groups made among them.

A store may outlive its ranks: torchrun starts ranks again after a failure. So the names in it are new at each start.
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from torchshard.core.errors import DistributedError, first_line
from torchshard.distributed.group import Timeouts
from torchshard.distributed.memory import BACKEND as MEMORY
from torchshard.distributed.memory import Unreachable, reach


@dataclass
class World:
    """The groups that `init_process_group` made and `destroy_process_group` ends."""

    owns_torch_distributed: bool
    """Whether `init_process_group` initialised `torch.distributed`, and not the user."""
    process_groups: list[dist.ProcessGroup] = field(default_factory=list)
    reach: list[set[int]] = field(default_factory=list)
    """By rank: the ranks whose memory it can read, with itself; empty: the world's backend."""
    data_ranks: list[list[int]] = field(default_factory=list)
    """The ranks of each data-parallel group."""
    for_mesh: bool = False
    """Whether a model's mesh requested the groups, without a call of `init_process_group`."""

    def share_memory(self, ranks: Collection[int]) -> bool:
        """Returns whether ranks can use memory, and no other backend was requested."""
        return bool(self.reach) and all(self.reach[rank].issuperset(ranks) for rank in ranks)


stores: dict[tuple[str | None, ...], tuple[dist.Store, int, int]] = {}
"""Environment -> the store by which its ranks find each other, with rank and world size. It outlives the groups: the
store of rank 0 can't be made a second time while other ranks still use it."""
_initialisations = itertools.count(1)
"""Numbers the names in the store, so that each is used once."""


def begin_world(backend: str | None, timeouts: Timeouts, owned: World) -> None:
    """Initialises torch.distributed from torchrun's environment."""
    chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if "nccl" in chosen:
        os.environ.setdefault("TORCH_NCCL_PROPAGATE_ERROR", "1")  # else the other ranks wait until their own time is up
    device = own_gpu(chosen) if torch.cuda.is_available() else None
    start = timedelta(seconds=timeouts.start)
    try:
        place = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")))
        if place not in stores:
            store, rank, world = next(dist.rendezvous("env://", timeout=start))
            if "TORCHELASTIC_RUN_ID" in os.environ:  # it starts ranks again when one fails, or a machine joins
                store = dist.PrefixStore(common_name(store, rank, world, timeouts.start), store)
            stores[place] = store, rank, world
        base, rank, world = stores[place]
        store = dist.PrefixStore(f"torchshard/{next(_initialisations)}", base)
        if chosen == "gloo" and backend is None and world > 1:
            owned.reach = reach(store, rank, world, start)
            chosen = MEMORY if owned.share_memory(range(world)) else "gloo"
        limit = timedelta(seconds=timeouts.longest if chosen == MEMORY else timeouts.collective)
        dist.init_process_group(chosen, store=store, rank=rank, world_size=world, timeout=limit, device_id=device)
    except Unreachable as error:
        raise DistributedError(
            "the ranks can't talk through memory",
            where=f"init_process_group({chosen!r})",
            why=str(error),
            attempt='init_process_group("gloo")',
        ) from error
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            "the ranks did not find each other",
            where=f"init_process_group, rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
            why=first_line(error),
            attempt="the same MASTER_ADDR and MASTER_PORT for all of them, as torchrun sets; all started within "
            f"start_seconds={timeouts.start:g}",
        ) from error


def common_name(store: dist.Store, rank: int, world: int, seconds: float) -> str:
    """A name that no ranks have had before, the same on all.

    After an elastic restart, the store is the earlier ranks' and contains their addresses. Rank 0
    creates the name, and sends it to the ranks present, repeatedly until all have answered: an
    entry may belong to a rank from before the restart.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"torchshard/there/{rank}", own)
        name = store.get(f"torchshard/name for {own}").decode()
        store.set(f"torchshard/{name} has {rank}", "")
        return name
    missing, end = set(range(1, world)), time.monotonic() + seconds
    while missing:
        for other in missing:
            if store.check([f"torchshard/there/{other}"]):
                store.set(f"torchshard/name for {store.get(f'torchshard/there/{other}').decode()}", own)
        missing = {other for other in missing if not store.check([f"torchshard/{own} has {other}"])}
        if missing and time.monotonic() > end:
            raise RuntimeError(f"no word from ranks {sorted(missing)} within {seconds:g} s")
        time.sleep(0.01 * bool(missing))
    return own


def own_gpu(backend: str) -> torch.device | None:
    """Makes this process's GPU the current one; returns it for NCCL, which else would guess it.

    Raises:
        DistributedError: NCCL requires one GPU per process, and this process has none.
    """
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    uses_nccl = "nccl" in backend
    if uses_nccl and local >= count:
        raise DistributedError(
            "two processes would share a GPU, with which NCCL can't work",
            where=f"init_process_group, LOCAL_RANK={local}",
            why=f"this machine has {count} GPU{'s' * (count != 1)}",
            attempt=f'at most {count} processes on it; or init_process_group("gloo"), by which processes may share one',
        )
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    return device if uses_nccl else None
