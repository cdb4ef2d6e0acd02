"""Buffers that ops write to: statistics, overwritten values, the caller's inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.test_functionalize import _Program
from torchshard.testing import gradient_error


class _RunningMean(nn.Module):
    """A model with a buffer that is read split, then written."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("run", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = h - self.run
        with torch.no_grad():
            self.run.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.down(y)


def test_a_split_buffer_is_updated_in_place() -> None:
    plan = {"up": "column", "down": "row"}
    made = ts.plan(_RunningMean(), plan, example_inputs=(torch.randn(3, 6),), mesh=2)
    assert made.parameters["run"] == ts.S(0)
    report = ts.check(_RunningMean(), plan, example_inputs=(torch.randn(3, 6),), mesh=3)
    assert report.ok, str(report)


def _write_through_expand(h: Tensor) -> Tensor:
    row = h[0] * 1
    row.expand(2, 8)[0].add_(1.0)
    return h + row


def _another_shape(h: Tensor) -> Tensor:
    y = torch.empty(0)
    with torch.no_grad():
        torch.exp(h, out=y)
    return h + y


REFUSED = [_write_through_expand, _another_shape]


@pytest.mark.parametrize("body", REFUSED, ids=lambda f: f.__name__)
def test_refused_writes(body: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ts.CaptureError, match="in-place op") as caught:
        ts.check(_Program(body), {"up": "column"}, example_inputs=(torch.randn(3, 6),), mesh=2)
    assert "test_functionalize.py" in str(caught.value)


EMPTY_GRADIENTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "zero_": lambda m, x: m.up(x).clone().zero_(),
    "fill_": lambda m, x: m.up(x).clone().fill_(2.0),
    "copy_": lambda m, x: m.up(x).clone().copy_(torch.ones(3, 8)),
    "matrix_power": lambda m, x: torch.matrix_power(m.up.weight @ m.up.weight.t(), 0),
    "normal_": lambda m, x: m.up(x).clone().normal_(),
}


class _Overwrites(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.body = nn.Linear(6, 8), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


@pytest.mark.parametrize("body", EMPTY_GRADIENTS)
def test_what_is_overwritten_still_needs_a_gradient(body: str) -> None:
    torch.manual_seed(0)
    model, x = _Overwrites(EMPTY_GRADIENTS[body]), torch.randn(3, 6)
    sharded = ts.shard(model, {"up": "column"}, example_inputs=(x,))
    for m in (model, sharded):
        torch.manual_seed(1)
        y = m(x)
        assert y.requires_grad
        y.sum().backward()
        assert all(p.grad is None or not p.grad.any() for p in m.parameters())
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in sharded.parameters()]
    ts.distributed.destroy_process_group()


def test_a_write_to_an_input_is_the_callers() -> None:
    class WritesInput(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1.0) * 2

    x = torch.randn(3, 6)
    expected = x + 1
    assert torch.equal(ts.shard(WritesInput(), {})(x), expected * 2) and torch.equal(x, expected)
    ts.distributed.destroy_process_group()


class _Unused(nn.Module):
    """A norm with an unused result, as in an encoder with a last stage that the decoder doesn't use."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), norm, nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.norm(h.unsqueeze(-1) * torch.ones(3, dtype=h.dtype))
        return self.down(h)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)], ids=["b", "i"])
def test_a_norm_whose_result_nobody_takes_updates_its_statistics(norm: nn.Module, world_size: int) -> None:
    report = ts.check(_Unused(norm), "auto", example_inputs=(torch.randn(5, 6),), mesh=world_size)
    assert "norm.running_mean" in {c.name for c in report.comparisons if c.kind == "buffer"}
    report.raise_on_error()


class _Normed(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.body = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6), body

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self.norm, self.up(x)))


def _read_behind(norm: Any, h: Tensor) -> Tensor:
    return norm(h) + h * norm.running_var


def _read_between(norm: Any, h: Tensor) -> Tensor:
    y = norm(h) * norm.running_mean.view(1, -1)
    return y + norm(h.exp()) + h * norm.running_var


def _frozen_behind(norm: Any, h: Tensor) -> Tensor:
    """Normalizes the second half with frozen statistics, as methods for unlabelled samples do."""
    labelled, other = h.chunk(2)
    y = norm.train()(labelled)
    return torch.cat([y, norm.eval()(other)])


def _frozen_before(norm: Any, h: Tensor) -> Tensor:
    y = norm.eval()(h)
    return y + norm.train()(h)


@pytest.mark.parametrize(
    "body", [_read_behind, _read_between, _frozen_behind, _frozen_before], ids=lambda f: f.__name__
)
def test_the_gradient_of_what_reads_statistics_that_a_norm_writes(body: Callable[[Any, Tensor], Tensor]) -> None:
    """Compares the first call, and the second, which has a backward graph, with the unsharded model."""
    torch.manual_seed(0)
    model = _Normed(body).double()
    sharded = ts.shard(copy.deepcopy(model), {})
    for seed in range(2):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        for each in (model, sharded):
            each(x).square().sum().backward()
        assert gradient_error(sharded, model) < 1e-10
    assert ts.check(model, {"up": "column", "down": "row"}, example_inputs=(x,), mesh=2).ok


@torch.library.custom_op("torchshard_tests::statistics", mutates_args=("mean", "spread"))
def _statistics(x: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    spread.mul_(0.9).add_(x.var(0), alpha=0.1)
    return mean / spread


@_statistics.register_fake
def _(x: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    return torch.empty_like(mean)


class _Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("spread", torch.ones(8))
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h - _statistics(h.detach(), self.mean, self.spread) * self.mean)


def test_an_op_of_ones_own_writes_to_a_buffer_and_a_parameter() -> None:
    report = ts.check(_Normalized(), {"up": "column"}, example_inputs=(torch.randn(3, 6),), mesh=2)
    report.raise_on_error()
    assert {"mean", "spread"} <= {c.name for c in report.comparisons if c.kind == "buffer"}


@pytest.mark.nightly
def test_fake_quantization_while_training() -> None:
    quantization = torch.ao.quantization
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).train()
    model.qconfig = quantization.get_default_qat_qconfig("qnnpack")  # type: ignore[assignment]
    quantization.prepare_qat(model, inplace=True)
    ts.check(model, "auto", example_inputs=(torch.randn(3, 6),), mesh=2, dtype=None).raise_on_error()
