"""How far predicted training steps are from measured ones: models of PyTorch's own layers, on this process's group."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchshard as ts
from torchshard.compiler.constraints import PlanLike
from torchshard.core.columns import columns
from torchshard.core.mesh import MODEL
from torchshard.core.units import time_text
from torchshard.distributed.group import lookup
from torchshard.plans.machine import Machine
from torchshard.runtime.measure import device_of, seconds_of, slowest_of

WARM_UP, ROUNDS = 2, 5
"""Steps of each model before those that are timed, and those; the median counts."""
OPTIMIZER = "adamw-plain"
"""The optimizer of these steps: `torch.optim.AdamW` on the parameters themselves."""
LARGER = 16
"""How many times as many rows a GPU gets: it would finish a CPU's work before the next kernel starts."""


@dataclass(frozen=True)
class MeasuredStep:
    """A training step: its forward, its backward, and AdamW's update."""

    name: str
    predicted: float
    """Seconds."""
    measured: float
    """Seconds, on the slowest rank."""

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one."""
        return self.predicted / self.measured

    @property
    def error(self) -> float:
        """|ratio - 1|."""
        return abs(self.ratio - 1)


def measured_steps(machine: Machine) -> Iterator[MeasuredStep]:
    """Trains some models under two plans each, the fastest one and one that splits nothing; all ranks must call it."""
    device = device_of(lookup(MODEL))
    ways: dict[str, PlanLike] = {"split": "auto", "whole": {"*": "replicate"}}
    for name, (build, (rows, *sizes)) in MODELS.items():
        for how, plan in ways.items():
            torch.manual_seed(0)
            rows_here = rows * LARGER if device.type == "cuda" else rows
            model, x = build().to(device), torch.randn(rows_here, *sizes, device=device)
            sharded = ts.shard(model, plan, (x,), objective={"machine": machine, "optimizer": OPTIMIZER})
            yield measured_step(f"{name}, {how}", sharded, partial(_loss, sharded, x))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, model(x).square().mean())


def measured_step(name: str, sharded: ts.ShardedModule, loss: Callable[[], Tensor]) -> MeasuredStep:
    """Trains a model by AdamW for some steps; all ranks must call it.

    Args:
        sharded: a model whose plan counts `OPTIMIZER`.
        loss: calls the model.
    """
    group = lookup(MODEL)
    device, optimizer = device_of(group), torch.optim.AdamW(sharded.parameters())

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    times = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        times.append(seconds_of(device, step))
    measured = statistics.median(slowest_of(group, torch.tensor(times[WARM_UP:], device=device)))
    return MeasuredStep(name, sum(sharded.plan.step_seconds.values()), measured)


def _layers(width: int, count: int = 2) -> nn.Module:
    layer = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*(layer(width, width // 64, 4 * width) for _ in range(count)))


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 16, 3, padding=1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "an MLP of width 256": (lambda: _mlp(256), (512, 256)),
    "an MLP of width 1024": (lambda: _mlp(1024), (512, 1024)),
    "transformer layers of width 256": (lambda: _layers(256), (4, 128, 256)),
    "transformer layers of width 512": (lambda: _layers(512), (4, 128, 512)),
    "convolutions of 64 channels": (_convolutions, (8, 16, 32, 32)),
}
"""Name -> (a function that builds the model, the shape of its input)."""


def told(machine: Machine, steps: list[MeasuredStep]) -> list[str]:
    """The machine's numbers, and the steps that it was compared with, in lines."""
    units = {
        "flops": "operations/s",
        "bandwidth": "bytes/s",
        "error": "mean |predicted / measured - 1| of the steps below",
    }
    numbers = {name: value for name, value in machine.fields.items() if isinstance(value, float)}
    rows = [(name, f"{value:.3g}", units.get(name.rpartition("_")[2], "s")) for name, value in numbers.items() if value]
    rows += [
        (f"{each.kernel} of {each.ranks} ranks", f"{each.latency:.3g}", f"s, then {each.bandwidth:.3g} bytes/s")
        for each in machine.transfers
    ]
    compared = [(each.name, time_text(each.predicted), time_text(each.measured), f"{each.ratio:.2f}") for each in steps]
    return [
        machine.name,
        *columns(rows),
        "",
        *columns([("a training step of", "predicted", "measured", "ratio"), *compared]),
        f"predicted times differ from measured ones by {machine.error:.0%} on average, by "
        f"{max(each.error for each in steps):.0%} at most",
    ]
