"""Microseconds of a collective of torch.distributed on gloo and on torchshard's backend "memory", by size.

Both groups have the same ranks in the same processes, and are timed in turn, round by round, each call from a barrier
of the other group; the slowest rank counts. `cpu` is the processor time of all ranks together. Figures are medians.

    python benchmarks/through_memory.py --ranks 2 4
    python benchmarks/through_memory.py --ranks 2 --calls all_reduce --rounds 500
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from backends import begin
from step_time import slowest

import torchshard as ts

SIZES = (4, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of each rank's tensor."""


def calls(size: int, group: Any) -> dict[str, Callable[[], object]]:
    """Name -> a collective of tensors of float32 with so many bytes."""
    count, ranks = size // 4, dist.get_world_size()
    x, whole = torch.ones(count), torch.ones(ranks * count)
    return {
        "all_reduce": partial(dist.all_reduce, x, dist.ReduceOp.MAX, group),
        "all_gather": partial(dist.all_gather_single, whole, x, group),
        "reduce_scatter": partial(dist.reduce_scatter_single, x, whole, dist.ReduceOp.MAX, group),
        "all_to_all": partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group),
        "broadcast": partial(dist.broadcast, x, 0, group),
    }


def timed(run: Callable[[], object], other: Any) -> tuple[float, float]:
    """Seconds by the clock, and of this process's CPU."""
    dist.barrier(other)
    start, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - busy


def rank_main(options: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """(call, bytes) -> median seconds on gloo, on memory, and of the CPUs by each."""
    gloo, memory = begin(None), dist.group.WORLD
    found = {}
    for name in options.calls:
        for size in SIZES:
            ways = [calls(size, group)[name] for group in (gloo, memory)]
            rounds = options.rounds if size <= 1 << 20 else options.rounds // 10
            taken = []
            for _ in range(rounds + 5):
                (a, b), (c, d) = timed(ways[0], memory), timed(ways[1], gloo)
                taken.append([a, c, b, d])
            sums = torch.tensor([row[2:] for row in taken], dtype=torch.float64)
            dist.all_reduce(sums)
            rows = [[*row[:2], *own] for row, own in zip(slowest(taken), sums.tolist(), strict=True)][5:]
            found[name, size] = [statistics.median(column) for column in zip(*rows, strict=True)]
    return found


def main() -> None:
    """Prints a line for each call and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--calls", nargs="+", default=["all_reduce", "all_gather", "reduce_scatter"])
    parser.add_argument("--rounds", type=int, default=300, help="of each size; a tenth above 1 MiB")
    options = parser.parse_args()
    for ranks in options.ranks:
        for (name, size), row in ts.distributed.launch(rank_main, ranks, (options,))[0].items():
            gloo, memory, cpu, own = (1e6 * seconds for seconds in row)
            text = f"gloo {gloo:9.0f} us, memory {memory:9.0f} us: {memory / gloo:.2f}"
            print(f"{ranks} ranks  {name:15} {size:>9} B  {text}; cpu {cpu:.0f} and {own:.0f} us", flush=True)


if __name__ == "__main__":
    main()
