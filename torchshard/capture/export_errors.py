"""Turns an exception of `torch.export` into a CaptureError with line, reason and advice."""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

from torch import nn

from torchshard.capture.user_code import layer_line, line_in, user_line
from torchshard.core.errors import CaptureError
from torchshard.core.user_files import is_library


class _Advice(NamedTuple):
    pattern: str
    """Searched for in the exception's text and in the function names on its stack."""
    reason: str
    attempt: str


_ADVICE = (
    _Advice(
        # `_detect_is_causal_mask` of nn.Transformer is a line of export's traceback (PyTorch 2.13.0).
        r"_detect_is_causal_mask",
        "torch.nn.Transformer looks at the mask's values, whether it is the causal one",
        "say so: is_causal=True beside the mask (tgt_is_causal=True of nn.Transformer), or False",
    ),
    _Advice(
        r"flex_attention",
        "flex_attention is an operator that takes functions (score_mod, mask_mod), which a flat graph can't hold",
        "F.scaled_dot_product_attention with is_causal=True, or with what the functions compute as attn_mask=",
    ),
    _Advice(
        r"UncapturedHigherOrderOp",
        "it branches or loops by an operator that takes functions (torch.cond), which a flat graph can't hold",
        "torch.where in place of a branch, a Python loop in place of a scan; or torch.cond by a buffer of one element",
    ),
    _Advice(
        r"exported program constant's list|functorch|torch\.func\.",
        "it differentiates within forward, in a way that a flat graph can't hold",
        "the reverse mode of torch.func: vjp in place of jvp, jacrev in place of jacfwd, jacrev(jacrev(f)) in place of "
        "hessian(f), grad or vjp in place of torch.autograd.grad",
    ),
    _Advice(
        r"cast NotImplemented to Tensor|handlers returned NotImplemented|mixed torch.Tensor and DTensor",
        "it reads a tensor of a class with ops of its own (__torch_dispatch__), which a flat graph can't hold",
        "a plain tensor in its place: tensor.dequantize(), tensor.full_tensor()",
    ),
    _Advice(
        r"data.dependent|DataDependent|Could not extract specialized|\.item\(\)|_local_scalar_dense|unbacked",
        "the graph would depend on the values of a tensor",
        "torch.where or a mask in place of a Python branch on a tensor's value, or of a size that is one (bincount)",
    ),
    _Advice(
        r"dynamic|Constraints violated|specializ",
        "the sizes of the inputs could not be kept dynamic",
        "inputs of one fixed shape, or a model that does not compare sizes",
    ),
)
"""The first match is used, so the patterns go from particular to general."""

_DEFAULT = _Advice(
    "",
    "torch.export could not run the model on fake tensors",
    "run the model on these inputs without torchshard first; if that works, move what can't be traced out of forward",
)


def capture_error(model: nn.Module, error: Exception) -> CaptureError:
    """Builds the error for a model that export could not run."""
    text, stack = f"{type(error).__name__}: {error}", traceback.extract_tb(error.__traceback__)
    layer = layer_line(stack)
    last = stack[-1] if stack and not is_library(stack[-1].filename) else None
    is_theirs = last is not None and re.search(r"\braise\b|\bassert\b", last.line or "")
    names = [frame.name for frame in stack if is_library(frame.filename)]
    # The user's own messages and function names could match a pattern by chance.
    searched = " ".join(([] if is_theirs else [text]) + [*names, layer])
    advice = next((row for row in _ADVICE if re.search(row.pattern, searched)), _DEFAULT)
    first_line = text.strip().splitlines()[0][:300]
    return CaptureError(
        f"{type(model).__name__} can't be captured as a graph",
        where=user_line(stack) or line_in(str(error)) or layer or type(model).__name__,
        why=f"{advice.reason} ({first_line})",
        attempt=advice.attempt,
    )
