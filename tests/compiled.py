"""One call of a model as a program for a number of ranks, for tests of what the compiler makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.models import CASES
from torchshard.capture import Captured
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.constraints import Constraints, PlanLike, read_constraints
from torchshard.compiler.meshes import read_mesh
from torchshard.compiler.program import Program, planned, program
from torchshard.core.layouts import Layout
from torchshard.plans.machine import Objective


def constraints_of(
    model: nn.Module,
    plan: PlanLike,
    ranks: int,
    aim: Objective | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Constraints:
    """A plan in any of its forms, as the compiler takes it."""
    return read_constraints(ModelFacts.of(model), plan, read_mesh(ranks, None, None), aim).with_layouts(layouts or {})


def compiled(
    model: nn.Module,
    plan: PlanLike,
    ranks: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    aim: Objective | None = None,
) -> Program:
    """Captures, plans and rewrites one call."""
    return program(model, constraints_of(model, plan, ranks, aim), args, kwargs)


@cache
def compiled_case(name: str, ranks: int = 2) -> Program:
    """The program of one of the tests' models with its plan, made once in a process."""
    case = CASES[name]
    torch.manual_seed(0)
    return compiled(case.build(), case.plan, ranks, case.inputs(), case.kwargs)


def planned_as(
    captured: Captured,
    model: nn.Module,
    plan: PlanLike,
    ranks: int,
    aim: Objective | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Program:
    """Plans and rewrites a captured call."""
    return planned(captured, model, constraints_of(model, plan, ranks, aim, layouts))
