"""Tests outputs, input gradients and all parameter gradients of ordinary models on 1 to 4 ranks, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.captured import captured_case, checked
from tests.helpers import nightly
from tests.models import CASES
from torchshard.testing import Shard

QUICK = ["mlp_uneven", "attention_7_heads", "gqa_1_kv_head", "fused_by_split", "gpt", "conv", "writes"]
"""Models that `make quick` runs on three ranks."""


def _on_ranks(name: str, world_size: int) -> Any:
    is_quick = name in QUICK and world_size == 3
    return pytest.param(name, world_size, marks=[pytest.mark.quick] if is_quick else [])


@nightly(
    but=[
        "*heads-3",
        "attention-1",
        "attention-2",
        "attention-4",
        "attention_7_*",
        "attention_dropout-2",
        "conv_columns-3",
        "dense_moe-2",
        "dense_moe-3",
        "fused_by_split-2",
        "fused_by_split-3",
        "fused_by_split-4",
        "fused_by_split_7_heads-4",
        "fused_by_view-*",
        "fused_by_view_5_heads-2",
        "fused_by_view_5_heads-4",
        "fused_per_*",
        "gpt-2",
        "gqa_1_kv_head-2",
        "gqa_1_kv_head-4",
        "gqa_2_kv_heads-1",
        "gqa_2_kv_heads-2",
        "mlp-*",
        "mlp_*",
        "writes-3",
    ]
)
@pytest.mark.parametrize("name, world_size", [_on_ranks(name, world) for name in CASES for world in (1, 2, 3, 4)])
def test_parity(name: str, world_size: int) -> None:
    report = checked(captured_case(name), CASES[name].plan, world_size)
    assert report.ok, str(report)
    compared = {
        kind: {c.name for c in report.comparisons if c.kind == kind} for kind in ("output", "parameter gradient")
    }
    trained = {n for n, p in CASES[name].build().named_parameters() if p.requires_grad}
    assert compared["output"] and compared["parameter gradient"] == trained


@nightly(
    but=[
        "*7_heads",
        "conv_columns",
        "dense_moe",
        "fused_by_view",
        "fused_by_view_5_heads",
        "fused_per_head",
        "mlp_uneven",
        "recurrent",
    ]
)
@pytest.mark.parametrize("name", CASES)
def test_auto_is_exact(name: str) -> None:
    """Checks outputs and all gradients without annotations, on 3 ranks, where shards are uneven."""
    report = checked(captured_case(name), "auto", 3)
    assert report.ok, str(report)


def test_ts_check_captures_by_itself() -> None:
    """`ts.check` gives the report that the tests above compute in steps, in order to capture once."""
    case = CASES["fused_by_view"]
    torch.manual_seed(0)
    model, inputs = case.build(), case.inputs()
    torch.manual_seed(0)
    report = ts.check(model, case.plan, example_inputs=inputs, mesh=3)
    same = checked(captured_case("fused_by_view"), case.plan, 3)
    assert report.ok and report.comparisons == same.comparisons


@pytest.mark.nightly
def test_more_ranks_than_there_is_to_split() -> None:
    report = checked(captured_case("gpt"), CASES["gpt"].plan, 64)
    assert report.ok, str(report)


class _Auxiliary(nn.Module):
    """A model with a layer that runs only in training, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.aux, self.down, self.unused = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h + self.aux(h) if self.training else h)


@pytest.mark.parametrize("first", [True, False])
def test_a_plan_may_name_modules_that_a_call_does_not_use(first: bool) -> None:
    torch.manual_seed(0)
    model, x = _Auxiliary(), torch.randn(3, 6)
    sharded = ts.shard(model, {"up": "column", "aux": "column", "unused": "row", "down": "row"})
    for mode in (first, not first):
        assert torch.allclose(sharded.train(mode)(x), model.train(mode)(x), atol=1e-6)
    ts.distributed.destroy_process_group()


def test_a_weight_that_the_parent_uses() -> None:
    """MultiheadAttention never calls its `out_proj`."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    plan = {"self_attn.out_proj": "row", "linear1": "column", "linear2": "row"}
    made = ts.plan(layer, plan, example_inputs=(torch.randn(2, 3, 8),), mesh=2)
    layout = made.parameters["self_attn.out_proj.weight"]
    assert isinstance(layout, Shard) and layout.dim == 1
    report = ts.check(layer, plan, example_inputs=(torch.randn(2, 3, 8),), mesh=2)
    assert report.ok, str(report)


def test_a_running_mean_that_is_zero_on_paper_is_no_difference() -> None:
    """A norm's result and its convolution have mean zero, so the next norm's running mean is noise."""
    norms = nn.BatchNorm2d(6), nn.Conv2d(6, 10, 1, bias=False), nn.BatchNorm2d(10)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), *norms)
    report = ts.check(model, {"1": "replicate", "2": "column"}, example_inputs=(torch.randn(2, 3, 1, 1),), mesh=2)
    assert report.ok, str(report)
    assert {c.name for c in report.comparisons if c.kind == "buffer"} >= {"1.running_mean", "3.running_mean"}
