"""Tells whether `torch.compile` is at work, and has functions that it compiles run op by op."""

from __future__ import annotations

import contextlib

import torch

# `torch.compiler.set_stance` asks this too, whether it is called in a compiled region; no public name (PyTorch 2.13.0).
from torch._C._dynamo.eval_frame import get_eval_frame_callback


def is_compiled() -> bool:
    """Returns whether `torch.compile` compiles the functions called from here."""
    return get_eval_frame_callback() not in (None, False)


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Has compiled functions, such as the iteration of an optimizer, run op by op: a dispatch mode sees their ops."""
    return contextlib.nullcontext() if is_compiled() else torch.compiler.set_stance("force_eager")
