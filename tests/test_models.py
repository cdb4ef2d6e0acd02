"""Outputs, input gradients and every parameter gradient of ordinary models, at 1 to 4 ranks, in float64."""

from __future__ import annotations

import pytest
import torch

import torchshard as ts
from tests.models import CASES


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, world_size: int) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    report = ts.check(model, case.plan, world_size=world_size, example_inputs=case.inputs(), example_kwargs=case.kwargs)
    assert report.ok, str(report)
    kinds = {c.kind for c in report.comparisons}
    assert {"output", "parameter gradient"} <= kinds


def test_more_ranks_than_there_is_to_split() -> None:
    torch.manual_seed(0)
    case = CASES["gpt"]
    report = ts.check(case.build(), case.plan, world_size=64, example_inputs=case.inputs())
    assert report.ok, str(report)
