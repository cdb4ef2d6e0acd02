"""In-place ops and views: the functionalized graph computes what the model computes, or the model is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import gradient_error


class _Program(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(6, 8), nn.Linear(8, 6), body

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self.up(x)))


def _view_then_write(h: Tensor) -> Tensor:
    y = h.view(-1, 2, 4)
    y.mul_(3.0)
    return h + 1


def _write_then_old_view(h: Tensor) -> Tensor:
    y = h[:, 2:5]
    h.add_(1.0)
    return h * y.sum(-1, keepdim=True)


def _view_of_view(h: Tensor) -> Tensor:
    h.t()[1:3].select(0, 1).copy_(torch.ones(h.shape[0], dtype=h.dtype))
    return h.mul_(2).relu_()


def _transposed(h: Tensor) -> Tensor:
    h.transpose(0, 1).unsqueeze(0)[..., 0].zero_()
    return h.exp()


def _fill_and_mask(h: Tensor) -> Tensor:
    y = h.clone()
    y[0].fill_(0.5)
    return y.masked_fill_(y > 1, 0.0) + h


def _chain(h: Tensor) -> Tensor:
    h = h * 1
    a = h.view(-1, 4, 2)
    b = a.permute(1, 0, 2)
    b += 1
    a[:, 0] *= 2
    return h.flatten().sub_(1).view_as(h) + b.sum()


def _out_argument(h: Tensor) -> Tensor:
    y = torch.empty_like(h)
    with torch.no_grad():
        torch.div(h, 2.0, out=y)
        torch.mul(h[:, :4], y[:, 4:], out=y[:, 2:6])
    return h + y


def _other_views(h: Tensor) -> Tensor:
    h = h * 1
    h.narrow(1, 2, 3).mul_(2.0)
    h.narrow(1, -3, 3).neg_()
    h.mT[0].add_(1.0)
    h.movedim(0, 1)[1].sub_(0.5)
    h.swapaxes(0, 1).diagonal().add_(3.0)
    h.view_as(h.exp())[:, 1].zero_()
    return h


def _constants(h: Tensor) -> Tensor:
    scale, order = torch.tensor([1.0, 2.0], dtype=h.dtype), torch.tensor([1, 0])
    scale.add_(1.0)
    return h * scale.sum() + h[:, order].sum(-1, keepdim=True)


def _write_to_a_piece(h: Tensor) -> Tensor:
    with torch.no_grad():
        first, _ = (h * 1).chunk(2, dim=-1)
        first.add_(1.0)
    return h


def _write_to_a_piece_of_what_is_used(h: Tensor) -> Tensor:
    with torch.no_grad():
        y = h * 1
        first, _ = y.chunk(2, dim=-1)
        first.add_(1.0)
    return h + y


def _uneven_pieces(h: Tensor) -> Tensor:
    y = h.detach() * 1
    first, second, third = torch.split(y, [1, 3, 4], dim=-1)
    second += first
    third.mul_(2.0)
    return h * y + second.sum()


def _two_results(h: Tensor) -> Tensor:
    values, indices = torch.empty(3, 2, dtype=h.dtype), torch.empty(3, 2, dtype=torch.long)
    with torch.no_grad():
        written = torch.topk(h, 2, out=(values, indices))
        values.mul_(2)
    return h + values.sum() + written[0].sum() + h.gather(1, indices).sum()


def _after_a_loss(h: Tensor) -> Tensor:
    """A loss takes its operands broadcast to each other: views of both."""
    y = h.detach() * 1
    loss = torch.nn.functional.mse_loss(y, h.detach()[:1]) + torch.nn.functional.l1_loss(y[:1], y + 1)
    y[:, :2].mul_(0.5)
    return h * y + loss


def _unrecorded(write: Callable[[Tensor], Any], name: str) -> Callable[[Tensor], Tensor]:
    """A write that autograd does not see: later values are new, gradients pass as if it had not been."""

    def body(h: Tensor) -> Tensor:
        before = h * 2
        with torch.no_grad():
            write(h)
        return h * before + h.view(-1, 4).sum()

    body.__name__ = name
    return body


def _through_detach(h: Tensor) -> Tensor:
    h.detach()[:, 1:].mul_(0.5)
    return h * h


def _through_data(h: Tensor) -> Tensor:
    h.data.clamp_(-0.5, 0.5)
    h.data[:, 0] = 0.25
    return h + h.sum()


def _straight_through_by_data(h: Tensor) -> Tensor:
    y = h * 2
    y.data = torch.sign(y.data)
    return y * h


def _overwritten(h: Tensor) -> Tensor:
    y = h.clone().zero_() + h.clone().fill_(2.0) + h.clone().copy_(h.detach() * 3)
    return y + h.clone().normal_() + h.clone().uniform_() + h.clone().bernoulli_(0.5)


def _parts_of_spectrum(h: Tensor) -> Tensor:
    """As a Fourier neural operator written by hand has it."""
    z = torch.fft.rfft(h)
    kept = torch.zeros_like(z)
    kept[..., :3] = z[..., 1:4].conj() * (1 + 2j)
    kept.t()[-1] += z[:, 0]
    kept[:, 3].copy_(h[:, 0])
    kept[:, torch.tensor([2, 0])] = kept[:, torch.tensor([0, 1])]
    return torch.fft.irfft(kept, n=h.shape[-1])


def _real_numbers_of_complex_ones(h: Tensor) -> Tensor:
    z = torch.fft.rfft(h) * 1
    z.real.mul_(2)
    z.imag = z.real[:, :1].clone()
    torch.view_as_real(z)[..., 1].add_(h[:, :1])
    z.conj()[:, 1:3].mul_(1j)
    return torch.fft.irfft(z, n=h.shape[-1])


def _complex_numbers_of_real_ones(h: Tensor) -> Tensor:
    pairs = h.reshape(-1, 4, 2) * 1
    torch.view_as_complex(pairs)[:, 1:3] *= 1j
    return pairs.flatten(1)


def _sparse_values(h: Tensor) -> Tensor:
    """As ShiRA of peft has it: the changes of a weight at a few places."""
    y = h.clone()
    y.mul_(2)
    change = torch.sparse_coo_tensor(torch.tensor([[0, 2, 7], [3, 3, 1]]), h[0, :3], (8, 8))
    return y + (change @ h.t()).t() + h @ (h.t() @ h + change)


BODIES = [
    _sparse_values,
    _parts_of_spectrum,
    _real_numbers_of_complex_ones,
    _complex_numbers_of_real_ones,
    _unrecorded(lambda h: h.mul_(0.5), "_scaled"),
    _unrecorded(lambda h: h.zero_(), "_zeroed"),
    _unrecorded(lambda h: h[:, 0].fill_(1.0), "_part_filled"),
    _unrecorded(lambda h: h.view(-1)[::2].mul_(2), "_through_views"),
    _unrecorded(lambda h: h.detach().add_(h), "_detached_within"),
    _through_detach,
    _through_data,
    _straight_through_by_data,
    _overwritten,
    _write_to_a_piece,
    _write_to_a_piece_of_what_is_used,
    _uneven_pieces,
    _after_a_loss,
    _two_results,
    _other_views,
    _constants,
    _view_then_write,
    _write_then_old_view,
    _view_of_view,
    _transposed,
    _fill_and_mask,
    _chain,
    _out_argument,
]


@nightly(
    "*ones",
    "*views",
    "{'up': 'column', 'down': 'row'}-_after_a_loss",
    "{'up': 'column', 'down': 'row'}-_chain",
    "{'up': 'column', 'down': 'row'}-_constants",
    "{'up': 'column', 'down': 'row'}-_overwritten",
    "{'up': 'column', 'down': 'row'}-_through_data",
    "{'up': 'column', 'down': 'row'}-_uneven_pieces",
    "{'up': 'column', 'down': 'row'}-_view_of_view",
    "{'up': 'row'}-_detached_within",
)
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "plan",
    [{"up": "column", "down": "row"}, pytest.param({"up": "row"}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_views_and_writes(body: Callable[[Tensor], Tensor], plan: dict[str, str]) -> None:
    torch.manual_seed(0)
    report = ts.check(_Program(body), plan, world_size=2, example_inputs=(torch.randn(3, 6).requires_grad_(),))
    assert report.ok, str(report)


class _RunningMean(nn.Module):
    """A buffer that is read split, then written."""

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
    made = ts.plan(_RunningMean(), plan, world_size=2, example_inputs=(torch.randn(3, 6),))
    assert made.parameters["run"] == ts.S(0)
    report = ts.check(_RunningMean(), plan, world_size=3, example_inputs=(torch.randn(3, 6),))
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
        ts.check(_Program(body), {"up": "column"}, world_size=2, example_inputs=(torch.randn(3, 6),))
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
    """A norm whose result nobody takes, as in an encoder of which the decoder does not use the last stage."""

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
    report = ts.check(_Unused(norm), "auto", world_size=world_size, example_inputs=(torch.randn(5, 6),))
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
    """As methods for unlabelled samples do it."""
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
    """Calls with a graph of the backward, as all behind the first one are, beside the unsharded model."""
    torch.manual_seed(0)
    model = _Normed(body).double()
    sharded = ts.shard(copy.deepcopy(model), {})
    for seed in range(2):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        for each in (model, sharded):
            each(x).square().sum().backward()
        assert gradient_error(sharded, model) < 1e-10
    assert ts.check(model, {"up": "column", "down": "row"}, world_size=2, example_inputs=(x,)).ok


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
    report = ts.check(_Normalized(), {"up": "column"}, world_size=2, example_inputs=(torch.randn(3, 6),))
    report.raise_on_error()
    assert {"mean", "spread"} <= {c.name for c in report.comparisons if c.kind == "buffer"}


@pytest.mark.nightly
def test_fake_quantization_while_training() -> None:
    quantization = torch.ao.quantization
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).train()
    model.qconfig = quantization.get_default_qat_qconfig("qnnpack")  # type: ignore[assignment]
    quantization.prepare_qat(model, inplace=True)
    ts.check(model, "auto", world_size=2, example_inputs=(torch.randn(3, 6),), dtype=None).raise_on_error()
