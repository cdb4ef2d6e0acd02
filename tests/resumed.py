"""Models that train, are saved, and resume elsewhere, for tests of checkpoints: a small one, and one of two layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.models import FusedBySplit


class Small(nn.Module):
    """Tied embeddings of 29 tokens, a fused qkv of 7 heads, uneven hidden units, dropout and a written buffer."""

    calls: Tensor

    def __init__(self, width: int = 28, heads: int = 7) -> None:
        super().__init__()
        self.tok = nn.Embedding(29, width)
        self.attn, self.norm = FusedBySplit(width, heads), nn.LayerNorm(width)
        self.up, self.down, self.drop = nn.Linear(width, 13), nn.Linear(13, width), nn.Dropout(0.2)
        self.head = nn.Linear(width, 29, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(13))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.tok(ids)
        x = x + self.attn(self.norm(x))
        hidden = self.up(x).relu()
        self.seen = 0.9 * self.seen + hidden.detach().mean((0, 1))
        logits = self.head(x + self.down(self.drop(hidden)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


STEPS = range(2)
"""The steps before a save."""
PLANS: Mapping[str, Any] = {
    "auto": "auto",
    "columns": {"attn.qkv": "column", "attn.o": "column", "up": "column", "down": "column", "tok": "vocab"},
    "some": {"up": "column", "down": "row", "attn.qkv": "column", "attn.o": "row", "tok": "replicate"},
}


def batch(step: int) -> Tensor:
    """The token ids of a step."""
    return torch.randint(0, 29, (2, 6), generator=torch.Generator().manual_seed(step))


def small(plan: str | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model, sharded by one of the plans, or unsharded."""
    torch.manual_seed(0)
    model = Small().to(dtype)
    return model if plan is None else ts.shard(model, PLANS[plan], (batch(0),))


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """AdamW with and without weight decay, in two groups.

    The eps is large because the gradient of a key's bias is rounding noise, which a small eps would scale up.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, eps=1e-3, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None) -> list[float]:
    """Trains for some steps; returns their losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, unsharded."""
    if isinstance(model, ts.ShardedModule):
        return model.full_state_dict()
    return copy.deepcopy(model.state_dict())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, 0.05, eps=1e-3, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.05, eps=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
}


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler of 20 steps."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


def run_of(plan: str | None, kind: str = "adamw", **init: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model with an optimizer and a scheduler; `init` is for init_process_group."""
    warnings.simplefilter("ignore")
    if plan:
        ts.distributed.init_process_group(**init)
    model = small(plan, torch.float64)
    optimizer = adamw(model) if kind == "adamw" else OPTIMIZERS[kind](model.parameters())
    return model, optimizer, one_cycle(optimizer)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same names and bit-equal values."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Holds(nn.Module):
    """Two linear layers, optionally tied, or of another size or dtype."""

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(width, width, dtype=dtype) for _ in "ab")
        if tied:
            self.b.weight = self.a.weight


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes a step with gradients of ones."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its defaults."""
    return torch.optim.AdamW(model.parameters())
