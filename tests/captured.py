"""`ts.check` for many plans of one call: the model is captured once.

Capture is about half of a check, and does not depend on the plan or the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tests.compiled import planned_as
from tests.models import CASES
from torchshard.capture import copy_model
from torchshard.checking.check import Report, check_program, in_dtype
from torchshard.compiler.constraints import PlanLike
from torchshard.compiler.prepare import prepared


class CapturedCall:
    """A call of a model in float64, captured, which any plan can be checked on."""

    def __init__(self, model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        held = copy_model(model)
        self.model, self.args, self.kwargs = in_dtype(held, list(args), dict(kwargs or {}), torch.float64)
        self.captured = prepared(self.model, self.args, self.kwargs)

    def check(self, plan: PlanLike, world_size: int) -> Report:
        """The report that `ts.check` gives for this plan; random numbers start from the same seed each time."""
        torch.manual_seed(0)
        made = planned_as(self.captured, self.model, plan, world_size)
        return check_program(self.model, made, made.graph, self.args, self.kwargs)


@functools.cache
def captured_case(name: str) -> CapturedCall:
    """The call of one of the models in tests/models.py, kept for all tests of a process."""
    case = CASES[name]
    torch.manual_seed(0)
    return CapturedCall(case.build(), case.inputs(), case.kwargs)
