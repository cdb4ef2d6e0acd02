"""What a training step must know of the whole model's gradient, of which a rank holds some slices and some wholes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchshard.core.errors import InputError
from torchshard.core.layouts import I, Layout, Shard
from torchshard.distributed.group import own_group
from torchshard.distributed.kernels import reduced
from torchshard.weights.parameter import ShardedParameter


def clip_grad_norm_(model: nn.Module | Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients in place so that their norm, as the unsharded model's, is at most `max_norm`.

    The same as `torch.nn.utils.clip_grad_norm_` of the unsharded model: a parameter that every rank holds whole counts
    once, slices count together, in one message. A collective call: all ranks must make it.

    Args:
        model: a sharded model, or one with split modules of `torchshard.nn`; or the parameters of such models.
        norm_type: p of the p-norm; `math.inf` for the largest absolute value.

    Returns:
        the norm before clipping, the same on every rank.

    Raises:
        InputError: norm_type is not positive, or max_norm is no number.
    """
    if not norm_type > 0:
        what = f"a {norm_type!r}-norm is none to clip by"
        raise InputError(what, where="norm_type=", why="p of a p-norm is positive", attempt="2.0")
    if not isinstance(max_norm, (int, float, Tensor)):
        what = f"{max_norm!r} is no norm to clip to"
        raise InputError(what, where="max_norm=", why=f"it is a {type(max_norm).__name__}", attempt="1.0")
    parameters = _parameters(model)
    group = next((p.group for p in parameters if isinstance(p, ShardedParameter)), own_group())
    grads = [(_sharding(p), p.grad) for p in parameters if p.grad is not None]
    sliced = [g for layout, g in grads if isinstance(layout, Shard)]
    whole = [g for layout, g in grads if not isinstance(layout, Shard)]
    device = next((p.device for p in parameters), torch.device("cpu"))
    norms = [_norm(part, norm_type, device) for part in (sliced, whole)]
    if math.isinf(norm_type):
        total = torch.maximum(reduced(norms[0], torch.distributed.ReduceOp.MAX, group), norms[1])
    else:
        summed = reduced(norms[0] ** norm_type, torch.distributed.ReduceOp.SUM, group)
        total = (summed + norms[1] ** norm_type) ** (1 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for _, grad in grads:
        grad.mul_(factor.to(grad.dtype))
    return total.to(functools.reduce(torch.promote_types, [g.dtype for _, g in grads] or [torch.float32]))


def _parameters(model: Any) -> list[Tensor]:
    if isinstance(model, nn.Module):
        return list(model.parameters())
    held = [model] if isinstance(model, Tensor) else list(model)
    if all(isinstance(p, Tensor) for p in held):
        return held
    wrong = next(type(p).__name__ for p in held if not isinstance(p, Tensor))
    raise InputError(
        f"gradients are clipped of parameters, not of a {wrong}",
        where="clip_grad_norm_",
        attempt="the model, or model.parameters()",
    )


def _sharding(parameter: Tensor) -> Layout:
    return parameter.sharding if isinstance(parameter, ShardedParameter) else I


def _norm(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of some tensors together, in float64: its power must not overflow, and a rank may hold none of them."""
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=_wide(g)).double() for g in grads if g.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else zero


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded models: a step is skipped on all ranks if a gradient overflows on one.

    PyTorch's sees this rank's slices only: one rank would skip a step that the others make, and what every rank holds
    whole would drift apart. A collective step: all ranks must make it.

    Source: `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.
    """

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args)
        group = own_group()
        return {device: reduced(value, torch.distributed.ReduceOp.MAX, group) for device, value in found.items()}
