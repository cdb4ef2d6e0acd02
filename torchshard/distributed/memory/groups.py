"""Creates the backend's groups: ranks exchange the addresses of their segments, and open each other's.

Each rank then tells the store which segments it could not open, and why. So if one rank fails, all
raise the same error.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchshard.distributed.memory.backend import BACKEND, MemoryProcessGroup
from torchshard.distributed.memory.board import Board
from torchshard.distributed.memory.segment import Address, OtherSegment, OwnSegment, Unreachable


def make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> MemoryProcessGroup:
    """Creates the group of these ranks; torch.distributed calls it.

    Raises:
        Unreachable: some ranks can't read each other's memory; raised on every rank.
    """
    own, others, refusals = _opened(store, rank, size, timeout)
    if own is None or any(map(any, refusals)):
        raise Unreachable("; ".join(dict.fromkeys(refusal for each in refusals for refusal in each if refusal)))
    return MemoryProcessGroup(Board(own, others, rank, timeout.total_seconds()))


def reach(store: dist.Store, rank: int, size: int, timeout: timedelta) -> list[set[int]]:
    """Tests which ranks' memory each rank can read; returns sets by rank, the same on all ranks."""
    _, _, refusals = _opened(store, rank, size, timeout)
    return [{other for other, refusal in enumerate(each) if not refusal} for each in refusals]


def _opened(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> tuple[OwnSegment | None, dict[int, OtherSegment], list[list[str]]]:
    """Creates a segment, and opens the other ranks'.

    Returns:
        the segments, and for each rank its reasons for not opening each segment ('' on success).
    """
    own: OwnSegment | None = None
    mine: object
    try:
        own = OwnSegment()
        mine = own.found_at
    except Unreachable as error:
        mine = str(error)
    others, refusals = dict[int, OtherSegment](), list[str]()
    for other, found in enumerate(exchanged_by_store(store, "address", rank, size, mine, timeout)):
        refusals.append(f"rank {other}: {found}" if isinstance(found, str) else "")
        if other != rank and not refusals[other]:
            try:
                others[other] = OtherSegment(Address(*found))
            except Unreachable as error:
                refusals[other] = f"rank {rank}: {error}"
    everyone = exchanged_by_store(store, "opened", rank, size, refusals, timeout)
    store.set(f"{BACKEND}/done/{rank}", "")
    if rank == 0:  # rank 0's process often owns the store, and may end where this fails
        store.wait([f"{BACKEND}/done/{other}" for other in range(size)], timeout)
    return own, others, everyone


def exchanged_by_store(
    store: dist.Store, key: str, rank: int, size: int, mine: object, timeout: timedelta
) -> list[Any]:
    """Returns every rank's value, by rank."""
    store.set(f"{BACKEND}/{key}/{rank}", json.dumps(mine))
    keys = [f"{BACKEND}/{key}/{other}" for other in range(size)]
    store.wait(keys, timeout)
    return [json.loads(store.get(found)) for found in keys]


def register() -> None:
    """Registers "memory" as a backend of torch.distributed."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, make_group, devices=["cpu"])
