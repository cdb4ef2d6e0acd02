"""One run of a habit, unsharded or sharded, and the comparison of two runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from torchshard.testing import full_gradient, largest

Habit = Callable[["Run"], Any]


def into(table: dict[str, Habit]) -> Callable[[Habit], Habit]:
    """Decorates a habit: adds it to a table by its name."""

    def add(habit: Habit) -> Habit:
        table[habit.__name__.strip("_")] = habit
        return habit

    return add


class Net(nn.Module):
    """A block with one norm and nine hidden units, which split evenly over three ranks but not over two or four."""

    def __init__(self, results: int = 5, *, batch_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 9), nn.Dropout(dropout), nn.Linear(9, results)
        self.norm = nn.BatchNorm1d(9) if batch_norm else nn.LayerNorm(9)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(F.gelu(self.norm(self.up(x)))))
        return y


class Run:
    """One run of a habit: with unsharded models, or with sharded ones."""

    def __init__(self, rank: int, options: dict[str, Any] | None) -> None:
        """Creates a run on one rank.

        Args:
            options: arguments of `ts.shard`; None for the unsharded run.
        """
        self.rank, self.options = rank, options
        self.models: list[Any] = []

    @property
    def is_sharded(self) -> bool:
        """Whether the models are sharded."""
        return self.options is not None

    def make(self, build: Callable[[], nn.Module] = Net, plan: Any = None, seed: int = 0) -> Any:
        """Builds a float64 model; its state and gradients are compared after the run."""
        torch.manual_seed(seed)
        model: Any = build().double()
        torch.manual_seed(seed + 1)
        if self.options is not None:
            is_batch = self.options.get("mesh") == "shard"
            plan = {"up": "column", "down": "row"} if plan is None else plan
            model = ts.shard(model, {} if is_batch else plan, **self.options)
        self.models.append(model)
        return model


def difference(habit: Habit, rank: int, options: dict[str, Any]) -> float:
    """The largest difference of a result, gradient or state tensor from the unsharded run; NaN if shapes differ."""
    found: list[list[Tensor | None]] = []
    for run in (Run(rank, None), Run(rank, options)):
        torch.manual_seed(7)
        tensors = [t.detach() for t in torch.utils._pytree.tree_leaves(habit(run)) if isinstance(t, Tensor)]
        own: list[Tensor | None] = [*tensors]
        for model in run.models:
            own += (model.full_state_dict() if run.is_sharded else model.state_dict()).values()
            own += [full_gradient(p) if run.is_sharded else p.grad for p in model.parameters()]
        found.append(own)
    pairs = list(zip(*found, strict=True))
    if any((a is None) != (b is None) or (a is not None and b is not None and a.shape != b.shape) for a, b in pairs):
        return math.nan
    apart = [(a.double() - b.double()).abs().max() for a, b in pairs if a is not None and b is not None and a.numel()]
    return largest(0.0, *map(float, apart))


def x_of(seed: int = 0, rows: int = 12) -> Tensor:
    """Samples that are equal on every rank."""
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 0) -> None:
    """Trains for some steps."""
    for step in range(steps):
        optimizer.zero_grad()
        model(x_of(seed + step)).square().mean().backward()
        optimizer.step()


def sgd(model: Any, lr: float = 0.1, **settings: Any) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(model.parameters(), lr, **settings)
