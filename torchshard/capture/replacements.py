"""Functions of PyTorch that fake tensors can't run, and functions that compute the same, which a capture calls instead.

torch.ctc_loss      reads the lengths: an op of ours has a fake kernel
torch.cond          compiles its branches: of a predicate that is known before the call, one branch is called

A model may call them from anywhere, as `nn.CTCLoss` does, so they are replaced in PyTorch's namespace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchshard.capture.known_numbers import known_number
from torchshard.capture.recording import current_recording
from torchshard.core.patches import Patch, Patches
from torchshard.custom_ops.ctc import ctc_loss


def _in_captures(function: Callable[..., object]) -> Callable[[object], object]:
    """Makes what replaces an original: in a capture it calls `function(original, *args)`."""

    def replace(original: object) -> object:
        called = cast(Callable[..., object], original)

        @functools.wraps(called)
        def replacement(*args: Any, **kwargs: Any) -> object:
            return called(*args, **kwargs) if current_recording() is None else function(called, *args, **kwargs)

        return replacement

    return replace


def _ctc_loss(original: object, *args: Any, **kwargs: Any) -> object:
    return ctc_loss(*args, **kwargs)


def _cond(
    original: Callable[..., object],
    pred: Any,
    true_fn: Callable[..., object],
    false_fn: Callable[..., object],
    operands: Sequence[object] = (),
) -> object:
    known = known_number(pred, bool) if isinstance(pred, Tensor) else None
    if known is None:
        return original(pred, true_fn, false_fn, operands)
    return (true_fn if known else false_fn)(*operands)


REPLACEMENTS = Patches(Patch(torch, "ctc_loss", _in_captures(_ctc_loss)), Patch(torch, "cond", _in_captures(_cond)))
"""While it is entered, threads that capture call the replacements."""
