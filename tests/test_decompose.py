"""Ops without a rule that PyTorch runs as other ops are decomposed into these, and stay split."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import capture


class _Body(nn.Module):
    """A column-parallel layer, the function `body`, and a row-parallel layer."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(6, 8), nn.Linear(8, 6, bias=False), body

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self.up(x)))


def _cosine(h: Tensor) -> Tensor:
    return h * F.cosine_similarity(h, h.flip(0), dim=0)


def _tensordot(h: Tensor) -> Tensor:
    return torch.tensordot(h, h, dims=([0], [0]))


def _pieces(h: Tensor) -> Tensor:
    first, second = torch.hsplit(h, 2)
    return torch.column_stack([second, first]).square().reshape_as(h)


def _trapezoid(h: Tensor) -> Tensor:
    return h + torch.trapezoid(h, dim=0)


def _copies(h: Tensor) -> Tensor:
    return torch.transpose_copy(h, 0, 1).mT + torch.ops.aten.expand_copy(h[:1], h.shape)


def _loss(h: Tensor) -> Tensor:
    return h * F.kl_div(F.log_softmax(h, 0), h.detach().tanh().softmax(0), reduction="sum")


BODIES = [_cosine, _tensordot, _pieces, _trapezoid, _copies, _loss]


@nightly(but=["*trapezoid", "2-_tensordot"])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("world", [2, 3])
def test_what_it_becomes_is_split(body: Callable[[Tensor], Tensor], world: int) -> None:
    torch.manual_seed(0)
    model, x = _Body(body), (torch.randn(4, 6).requires_grad_(),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an op without a rule would warn
        plan = ts.plan(model, {"up": "column", "down": "row"}, example_inputs=x, mesh=world)
    report = ts.check(model, plan, example_inputs=x, mesh=world)
    assert report.ok, str(report)


class _Inverses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(5, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.matrices * x)


class _Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.multilabel_margin_loss(self.up(x), torch.tensor([[3, 0, -1, 2, -1]]).expand(x.shape[0], 5))


@pytest.mark.nightly
def test_a_loss_of_several_labels() -> None:
    ts.check(_Labelled(), {"up": "column"}, example_inputs=(torch.randn(4, 6),), mesh=2).raise_on_error()


def test_a_singular_matrix_of_one_rank_is_seen_by_every_rank() -> None:
    model, x = _Inverses(), torch.ones(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = capture(model, (x,)).plan({}, 3, objective={"machine": "cpu-gloo"}, layouts={"matrices": ts.S(0)})
    report = made.check()
    assert report.ok and made.plan.parameters["matrices"] == ts.S(0), str(report)
    for graph in made.rank_graphs():
        (check,) = (n for n in graph.graph.nodes if n.target is torch.ops.aten._linalg_check_errors.default)
        assert check.args[0].meta["val"].shape == (5,)
