"""Replaces functions of PyTorch that export can't record with functions that compute the same.

torch.ctc_loss      reads the lengths: an op of ours has a fake kernel
torch._grouped_mm   has a fake kernel for bfloat16 only: so has an op of ours, for all dtypes
torch.cond          compiles its branches: of a predicate that is known before the call, one branch is called
nn.BatchNorm*d      with momentum=None makes a Python number of its count of batches: the weight stays a tensor

`torch.func` is recorded by `transforms`; `torch.autograd.grad` and the like are refused. A model
may call all of them from anywhere, as `nn.CTCLoss` does, so they are replaced in PyTorch's
namespace.

PyTorch 2.13: `aten._ctc_loss.Tensor` raises `DynamicOutputShapeException` on fake tensors,
`meta_grouped_mm` in `torch/_meta_registrations.py` checks for bfloat16, `torch.cond` becomes a
region with two branches, and `_BatchNorm.forward` calls `float(self.num_batches_tracked)`. Each
replacement can go when export records PyTorch's own function as flat ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# `apis`, `eager_transforms`: the functions in which all of `torch.func`'s transforms end (PyTorch 2.13.0).
from torch._functorch import apis, eager_transforms

# `_BatchNorm` is the base class of nn.BatchNorm1d, 2d and 3d, with their forward (PyTorch 2.13.0).
from torch.nn.modules.batchnorm import _BatchNorm

from torchshard.capture.known_numbers import KNOWN_NUMBERS, known_number
from torchshard.capture.recording import current_recording, in_captures
from torchshard.capture.seeding import INTERCEPTED_SEEDING
from torchshard.capture.transforms import is_in_transform, recorded, recorded_jvp, recorded_vjp
from torchshard.capture.user_code import calling_line
from torchshard.capture.value_checks import VALUE_CHECKS
from torchshard.core.errors import CaptureError
from torchshard.core.patches import Patch, Patches
from torchshard.custom_ops.ctc import ctc_loss
from torchshard.custom_ops.grouped import GROUPED_MM


def _grouped_mm(
    original: Callable[..., object],
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> object:
    is_ours = (x.ndim, weight.ndim) == (2, 3) and offs is not None and bias is None and out_dtype in (None, x.dtype)
    if not is_ours or x.dtype is torch.bfloat16:
        return original(x, weight, offs=offs, bias=bias, out_dtype=out_dtype)
    return GROUPED_MM(x, weight, offs)


def _refused(attempt: str) -> Callable[..., object]:
    """Builds the replacement of a function that differentiates; `attempt` is the advice."""

    def refuse(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        recording = current_recording()
        if recording is None or recording.inside_call or is_in_transform():
            return original(*args, **kwargs)
        raise CaptureError(
            "forward computes gradients",
            where=calling_line(),
            why="it differentiates within forward by torch.autograd, and a graph would hold the results as constants",
            attempt=attempt,
        )

    return refuse


_no_gradients = _refused(
    "torch.func.grad, vjp or jacrev of a function; or return what is differentiated, and call "
    "torch.autograd.grad(..., create_graph=True) on the sharded model's results"
)


def _cond(
    original: Callable[..., object],
    pred: object,
    true_fn: Callable[..., object],
    false_fn: Callable[..., object],
    operands: Sequence[object] = (),
) -> object:
    known = known_number(pred, bool) if isinstance(pred, Tensor) else None
    if known is None:
        return original(pred, true_fn, false_fn, operands)
    return (true_fn if known else false_fn)(*operands)


def _batch_norm(original: Callable[..., Tensor], module: _BatchNorm, input: Tensor) -> Tensor:
    mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
    is_cumulative = module.momentum is None and module.training and module.track_running_stats
    if not is_cumulative or mean is None or var is None or count is None:
        return original(module, input)
    # `_check_input_dim` is called by the forward that this replaces (PyTorch 2.13.0).
    module._check_input_dim(input)
    result = F.batch_norm(input, None, None, module.weight, module.bias, True, 0.0, module.eps)
    with torch.no_grad():
        count.add_(1)
        new_var, new_mean = torch.var_mean(input, [d for d in range(input.ndim) if d != 1])
        mean.add_((new_mean - mean) / count)
        var.add_((new_var - var) / count)
    return result


REPLACEMENTS = Patches(
    Patch(torch, "ctc_loss", in_captures(lambda original, *args, **kwargs: ctc_loss(*args, **kwargs))),
    Patch(torch, "_grouped_mm", in_captures(_grouped_mm)),
    # Without running statistics: they are updated below, with a weight that stays a tensor.
    Patch(torch, "cond", in_captures(_cond)),
    Patch(_BatchNorm, "forward", in_captures(_batch_norm)),
    Patch(apis, "vmap_impl", in_captures(recorded)),
    Patch(eager_transforms, "grad_and_value_impl", in_captures(recorded)),
    # `_vjp_with_argnums`, `_jvp_with_argnums`: where `vjp`, `jvp` and the Jacobians end (PyTorch 2.13.0).
    Patch(eager_transforms, "_vjp_with_argnums", in_captures(recorded_vjp)),
    Patch(eager_transforms, "_jvp_with_argnums", in_captures(recorded_jvp)),
    Patch(torch.autograd, "grad", in_captures(_no_gradients)),
    Patch(torch.autograd, "backward", in_captures(_no_gradients)),
    Patch(torch.autograd.forward_ad, "enter_dual_level", in_captures(_refused("torch.func.jvp of a function"))),
)
"""Makes threads that capture call the replacements."""


@contextlib.contextmanager
def replaced_functions() -> Iterator[None]:
    """Patches PyTorch's functions: in a thread that captures, each call runs the replacement."""
    with INTERCEPTED_SEEDING, VALUE_CHECKS, KNOWN_NUMBERS, REPLACEMENTS:
        yield
