"""Makes the ranks agree on constraints, first layouts and weights before they shard a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn

from torchshard.capture import check_weights, model_without_storage, shared_names
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.constraints import Constraints, PlanLike, read_constraints
from torchshard.compiler.plan_checks import check_layouts
from torchshard.core.errors import PlanError
from torchshard.core.layouts import Layout
from torchshard.core.mesh import Mesh
from torchshard.core.user_files import warn
from torchshard.distributed.ranks import Ranks
from torchshard.plans.objective import Aim
from torchshard.runtime.digests import describe_contents
from torchshard.weights.folder import Weights, check_missing, read_folder

TOGETHER = "the ranks can't shard this model together"
WeightsLike = str | os.PathLike[str] | Weights | None
"""Weights to load in place of the model's: a folder, or weights found already."""


class Start(NamedTuple):
    """The beginning of a sharded model, equal on all ranks."""

    constraints: Constraints
    layouts: Mapping[str, Layout]
    """The first layouts of parameters and buffers over the model's axis, by name."""
    of_batch: Mapping[str, Mapping[str, Layout]]
    """Their layouts over each data axis, by the axis's name."""
    weights: Weights | None
    """The values to load in place of the model's."""


def agreed_start(
    model: nn.Module, plan: PlanLike, ranks: Ranks, aim: Aim | None, weights: WeightsLike, *, whole_batches: bool
) -> Start:
    """Reads the plan and finds the weights on all ranks: a collective call.

    Raises:
        PlanError: the plan does not fit the model on some rank.
        DistributedError: the ranks have different models, weights or options.
    """
    mesh = ranks.mesh.without_idle

    def read() -> tuple[Constraints, ModelFacts, dict[str, Layout], Weights | None]:
        check_weights(model)
        facts = ModelFacts.of(model)
        constraints = read_constraints(facts, plan, mesh, aim)
        layouts = constraints.first_layouts(facts)
        check_layouts(facts, layouts)
        return constraints, facts, layouts, _found(model, weights)

    constraints, facts, layouts, found = ranks.run_on_all(read, PlanError, TOGETHER)
    _verify_options(constraints, ranks, mesh, whole_batches=whole_batches)
    _verify_same_weights(model, ranks, () if found is None else found.tensors)
    if found is not None:
        contents = describe_contents(found.tensors) | found.samples
        ranks.verify(contents, "the ranks would read different weights", "a folder with the same files on every rank")
    if any(p.grad is not None for p in model.parameters()):
        held = "gradients that the parameters hold already stay with the unsharded model"
        warn(f"{held}: call backward() after ts.shard")
    across = constraints.of_batch if mesh.across else ()
    of_batch = {each.axis.name: each.first_layouts(facts) for each in across}
    return Start(constraints, layouts, of_batch, found)


def _found(model: nn.Module, weights: WeightsLike) -> Weights | None:
    """Returns the weights of a folder, which are read later."""
    if weights is None or isinstance(weights, Weights):
        return weights
    found = read_folder(model_without_storage(model), shared_names(model), weights)
    check_missing(model, found, weights)
    return found


def _verify_options(constraints: Constraints, ranks: Ranks, mesh: Mesh, *, whole_batches: bool) -> None:
    """Checks that all ranks split the batch in the same way."""
    if ranks.count > 1:
        ways = [f"{axis} {axis.holds}" for axis in mesh.across] or [constraints.axis.holds]
        asked = f"{', '.join(ways)}; {'global' if whole_batches else 'local'}"
        ranks.verify({"mesh= and inputs=": asked}, TOGETHER, "the same mesh= and inputs= on every rank")


def _verify_same_weights(model: nn.Module, ranks: Ranks, replaced: Collection[str] = ()) -> None:
    """Compares every bit of the unsharded model's parameters and buffers across the ranks.

    Args:
        replaced: the names to skip: other values replace theirs, which may differ before that.

    Raises:
        DistributedError: they differ.
    """
    if ranks.count == 1:
        return
    named = dict((*model.named_parameters(), *model.named_buffers()))
    facts = describe_contents({name: tensor for name, tensor in named.items() if name not in replaced})
    attempt = "torch.manual_seed(0) before the model is built, or the same files, on every rank"
    ranks.verify(facts, "the ranks hold different models", attempt)
