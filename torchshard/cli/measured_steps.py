"""How far predicted training steps are from measured ones: models of PyTorch's own layers, on this process's group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchshard as ts
from torchshard.compiler.constraints import PlanLike
from torchshard.core.columns import columns
from torchshard.core.units import time_text
from torchshard.plans.machine import Machine

WARM_UP, ROUNDS = 2, 5
"""Steps of each model before those that are timed, and those; the median counts."""

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


def measured_steps(machine: Machine) -> Iterator[MeasuredStep]:
    """Trains some models under two plans each, the fastest one and one that splits nothing; all ranks must call it."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    for name, (build, shape) in MODELS.items():
        ways: dict[str, PlanLike] = {"split": "auto", "whole": {"*": "replicate"}}
        for how, plan in ways.items():
            torch.manual_seed(0)
            rows = shape[0] * (LARGER if device.type == "cuda" else 1)
            model, x = build().to(device), torch.randn(rows, *shape[1:], device=device)
            sharded = ts.shard(model, plan, (x,), objective={"machine": machine, "optimizer": "adamw-plain"})
            optimizer = torch.optim.AdamW(sharded.parameters())

            def step(sharded: nn.Module = sharded, x: Tensor = x, optimizer: torch.optim.Optimizer = optimizer) -> None:
                sharded(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            yield MeasuredStep(f"{name}, {how}", sum(sharded.plan.step_seconds.values()), _seconds(step, device))


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    """The median of a step's seconds on the slowest rank."""
    times = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[WARM_UP:], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


class _Layers(nn.Sequential):
    """Transformer layers of a width."""

    def __init__(self, width: int, count: int = 2) -> None:
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        super().__init__(*(layer for _ in range(count)))


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 16, 3, padding=1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "an MLP of width 256": (lambda: _mlp(256), (512, 256)),
    "an MLP of width 1024": (lambda: _mlp(1024), (512, 1024)),
    "transformer layers of width 256": (lambda: _Layers(256), (4, 128, 256)),
    "transformer layers of width 512": (lambda: _Layers(512), (4, 128, 512)),
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
    worst = max(abs(each.ratio - 1) for each in steps)
    return [
        machine.name,
        *columns(rows),
        "",
        *columns([("a training step of", "predicted", "measured", "ratio"), *compared]),
        f"predicted times differ from measured ones by {machine.error:.0%} on average, by {worst:.0%} at most",
    ]
