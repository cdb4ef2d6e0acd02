"""Microseconds of a collective of torch.distributed on gloo and on torchshard's backend "memory", by size.

Both groups have the same ranks in the same processes, and are timed in turn, round by round; the slowest rank counts. A
round is several calls one after the other, behind one that is not timed, from which the ranks start together. `cpu` is
the processor time of all ranks together. Figures are medians, per call.

    python benchmarks/through_memory.py --ranks 2 4
    python benchmarks/through_memory.py --ranks 2 --calls all_reduce --rounds 100
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


def timed(run: Callable[[], object], times: int) -> tuple[float, float]:
    """Seconds of a call by the clock, and of this process's CPU."""
    run()
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times, (time.process_time() - busy) / times


def rank_main(options: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """(call, bytes) -> median seconds on gloo, on memory, and of the CPUs by each."""
    gloo, memory = begin(None), dist.group.WORLD
    found = {}
    for name in options.calls:
        for size in SIZES:
            ways = [calls(size, group)[name] for group in (gloo, memory)]
            times, taken = 20 if size <= 1 << 18 else 4, []
            for _ in range(options.rounds + 2):
                (a, b), (c, d) = (timed(way, times) for way in ways)
                taken.append([a, c, b, d])
            sums = torch.tensor([row[2:] for row in taken], dtype=torch.float64)
            dist.all_reduce(sums)
            rows = [[*row[:2], *own] for row, own in zip(slowest(taken), sums.tolist(), strict=True)][2:]
            found[name, size] = [statistics.median(column) for column in zip(*rows, strict=True)]
    return found


def main() -> None:
    """Prints a line for each call and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--calls", nargs="+", default=["all_reduce", "all_gather", "reduce_scatter"])
    parser.add_argument("--rounds", type=int, default=30, help="of each size")
    options = parser.parse_args()
    for ranks in options.ranks:
        for (name, size), row in ts.distributed.launch(rank_main, ranks, (options,))[0].items():
            gloo, memory, cpu, own = (1e6 * seconds for seconds in row)
            text = f"gloo {gloo:9.0f} us, memory {memory:9.0f} us: {memory / gloo:.2f}"
            print(f"{ranks} ranks  {name:15} {size:>9} B  {text}; cpu {cpu:.0f} and {own:.0f} us", flush=True)


if __name__ == "__main__":
    main()
