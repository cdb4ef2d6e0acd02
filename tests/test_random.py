"""Random numbers equal the unsharded model's, for any memory order and any sharding."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchshard as ts
from tests.captured import checked
from tests.helpers import nightly
from torchshard.testing import CapturedCall, capture, changed_rule, run_ranks


class _Draws(nn.Module):
    """A model that draws random numbers after each of two linear layers."""

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
    """Draws for a contiguous value of a transposed one; a collective in between changes the memory order."""
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


@functools.cache
def _captured(body: Callable[[Tensor], Tensor]) -> CapturedCall:
    torch.manual_seed(0)
    return capture(_Draws(body), (torch.randn(3, 5, 6),), dtype=torch.float64)


@nightly(
    but=[
        "*'column'}-1",
        "*'row'}-1",
        "*'row'}-2",
        "_bernoulli-*-2",
        "_bernoulli-*-3",
        "_expanded-{'up': *",
        "_expanded-{}-2",
        "_in_place-*-2",
        "_in_place-{'up': 'column', 'down': 'row'}-3",
        "_lies_transposed-{'up': 'row', *",
        "_like-*-2",
        "_like-*-3",
        "_permuted_thrice-{'up': 'row', *",
        "_plain-*-2",
        "_plain-{'up': 'column', 'down': 'row'}-3",
        "_transposed-{'up': 'row', *",
    ]
)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("plan", [{}, {"up": "column", "down": "row"}, {"up": "row", "down": "column"}], ids=str)
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_draws_are_the_unsharded_models(
    body: Callable[[Tensor], Tensor], plan: dict[str, str], world: int, recwarn: pytest.WarningsRecorder
) -> None:
    report = checked(_captured(body), plan, world)
    assert report.ok, str(report)


class _Image(nn.Module):
    """A model in channels-last memory from convolution to dropout."""

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
    report = ts.check(_Converts(), plan, example_inputs=(torch.randn(2, 3, 5, 5),), mesh=2)
    assert report.ok, str(report)


@pytest.mark.nightly
def test_dropout_of_channels_last_tensors() -> None:
    torch.manual_seed(0)
    model = _Image().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    for plan in ({}, {"conv": "column"}, {"conv": "row"}):
        report = ts.check(model, plan, example_inputs=(x,), mesh=2)
        assert report.ok, str(report)


def test_a_rule_may_give_up_equality() -> None:
    """With this rule, each rank draws only for its slice, and the check fails."""
    torch.manual_seed(0)
    plan = {"up": "column", "down": "row"}
    with changed_rule(torch.ops.aten.dropout.default, lambda call: call.row("... -> ...")):
        report = ts.check(_Draws(_plain), plan, (torch.randn(3, 5, 6),), mesh=2)
    assert not report.ok


class _Elementwise(nn.Module):
    """An elementwise model, so equal draws give equal bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(35.0, dtype=torch.float64).view(7, 5) / 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(x * self.weight, 0.4) + torch.rand_like(x) * self.weight
        return F.dropout(h.mT, 0.3).mT * torch.randn(7, 5, dtype=x.dtype) + torch.bernoulli(torch.full_like(h, 0.5))


def _step(model: nn.Module, x: Tensor, recomputed: bool = False) -> Tensor:
    """Makes a step of SGD, perhaps with the forward recomputed in the backward; returns the result."""
    made: Tensor = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
    model.zero_grad()
    made.square().sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad  # type: ignore[operator]
    return made.detach()


def _on_real_ranks(rank: int, world: int) -> dict[str, bool]:
    ts.distributed.init_process_group()
    x, found = torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5), {}
    for dim in (0, 1):
        call, objective = capture(_Elementwise(), (x,), dynamic=False), {"split": "all", "machine": "cpu-gloo"}
        plan = call.plan({}, world, objective, layouts={"weight": ts.S(dim)}).plan
        for recomputed in (False, True):
            model, sharded = _Elementwise(), ts.shard(_Elementwise(), plan, example_inputs=(x,))
            torch.manual_seed(5)
            expected = [_step(model, x) for _ in range(3)]
            stream = torch.get_rng_state()
            torch.manual_seed(5)
            got = [_step(sharded, x, recomputed) for _ in range(2)]
            kept, at = copy.deepcopy(sharded.state_dict()), torch.get_rng_state()
            torch.rand(9)
            restarted = ts.shard(_Elementwise(), plan, example_inputs=(x,))
            restarted.load_state_dict(kept)
            torch.set_rng_state(at)
            got.append(_step(restarted, x, recomputed))
            key = f"split dim {dim}, recomputed {recomputed}"
            found[f"{key}: values"] = all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
            found[f"{key}: stream"] = torch.equal(stream, torch.get_rng_state())
            found[f"{key}: weight"] = torch.equal(model.weight, restarted.full_state_dict()["weight"])
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bit_for_bit_in_forward_recomputation_and_after_a_restart(world: int) -> None:
    for found in run_ranks(_on_real_ranks, world, world):
        assert len(found) == 12
        assert all(found.values()), found
