"""Ops that PyTorch runs as other ops, and that have no rule, are those other ops: they stay split."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.compiled import planned_as
from tests.golden import check_golden
from tests.helpers import nightly
from torchshard.capture import capture
from torchshard.checking.check import check_program
from torchshard.checking.lockstep import rank_graphs
from torchshard.compiler.program import prepared
from torchshard.core.mesh import MeshAxis
from torchshard.ir.graph import fake_mode
from torchshard.ir.listing import listing
from torchshard.passes.decompose import _DECOMPOSITIONS, decompose
from torchshard.plans.machine import objective


class _Body(nn.Module):
    """A split value, what is done with it, and a row-parallel layer behind."""

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
        plan = ts.plan(model, {"up": "column", "down": "row"}, world_size=world, example_inputs=x)
    report = ts.check(model, plan, world_size=world, example_inputs=x)
    assert report.ok, str(report)


class _Inverses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(5, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.matrices * x)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_labels_behind_the_end_of_a_row_do_not_count(shape: tuple[int, ...], reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    order = torch.rand(shape, generator=generator).argsort(-1)
    labels = torch.where(torch.rand(shape, generator=generator) < 0.3, -1, order)
    expected = F.multilabel_margin_loss(x, labels, reduction=reduction)
    number = ["none", "mean", "sum"].index(reduction)
    found = _DECOMPOSITIONS[torch.ops.aten.multilabel_margin_loss.default](x, labels, number)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


class _Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.multilabel_margin_loss(self.up(x), torch.tensor([[3, 0, -1, 2, -1]]).expand(x.shape[0], 5))


@pytest.mark.nightly
def test_a_loss_of_several_labels() -> None:
    ts.check(_Labelled(), {"up": "column"}, world_size=2, example_inputs=(torch.randn(4, 6),)).raise_on_error()


def test_a_singular_matrix_of_one_rank_is_seen_by_every_rank() -> None:
    model, x = _Inverses(), torch.ones(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = prepared(model, (x,), {})
        made = planned_as(captured, model, {}, 3, objective("cpu-gloo"), {"matrices": ts.S(0)})
    report = check_program(model, made, made.graph, (x,), {})
    assert report.ok and made.plan.parameters["matrices"] == ts.S(0), str(report)
    for graph in rank_graphs(made.graph, MeshAxis(3)):
        (check,) = (n for n in graph.graph.nodes if n.target is torch.ops.aten._linalg_check_errors.default)
        assert check.args[0].meta["val"].shape == (5,)


def test_listing() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            first, second = torch.tensor_split(x, 2, dim=1)
            return F.kl_div(x, t, reduction="batchmean"), F.glu(first * second)

    graph = capture(Model(), (torch.randn(3, 8), torch.rand(3, 8)), dynamic=False).graph
    before = listing(graph, sources=False)
    assert decompose(graph)
    check_golden("decompose.txt", f"--- before\n{before}\n--- after\n{listing(graph, sources=False)}\n")
    assert not decompose(graph)


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_no_dynamic_size_is_decided(body: Callable[[Tensor], Tensor]) -> None:
    """What PyTorch does for these sizes need not be what it does for others."""
    graph = capture(_Body(body), (torch.randn(4, 6),)).graph
    sizes = fake_mode(graph.graph).shape_env
    before = len(sizes.guards), dict(sizes.replacements)
    decompose(graph)
    assert (len(sizes.guards), dict(sizes.replacements)) == before


def test_what_depends_on_a_dynamic_size_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.trace(x)

    def steps(x: Tensor) -> Tensor:
        return x.diagonal().sum() if x.shape[0] < 5 else x.diagonal().cumsum(0)[-1]

    monkeypatch.setitem(_DECOMPOSITIONS, torch.ops.aten.trace.default, steps)
    dynamic, static = (capture(Model(), (torch.randn(7, 6),), dynamic=d).graph for d in (True, False))
    assert decompose(static) and not decompose(dynamic)


def test_what_draws_random_numbers_stays() -> None:
    """Its pieces would draw theirs in another order."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.feature_alpha_dropout(x, 0.5, training=True)

    graph = capture(Model(), (torch.randn(3, 8, 4),)).graph
    assert not decompose(graph)
