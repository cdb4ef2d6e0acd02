"""Training functions that need the full model's gradient: clipping by its norm, and loss scaling.

Gradients are slices or replicated. A slice counts once even if several ranks have it; so does a
replicated gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor, nn

from torchshard.core.errors import InputError
from torchshard.distributed.ranks import widest
from torchshard.weights.over_ranks import names_of
from torchshard.weights.parameter import ShardedParameter


def clip_grad_norm_(model: nn.Module | Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients in place so that their norm, as in the unsharded model, is at most `max_norm`.

    Equivalent to `torch.nn.utils.clip_grad_norm_` on the unsharded model, with one message. A
    collective call: all ranks must make it.

    Args:
        model: a sharded model, one with split modules of `torchshard.nn`, or such models' parameters.
        norm_type: p of the p-norm; `math.inf` for the largest absolute value.

    Returns:
        the norm before clipping, equal on every rank.

    Raises:
        InputError: norm_type is not positive, or max_norm is not a number.
    """
    norm_type = _checked_norm(max_norm, norm_type)
    parameters = _parameters(model)
    ranks, what = widest(parameters), f"the norm of gradients of {names_of(parameters)}"
    grads = [(p, p.grad) for p in parameters if p.grad is not None]
    device = next((p.device for p in parameters), torch.device("cpu"))
    # one of the ranks with the same slice counts it
    sliced = _norm([g for p, g in grads if _is_slice(p) and ranks.counts(p)], norm_type, device)
    whole = _norm([g for p, g in grads if not _is_slice(p)], norm_type, device)
    if math.isinf(norm_type):
        total = torch.maximum(ranks.reduced(sliced, torch.distributed.ReduceOp.MAX, eager=what), whole)
    else:
        summed = ranks.reduced(sliced**norm_type, torch.distributed.ReduceOp.SUM, eager=what)
        total = (summed + whole**norm_type) ** (1 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # without a branch, as in PyTorch: it would synchronize
    for _, grad in grads:
        grad.mul_(factor.to(grad.dtype))
    return total.to(functools.reduce(torch.promote_types, [g.dtype for _, g in grads] or [torch.float32]))


def _is_slice(parameter: Tensor) -> TypeGuard[ShardedParameter]:
    return isinstance(parameter, ShardedParameter) and parameter.is_split


def _checked_norm(max_norm: object, norm_type: float | str) -> float:
    """Returns the order of the norm; "inf" is valid, as in PyTorch."""
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        what = f"invalid norm_type {norm_type!r}: expected a positive number"
        raise InputError(what, where="norm_type=", why="p of a p-norm is positive", attempt="2.0")
    if not isinstance(max_norm, (int, float, Tensor)):
        what = f"invalid max_norm {max_norm!r}: expected a number"
        raise InputError(what, where="max_norm=", why=f"it is a {type(max_norm).__name__}", attempt="1.0")
    return order


def _parameters(model: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(model, nn.Module):
        return list(model.parameters())
    parameters = [model] if isinstance(model, Tensor) else list(model)
    wrong = next((p for p in parameters if not isinstance(p, Tensor)), None)
    if wrong is not None:
        raise InputError(
            f"gradients are clipped of parameters, not of a {type(wrong).__name__}",
            where="clip_grad_norm_",
            attempt="the model, or model.parameters()",
        )
    return parameters


def _norm(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Returns the joint norm of tensors, 0 without any; in float64, because its power must not overflow."""
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=_widened(g)).double() for g in grads if g.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else zero


def _widened(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded models: all ranks skip a step if a gradient overflows on one.

    PyTorch's own class works too for parameters of sharded models. A collective step: all ranks
    must make it.

    Source: `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        overflows = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        ranks = widest(p for group in optimizer.param_groups for p in group["params"])
        return {device: ranks.reduced(value, torch.distributed.ReduceOp.MAX) for device, value in overflows.items()}
