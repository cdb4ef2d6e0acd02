"""One call of a model as a program for a number of ranks, for tests of what the compiler makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchshard.capture import Captured
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.constraints import Constraints, PlanLike, read_constraints
from torchshard.compiler.program import Program, planned, program
from torchshard.core.layouts import Layout
from torchshard.core.mesh import MeshAxis
from torchshard.plans.machine import Objective


def constraints_of(
    model: nn.Module,
    plan: PlanLike,
    ranks: int,
    aim: Objective | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Constraints:
    """A plan in any of its forms, as the compiler takes it."""
    return read_constraints(ModelFacts.of(model), plan, MeshAxis(ranks), aim).with_layouts(layouts or {})


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
