"""What PyTorch has and people write every day is split with no plan: exact, and nearly all bytes in slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import torchshard as ts
from torchshard.layouts import I

X, IMAGES, IDS = torch.randn(6, 8).double(), torch.randn(2, 8, 12).double(), torch.randint(0, 50, (4, 5))


def _split(model: nn.Module, plan: ts.Plan) -> float:
    """The part of the parameters' bytes that lies in slices."""
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    return sum(n for name, n in sizes.items() if plan.parameters.get(name, I) != I) / sum(sizes.values())


def _exact_and_split(model: nn.Module, *args: Any, least: float = 0.9) -> None:
    torch.manual_seed(0)
    for world in (2, 3):
        report = ts.check(model.double(), "auto", world_size=world, example_inputs=args)
        assert report.ok, str(report)
    assert _split(model, ts.plan(model, "auto", world_size=2, example_inputs=args)) >= least


# --- weights that are computed ---------------------------------------------------------------------------------------


def _layers(normed: Callable[[nn.Module], nn.Module], make: Callable[[int, int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(normed(make(8, 12)), nn.ReLU(), normed(make(12, 8)))


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm(dim: int | None) -> None:
    _exact_and_split(_layers(lambda m: weight_norm(m, dim=dim), nn.Linear), X)


def test_weight_norm_of_convolutions_and_the_older_one() -> None:
    _exact_and_split(_layers(weight_norm, lambda a, b: nn.Conv1d(a, b, 3)), IMAGES)
    with pytest.warns(FutureWarning):
        older = _layers(nn.utils.weight_norm, nn.Linear)
    _exact_and_split(older, X)


# --- bags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(mode: str) -> None:
    _exact_and_split(nn.EmbeddingBag(50, 12, mode=mode), IDS)
    _exact_and_split(nn.EmbeddingBag(50, 12, mode=mode, padding_idx=3), IDS.flatten(), torch.tensor([0, 2, 5]))


# --- what is drawn, and losses ---------------------------------------------------------------------------------------


class _Mlp(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(8, 16), nn.Linear(16, 8), forward

    def forward(self, *args: Tensor) -> Any:
        return self.body(self.down(F.relu(self.up(args[0]))), *args)


def _drop_path(h: Tensor, x: Tensor) -> Tensor:
    """Stochastic depth as timm writes it."""
    return x + h * x.new_empty((x.shape[0], 1)).bernoulli_(0.8).div_(0.8)


LOSSES: dict[str, Callable[..., Any]] = {
    "bernoulli_": _drop_path,
    "bce with logits": lambda h, x, y: F.binary_cross_entropy_with_logits(h, y),
    "bce of positives": lambda h, x, y: F.binary_cross_entropy_with_logits(h, y, y, pos_weight=y[0]),
    "bce": lambda h, x, y: F.binary_cross_entropy(h.sigmoid(), y),
    "mse": lambda h, x, y: F.mse_loss(h, y),
    "norms": lambda h, x: (F.normalize(h, dim=-1), h.norm(), torch.linalg.vector_norm(h, 1, dim=0), h.mean()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_drawn_and_losses(name: str) -> None:
    args = [X] if name in ("bernoulli_", "norms") else [X, X.sigmoid()]
    _exact_and_split(_Mlp(LOSSES[name]), *args)


class _Loss(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.loss = nn.Linear(8, 512), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.up(x), y)


@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy_with_logits, lambda h, y: (h - y).square().mean()])
def test_a_mean_over_a_batch_of_any_size_is_taken_where_the_values_lie(loss: Callable[..., Tensor]) -> None:
    example = (torch.randn(256, 8), torch.rand(256, 512))
    made = ts.plan(_Loss(loss), {"up": "column"}, world_size=2, example_inputs=example)
    assert {c.name for c in made.costs.collectives} == {"reduce", "scatter"}
