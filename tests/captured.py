"""Calls of the models of tests/models.py, each captured once in a process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.models import CASES
from torchshard.testing import CapturedCall, PlannedCall, Report, capture


@cache
def captured_case(name: str, dtype: torch.dtype | None = torch.float64) -> CapturedCall:
    """The call of one of the models, in float64."""
    case = CASES[name]
    torch.manual_seed(0)
    return capture(case.build(), case.inputs(), case.kwargs, dtype=dtype)


@cache
def planned_case(name: str, ranks: int = 2) -> PlannedCall:
    """The call of one of the models in its own dtype, under the case's plan."""
    return captured_case(name, None).plan(CASES[name].plan, ranks)


def checked(call: CapturedCall, plan: Any, ranks: int) -> Report:
    """Checks a call under a plan, with a fixed seed; returns the report."""
    torch.manual_seed(0)
    return call.plan(plan, ranks).check()
