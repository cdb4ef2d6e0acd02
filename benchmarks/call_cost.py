"""What a call of torchshard.distributed costs over the call of torch.distributed that it makes, on two gloo ranks.

Each pair does the same with the same tensors, in turn, so that a noisy machine disturbs both alike. A figure is the
median over all rounds of a call's time, slower rank, less that of the raw call: once of the calling thread's processor
time, which is what the call itself costs, and once by the clock, which has in it how the machine puts threads to sleep
and wakes them. Three modes: `off` compares nothing, `default` compares each call over gloo, `debug` also the lines that
call.

Then a training step of the model of step_time.py, with an optimizer's: with the default checks, and without, of the
process's processor time and by the clock.

    python benchmarks/call_cost.py --rounds 2000 --json call_cost.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_time import BATCH, BLOCKS, PLAN, SEQUENCE, Block, slowest, step, timed
from torch import Tensor

import torchshard as ts
import torchshard.distributed as tsd

RANKS, WIDTHS = 2, (128, 512)
MODES = {"off": False, "default": None, "debug": True}
Call = Callable[[Tensor], Any]


def _gathered(x: Tensor) -> Tensor:
    got = x.new_empty(RANKS * x.shape[0], *x.shape[1:])
    dist.all_gather_single(got, x)
    return got


def _reduce_scattered(x: Tensor) -> Tensor:
    got = x.new_empty(x.shape[0] // RANKS, *x.shape[1:])
    dist.reduce_scatter_single(got, x)
    return got


def _to_all(x: Tensor) -> Tensor:
    got = torch.empty_like(x)
    dist.all_to_all_single(got, x)
    return got


def _summed(x: Tensor) -> Tensor:
    got = x.clone()
    dist.all_reduce(got)
    return got


def _from_0(x: Tensor) -> Tensor:
    got = x.clone()
    dist.broadcast(got, 0)
    return got


PAIRS: dict[str, tuple[Call, Call]] = {
    "reduce, in place": (dist.all_reduce, tsd.reduce),
    "all_reduce": (_summed, tsd.all_reduce),
    "all_gather(size=)": (_gathered, lambda x: tsd.all_gather(x, 0, size=RANKS * len(x))),
    "reduce_scatter": (_reduce_scattered, lambda x: tsd.reduce_scatter(x, 0)),
    "broadcast": (_from_0, tsd.broadcast),
    "copy": (torch.clone, tsd.copy),
    "scatter": (lambda x: x.chunk(RANKS)[0].clone(), lambda x: tsd.scatter(x, 0)),
}
"""What -> (the raw call, ours): the same communication, and the same copies."""


def _cost(raw: Call, ours: Call, rounds: int) -> list[float]:
    """Median seconds of the raw call and of ours, processor and clock, in turn and each first in every other round."""
    x = torch.zeros(8, 8)
    seconds: list[list[float]] = []
    for i in range(rounds):
        row = [0.0] * 4
        for which in (0, 1) if i % 2 else (1, 0):
            start, busy = time.perf_counter(), time.thread_time()
            (raw, ours)[which](x)
            row[which], row[2 + which] = time.thread_time() - busy, time.perf_counter() - start
        seconds.append(row)
    return [statistics.median(column) for column in zip(*slowest(seconds), strict=True)]


def _trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> None:
    step(model, x, target)
    optimizer.step()


def _steps(width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a step by each clock: the median without checks, and the quartiles of what the default ones add."""
    torch.manual_seed(0)
    x, target = torch.randn(BATCH, SEQUENCE, width), torch.randn(BATCH, SEQUENCE, width)
    model = ts.shard(torch.nn.Sequential(*(Block(width) for _ in range(BLOCKS))), PLAN, (x,))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seconds: list[list[float]] = []
    for i in range(rounds):
        row = [0.0] * 4
        for which in (0, 1) if i % 2 else (1, 0):
            tsd.debug((False, None)[which])
            busy = time.process_time()
            row[2 + which] = timed(partial(_trained, model, optimizer, x, target), model)
            row[which] = time.process_time() - busy
        seconds.append(row)
    held = slowest(seconds)
    return {clock: _added([(row[at], row[at + 1]) for row in held]) for clock, at in (("processor", 0), ("clock", 2))}


def _added(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Of pairs (without checks, with the default ones)."""
    low, middle, high = statistics.quantiles([default - off for off, default in pairs], n=4)
    return {"off": statistics.median(off for off, _ in pairs), "low": low, "more": middle, "high": high}


def main_of_a_rank(rounds: int, step_rounds: int) -> dict[str, Any]:
    tsd.init_process_group()
    calls: dict[str, dict[str, list[float]]] = {}
    for name, (raw, ours) in PAIRS.items():
        for mode, on in MODES.items():
            tsd.debug(on)
            _cost(raw, ours, 50)
            calls.setdefault(name, {})[mode] = _cost(raw, ours, rounds)
    return {"calls": calls, "steps": {width: _steps(width, step_rounds) for width in WIDTHS}}


def show(found: dict[str, Any]) -> None:
    heads = "".join(f"{f'{mode}, {clock}':>17}" for clock in ("processor", "clock") for mode in MODES)
    print(f"{'microseconds more':18} {'raw':>7}{heads}")
    for name, modes in found["calls"].items():
        more = [(1e6 * (row[1] - row[0]), 1e6 * (row[3] - row[2])) for row in modes.values()]
        print(f"{name:18} {1e6 * modes['off'][2]:7.1f}" + "".join(f"{m[i]:17.1f}" for i in (0, 1) for m in more))
    for width, clocks in found["steps"].items():
        for clock, held in clocks.items():
            off, low, more, high = (1e3 * held[key] for key in ("off", "low", "more", "high"))
            print(f"step of {BLOCKS} blocks of width {width}, {clock}: {off:.2f} ms; the default checks {more:+.3f} ms")
            print(f"    {more / off:+.2%}, quartiles {low / off:+.2%} to {high / off:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="calls of each pair in each mode")
    parser.add_argument("--step-rounds", type=int, default=150, help="steps without and with the checks")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    found = tsd.launch(main_of_a_rank, RANKS, (given.rounds, given.step_rounds))[0]
    show(found)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
