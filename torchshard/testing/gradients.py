"""Compares the gradients of a sharded model with the unsharded model's."""

from __future__ import annotations

import math

from torch import Tensor, nn

from torchshard.weights.parameter import ShardedParameter


def full_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Returns a parameter's full gradient, gathered from all ranks, if it has one. All ranks must call it."""
    if parameter.grad is None or not isinstance(parameter, ShardedParameter):
        return parameter.grad
    slice_of_rank = parameter.grad.as_subclass(Tensor)
    full: Tensor = parameter.ranks.gathered(slice_of_rank, parameter.sharding, parameter.whole)
    return full


def gradient_error(sharded: nn.Module, model: nn.Module) -> float:
    """Compares all parameters' gradients with the unsharded model's. All ranks must call it.

    Returns:
        the largest absolute difference; infinity if a parameter has a gradient in only one of the models, NaN if a
        difference is NaN.
    """
    found = {name: full_gradient(p) for name, p in sharded.named_parameters()}
    expected = {name: p.grad for name, p in model.named_parameters()}
    pairs = [(found[name], expected[name]) for name in expected]
    if any((a is None) != (b is None) for a, b in pairs):
        return math.inf
    return largest(0.0, *((a - b).abs().max().item() for a, b in pairs if a is not None and b is not None))


def largest(*errors: float) -> float:
    """Returns the largest error, or NaN if one is NaN: `max` may skip NaN."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)
