"""Finds out whose code runs: a slice of a parameter behaves differently for users than for PyTorch and this library.

Users may mistake a slice for the whole parameter; optimizers, autograd and this library know what they do. A function
of a tensor does not learn who called it, so the stack of frames is all there is to ask.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType

_KNOWING = (
    "torch._dynamo", "torch._export", "torch._functorch", "torch._inductor", "torch._subclasses", "torch._tensor_str",
    "torch._utils", "torch.amp", "torch.cuda", "torch.distributed", "torch.export", "torch.fx", "torch.multiprocessing",
    "torch.nn.modules.module", "torch.nn.parallel", "torch.nn.parameter", "torch.nn.utils.clip_grad", "torch.optim",
    "torch.serialization", "torch.storage", "torch.testing._comparison", "torch.utils._foreach_utils",
    "torch.utils.checkpoint",
)  # fmt: skip
"""PyTorch's modules that look after tensors, or treat each element alone. All others act for their callers."""
_PASSING = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torchshard.runtime.submodule")
"""Modules of collectives and of methods, which act for their callers too."""


def called_from() -> str:
    """The name of the module whose code called the function that asks."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def caller(func: object) -> str:
    """The module whose code called a function of a tensor.

    Args:
        func: the function; one of Python's own code asks for an override itself, so that its frame is in between.
    """
    frame: FrameType | None = sys._getframe(2)
    code = getattr(func, "__code__", None)
    if code is not None and frame is not None and frame.f_globals.get("__name__") == "torch.overrides":
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        frame = None if frame is None else frame.f_back
    while frame is not None and _acts_for_caller(module := str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    return "" if frame is None else module


@functools.cache
def _acts_for_caller(module: str) -> bool:
    is_torch = module == "torch" or module.startswith("torch.")
    return module in _PASSING or (is_torch and not f"{module}.".startswith(tuple(f"{m}." for m in _KNOWING)))


def is_users(module: str) -> bool:
    """Whether a module belongs neither to PyTorch nor to this library."""
    return module.partition(".")[0] not in ("torch", "torchshard")


_METHOD: ContextVar[str] = ContextVar("method", default="")


@contextlib.contextmanager
def running_method(name: str) -> Iterator[None]:
    """While a model's own method runs with its sharded model as `self`."""
    before = _METHOD.set(name)
    try:
        yield
    finally:
        _METHOD.reset(before)


def method_of(module: str) -> str:
    """The name of the model's own method that runs, if a module's code is not PyTorch's or this library's."""
    return _METHOD.get() if is_users(module) else ""
