"""In-place ops and views: the functionalized graph computes the model's results, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly


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
    """A loss broadcasts its operands to each other, which makes views of both."""
    y = h.detach() * 1
    loss = torch.nn.functional.mse_loss(y, h.detach()[:1]) + torch.nn.functional.l1_loss(y[:1], y + 1)
    y[:, :2].mul_(0.5)
    return h * y + loss


def _unrecorded(write: Callable[[Tensor], Any], name: str) -> Callable[[Tensor], Tensor]:
    """A write that autograd does not record: later values change, gradients flow as if without the write."""

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
    """Writes parts of a spectrum, like a hand-written Fourier neural operator."""
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
    """Adds a sparse change to a weight, like peft's ShiRA."""
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
    report = ts.check(_Program(body), plan, example_inputs=(torch.randn(3, 6).requires_grad_(),), mesh=2)
    assert report.ok, str(report)
