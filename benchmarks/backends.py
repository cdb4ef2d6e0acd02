"""What the ranks of a benchmark talk through: torchshard's through memory, if nothing else is asked; others by gloo."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from torchshard import distributed as tsd
from torchshard.distributed.memory import MemoryProcessGroup

MEMORY = ", memory"
"""Ends the name of a way by hand whose ranks talk through memory, too."""


def begin(backend: str | None, size: int = -1) -> dist.ProcessGroup:
    """Makes the world, on which torchshard's ranks talk; returns a group of all ranks for those who talk by gloo."""
    torch.set_num_threads(1)
    tsd.init_process_group(size, backend=backend, timeout_seconds=600)
    world = dist.group.WORLD
    assert world is not None
    return dist.new_group(backend="gloo") if isinstance(world, MemoryProcessGroup) else world


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what ranks talk through."""
    parser.add_argument("--backend", default=None, help="of torchshard's ranks; by default memory, as it chooses")
    parser.add_argument("--others", default="gloo", choices=("gloo", "memory"), help="of PyTorch's own ways")


def others_group(name: str, gloo: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of PyTorch's own ways."""
    world = dist.group.WORLD
    assert world is not None
    return world if name == "memory" else gloo


def through_memory() -> bool:
    """Whether the world does."""
    return isinstance(dist.group.WORLD, MemoryProcessGroup)


def mesh_of(group: dist.ProcessGroup, tp: int = 1) -> DeviceMesh:
    """A mesh of a group's ranks, or one of two dims, "dp" and "tp", whose ranks talk as that group does."""
    if tp == 1:
        return DeviceMesh.from_group(group, "cpu")
    backend, table = dist.get_backend(group), torch.arange(dist.get_world_size()).view(-1, tp)
    lines = [[dist.new_group(ranks, backend=backend) for ranks in cut.tolist()] for cut in (table.t(), table)]
    number = dist.get_rank()
    own = [lines[0][number % tp], lines[1][number // tp]]
    return DeviceMesh.from_group(own, "cpu", mesh=table, mesh_dim_names=("dp", "tp"))


def sent(run: Callable[[], object]) -> tuple[int, int]:
    """How many collectives a function's ranks run, on whatever thread, and those of them that compare what ranks do.

    Through memory nothing is compared by a collective of its own.
    """
    world = dist.group.WORLD
    before = world.calls.begun if isinstance(world, MemoryProcessGroup) else 0
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        run()
    posted = world.calls.begun - before if isinstance(world, MemoryProcessGroup) else 0
    dtypes = [e.dtypes()[0] for e in profiler.profiler.kineto_results.events() if e.name().startswith("gloo:")]
    compared = dtypes.count("long int")
    return posted + len(dtypes) - compared, compared
