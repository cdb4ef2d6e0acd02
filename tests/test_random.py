"""Random numbers are the unsharded model's, whichever way values lie in memory and over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts


class _Draws(nn.Module):
    """A split value, random numbers, and a row-parallel layer behind."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(6, 8), nn.Linear(8, 6, bias=False), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.down(self.body(self.up(x))))


def _plain(h: Tensor) -> Tensor:
    return F.dropout(h, 0.5)


def _transposed(h: Tensor) -> Tensor:
    return F.dropout(h.transpose(1, 2), 0.5).transpose(1, 2)


def _lies_transposed(h: Tensor) -> Tensor:
    """Contiguous, and computed from what is not: a collective between the two changes the order in memory."""
    return F.dropout((h.transpose(0, 1) * 2).transpose(0, 1), 0.5)


def _permuted_thrice(h: Tensor) -> Tensor:
    return F.dropout(h.permute(2, 0, 1) * 2, 0.3).permute(1, 2, 0)


def _like(h: Tensor) -> Tensor:
    return h * torch.rand_like(h.transpose(0, 2)).transpose(0, 2) + torch.randn_like(h)


def _bernoulli(h: Tensor) -> Tensor:
    return h * torch.bernoulli(torch.sigmoid(h.detach()).mT).mT


def _expanded(h: Tensor) -> Tensor:
    return h + F.dropout(h[:, :1].expand(-1, 5, -1), 0.5)


def _contiguous_like(h: Tensor) -> Tensor:
    drawn = torch.rand_like(h.transpose(0, 1), memory_format=torch.contiguous_format)
    return h * drawn.transpose(0, 1)


def _in_place(h: Tensor) -> Tensor:
    return F.dropout(h * 1, 0.5, inplace=True)


BODIES = [
    _contiguous_like,
    _in_place,
    _plain,
    _transposed,
    _lies_transposed,
    _permuted_thrice,
    _like,
    _bernoulli,
    _expanded,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("plan", [{}, {"up": "column", "down": "row"}, {"up": "row", "down": "column"}], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_draws_are_the_unsharded_models(
    body: Callable[[Tensor], Tensor], plan: dict[str, str], world: int, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    report = ts.check(_Draws(body), plan, world_size=world, example_inputs=(torch.randn(3, 5, 6),))
    assert report.ok, str(report)


class _Image(nn.Module):
    """Channels last in memory, from convolution to dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 6, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.conv(x).relu())


class _Converts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.conv(x).to(memory_format=torch.channels_last), 0.5)


@pytest.mark.parametrize("plan", [{}, {"conv": "column"}, {"conv": "row"}], ids=str)
def test_dropout_behind_a_change_of_memory_format(plan: dict[str, str]) -> None:
    torch.manual_seed(0)
    report = ts.check(_Converts(), plan, world_size=2, example_inputs=(torch.randn(2, 3, 5, 5),))
    assert report.ok, str(report)


def test_dropout_of_what_lies_channels_last() -> None:
    torch.manual_seed(0)
    model = _Image().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    for plan in ({}, {"conv": "column"}, {"conv": "row"}):
        report = ts.check(model, plan, world_size=2, example_inputs=(x,))
        assert report.ok, str(report)
