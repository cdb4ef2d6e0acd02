"""Tools around a call, such as `CommDebugMode`, `ModuleTracker` and `FlopCounterMode`.

They are not part of a model. During a capture, their hooks on all modules would run on fake
tensors, and their hooks on results would become ops of the graph. Dispatch modes would count the
ops of captures and recordings, some of them with dynamic sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _disable_current_modes

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def is_tools(hook: object) -> bool:
    """Whether a hook on all modules is PyTorch's."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")


@contextlib.contextmanager
def without_tools() -> Iterator[None]:
    """Removes the tools' hooks and all dispatch modes inside the block.

    Calls of all threads take turns, so no other thread captures meanwhile. Under a FakeTensorMode
    the modes stay, because the model's tensors belong to it.
    """
    # `_global_*_hooks`: no public way to list the hooks of all modules (PyTorch 2.13.0).
    hooks = [getattr(torch_module, f"_global_{name}") for name in _HOOKS]
    off = [(held, number, hook) for held in hooks for number, hook in held.items() if is_tools(hook)]
    for held, number, _ in off:
        del held[number]
    # `_get_dispatch_mode(FAKE)`: no public question for the active FakeTensorMode (PyTorch 2.13.0).
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    try:
        with contextlib.nullcontext() if is_fake else _disable_current_modes():
            yield
    finally:
        for held, number, hook in off:
            held[number] = hook
