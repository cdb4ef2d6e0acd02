"""Mixtures of experts with real routing: the best few of each token, sorted, in grouped products."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 - registers a grouped product for all dtypes
from torch import Tensor, nn

import torchshard as ts
from torchshard.checking import check_program
from torchshard.planner.machine import objective
from torchshard.program import planned, prepared


class _Experts(nn.Module):
    """The two best of some experts."""

    def __init__(self, experts: int, hidden: int, inner: int, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.product = product
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        expert, order = chosen.flatten().sort()
        offsets = torch.searchsorted(expert, torch.arange(self.up.shape[0]), right=True).to(torch.int32)
        h = F.silu(self.product(x[order // 2], self.up, offs=offsets))
        y = self.product(h, self.down, offs=offsets) * weight.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // 2, y)


def _model(experts: int = 4, inner: int = 90, dtype: torch.dtype = torch.float64) -> tuple[_Experts, tuple[Tensor]]:
    """PyTorch's own product takes no float64, and while a graph is captured nothing but bfloat16."""
    torch.manual_seed(0)
    product = F.grouped_mm if dtype is torch.bfloat16 else torch.ops.transformers.grouped_mm_fallback
    x = torch.randn(10, 16, dtype=dtype).requires_grad_()
    return _Experts(experts, 16, inner, product).to(dtype), (x,)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_experts_are_split_inside(world: int) -> None:
    """Every rank has a part of every expert, and one all-reduce makes the sum."""
    model, inputs = _model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = ts.plan(model, "auto", world_size=world, example_inputs=inputs)
    assert (plan.parameters["up"], plan.parameters["down"]) == (ts.S(2), ts.S(1))
    assert {c.name: c.calls for c in plan.costs.collectives if c.forward.nbytes} == {"reduce": 1}
    report = ts.check(model, plan, world_size=world, example_inputs=inputs)
    assert report.ok, str(report)


def test_pytorchs_own_product() -> None:
    model, inputs = _model(inner=64, dtype=torch.bfloat16)
    plan = ts.plan(model, "auto", world_size=2, example_inputs=inputs)
    assert (plan.parameters["up"], plan.parameters["down"]) == (ts.S(2), ts.S(1))
    report = ts.check(model, plan, world_size=2, example_inputs=inputs, dtype=None)
    assert report.ok, str(report)


@pytest.mark.parametrize("world, experts", [(2, 4), (3, 4), (4, 3)])
def test_experts_across_ranks(world: int, experts: int) -> None:
    """Every rank has some experts whole: with 3 of them, the last of 4 ranks has none."""
    model, inputs = _model(experts)
    captured = prepared(model, inputs, {})
    layouts: dict[str, ts.Layout] = {"up": ts.S(0), "down": ts.S(0)}
    made = planned(captured, model, {}, world, objective("cpu-gloo"), layouts)
    gathered = {c.value for c in made.plan.costs.collectives} & {"up", "down"}
    assert not gathered
    report = check_program(model, made, made.graph, inputs, {})
    assert report.ok, str(report)
