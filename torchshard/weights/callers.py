"""Finds out whose code runs: a slice of a parameter behaves differently for users than for PyTorch and this library.

Users may mistake a slice for the whole parameter; optimizers, autograd and this library know what they do. A function
of a tensor does not learn who called it, so the stack of frames is all there is to ask.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType

_FOR_USERS = frozenset([
    "torch.overrides", "torch.functional", "torch._tensor", "torch.nn.functional", "torch.autograd",
    "torch._jit_internal", "torch.nn.utils.convert_parameters", "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
])  # fmt: skip
"""PyTorch's modules whose functions act on behalf of their callers: those frames are skipped."""


def called_from() -> str:
    """The name of the module whose code called the function that asks."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def caller() -> tuple[str, int]:
    """The module whose code called a function of a tensor, and how many frames above this one that code is."""
    frame: FrameType | None = sys._getframe(2)
    depth = 2
    while frame is not None and frame.f_globals.get("__name__") in _FOR_USERS:
        frame, depth = frame.f_back, depth + 1
    return ("" if frame is None else str(frame.f_globals.get("__name__", ""))), depth


def is_users(module: str) -> bool:
    """Whether a module belongs neither to PyTorch nor to this library."""
    return module.partition(".")[0] not in ("torch", "torchshard")


_COUNTS_WHOLE: ContextVar[bool] = ContextVar("counts_whole", default=False)


@contextlib.contextmanager
def counting_whole() -> Iterator[None]:
    """While a model's own method runs, its parameters have the numbers of elements of the whole ones."""
    before = _COUNTS_WHOLE.set(True)
    try:
        yield
    finally:
        _COUNTS_WHOLE.reset(before)


def counts_whole(module: str) -> bool:
    """Whether code of a module counts the elements of whole parameters."""
    return _COUNTS_WHOLE.get() and is_users(module)
