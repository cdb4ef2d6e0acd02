"""Finds out whose code calls a function of a slice: the user's, PyTorch's or this library's.

Users may mistake a slice for the full parameter; optimizers, autograd and this library do not. A
tensor's methods do not receive their caller, so this module inspects the stack frames. It could go if
a tensor subclass could see whether PyTorch or the user calls it (in PyTorch 2.13 it can't).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType

from torch import nn

# A method can't ask PyTorch for its caller (PyTorch 2.13.0). So these are the names of modules, also of private ones:
# `_dynamo`, `_export`, `_functorch`, `_inductor`, `_subclasses`, `_tensor_str`, `_comparison`, `_foreach_utils`.
_KNOWING = (
    "torch._dynamo", "torch._export", "torch._functorch", "torch._inductor", "torch._subclasses", "torch._tensor_str",
    "torch.amp", "torch.cuda", "torch.distributed", "torch.export", "torch.fx", "torch.multiprocessing",
    "torch.nn.modules.module", "torch.nn.parallel", "torch.nn.parameter", "torch.nn.utils.clip_grad", "torch.optim",
    "torch.serialization", "torch.storage", "torch.testing._comparison", "torch.utils._foreach_utils",
)  # fmt: skip
"""PyTorch's modules that manage tensors or compute elementwise. All others act for their callers."""
# `eval_frame` runs compiled code, `functional_call` a module, `_functional_collectives` collectives (PyTorch 2.13.0).
_PASSING = (
    "torch._dynamo.eval_frame", "torch._functorch.functional_call", "torch.distributed._functional_collectives",
    "torch.distributed.c10d_logger", "torch.distributed.distributed_c10d", "torch.distributed.nn.functional",
    "torch.optim.swa_utils", "torchshard.runtime.submodule", "torchshard.runtime.submodule_classes",
)  # fmt: skip
"""Modules within `_KNOWING`, and of this library, that run code passed in by their caller and act for it."""
_MODULES = nn.Module.__module__
# `_wrapped_call_impl` and `_call_impl` run forward, `_load_from_state_dict` copies (PyTorch 2.13.0).
_CALLS = frozenset([
    "Module._wrapped_call_impl", "Module._call_impl", "Module._load_from_state_dict", "Module.load_state_dict",
    "Module.load_state_dict.<locals>.load",
])  # fmt: skip
"""Methods of `nn.Module` that act for their caller: they call forward or copy a given state dict."""


def called_from() -> str:
    """Returns the module that called the function from which this is called."""
    return _module_of(sys._getframe(2))


def caller(func: object) -> str:
    """Returns the module that called a function of a tensor.

    Args:
        func: the function. If it is Python code, it requests the override itself, so the search
            for its caller starts above its frame.
    """
    frame: FrameType | None = sys._getframe(2)
    code = getattr(func, "__code__", None)
    if code is not None and frame is not None and _module_of(frame) == "torch.overrides":
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        frame = None if frame is None else frame.f_back
    while frame is not None and (acts_for_caller(module := _module_of(frame)) or _is_passing(module, frame)):
        frame = frame.f_back
    return "" if frame is None else module


def _is_passing(module: str, frame: FrameType) -> bool:
    return module == _MODULES and frame.f_code.co_qualname in _CALLS


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


@functools.cache
def acts_for_caller(module: str) -> bool:
    """Returns whether a module uses a slice on behalf of its caller."""
    is_torch = module == "torch" or module.startswith("torch.")
    return module in _PASSING or (is_torch and not f"{module}.".startswith(tuple(f"{m}." for m in _KNOWING)))


def is_users(module: str) -> bool:
    """Returns whether a module is outside PyTorch and this library."""
    return module.partition(".")[0] not in ("torch", "torchshard")


_METHOD: ContextVar[str] = ContextVar("method", default="")


@contextlib.contextmanager
def running_method(name: str) -> Iterator[None]:
    """Marks that a method of the user's model runs, with the sharded model as `self`."""
    before = _METHOD.set(name)
    try:
        yield
    finally:
        _METHOD.reset(before)


def method_of(module: str) -> str:
    """Returns the running method of the user's model if `module` is user code, otherwise ""."""
    return _METHOD.get() if is_users(module) else ""
