"""A hook on a result that another result depends on receives the full gradient, or raises."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import refused_input
from torchshard.testing import gradient_error, run_ranks

TOLD = "has a hook or retain_grad(), and another result depends on it"
Watch = Callable[[Tensor], object]
HOOKS: dict[str, Watch] = {
    "a hook": lambda h: h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1)),
    "retain_grad": lambda h: h.retain_grad(),
}


class _Net(nn.Module):
    """A model that also returns its hidden values, like hidden states or logits next to a loss."""

    def __init__(self, watch: Watch = id) -> None:
        super().__init__()
        self.up, self.down, self.watch = nn.Linear(6, 8), nn.Linear(8, 5), watch

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x).tanh()
        self.watch(hidden)
        return self.down(hidden), hidden


def _step(model: Any, x: Tensor, watch: Watch = id) -> Any:
    model.zero_grad()
    y, hidden = model(x)
    watch(hidden)
    (y.square().mean() + hidden.mean()).backward()
    return model


SPLITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "slices": ({"up": "column", "down": "row"}, {}),
    "the batch": ({}, {"mesh": "replicate"}),
    "a whole batch": ({}, {"mesh": "shard", "inputs": "global"}),
}


def _hooked(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, (plan, how) in SPLITS.items():
        own = x.chunk(2)[rank] if name == "the batch" else x
        for inside in (id, HOOKS["a hook"]):
            torch.manual_seed(0)
            model = _Net(inside).double()
            sharded = ts.shard(copy.deepcopy(model), plan, (own,), **how)
            for step in range(3):
                if inside is id or name == "slices":
                    found[f"{name}, {inside is id}, {step}"] = gradient_error(_step(sharded, own), _step(model, x))
            if inside is id:
                told = [refused_input(functools.partial(_step, sharded, own, hook), TOLD) for hook in HOOKS.values()]
                found[f"{name} is told"] = 0.0 if all(told) else 1.0
        ts.distributed.destroy_process_group()
    whole = ts.shard(_Net().double(), {"down": "column"}, (x,))
    found["of a whole value"] = 0.0 if _step(whole, x, HOOKS["a hook"]) is whole else 1.0
    return found


def test_hooks_on_results() -> None:
    for found in run_ranks(_hooked, 2):
        assert max(found.values()) < 1e-10, found
