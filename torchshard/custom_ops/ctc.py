"""The op `ctc_losses`: PyTorch's CTC loss per sequence, with the fake kernel that `torch.ctc_loss`
lacks.

PyTorch reads the lengths of inputs and targets to allocate the tensors that its backward needs, but
fake tensors have no values. So this op's backward runs the forward again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchshard.core.types import Context

aten = torch.ops.aten
_LOSSES = (
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity)"
)


@torch.library.custom_op("torchshard::ctc_losses", mutates_args=(), schema=f"{_LOSSES} -> Tensor")
def ctc_losses(log_probs: Tensor, *args: object) -> Tensor:
    """Returns the loss of each sequence: `f32[time,batch,classes] -> f32[batch]`."""
    losses, _ = aten._ctc_loss.Tensor(log_probs, *args)
    return torch.where(losses.isinf(), 0.0, losses) if args[-1] else losses.clone()


@ctc_losses.register_fake
def _(log_probs: Tensor, *args: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op(
    "torchshard::ctc_losses_backward", mutates_args=(), schema=f"(Tensor grad, {_LOSSES[1:]} -> Tensor"
)
def ctc_losses_backward(grad: Tensor, log_probs: Tensor, *args: object) -> Tensor:
    """Returns the gradient of `log_probs`."""
    *tensors, blank, zero_infinity = args
    found = aten._ctc_loss.Tensor(log_probs, *tensors, blank, zero_infinity)
    return aten._ctc_loss_backward.Tensor(grad, log_probs, *tensors, *found, blank, zero_infinity)


@ctc_losses_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *args: object) -> Tensor:
    return torch.empty_like(log_probs)


def _save(ctx: Context, inputs: Sequence[object], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = ctc_losses_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_save)
for _device in ("cpu", "cuda"):
    ctc_losses.register_autocast(_device, torch.float32)  # the same cast as PyTorch's own op


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Computes `torch.ctc_loss` with ops that have fake kernels."""
    lengths = [torch.as_tensor(n, device=log_probs.device) for n in (input_lengths, target_lengths)]
    if log_probs.ndim == 2:
        losses: Tensor = CTC_LOSSES(log_probs[:, None], targets, *(n.view(1) for n in lengths), blank, zero_infinity)[0]
    else:
        losses = CTC_LOSSES(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == 1:
        return (losses / lengths[1].clamp_min(1).to(losses.dtype)).mean()
    return losses.sum() if reduction == 2 else losses


CTC_LOSSES = torch.ops.torchshard.ctc_losses.default
CTC_LOSSES_BACKWARD = torch.ops.torchshard.ctc_losses_backward.default
