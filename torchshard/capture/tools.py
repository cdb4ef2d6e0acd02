"""Hooks of PyTorch's own tools on all modules: `CommDebugMode`, `ModuleTracker`. They are no part of a model.

Within a capture they would run on fake tensors, and their hooks on results would become ops of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn.modules import module as torch_module

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def is_tools(hook: object) -> bool:
    """Whether a hook on all modules is PyTorch's."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")


@contextlib.contextmanager
def without_tools() -> Iterator[None]:
    """Takes the tools' hooks off; calls of all threads take turns, so that nobody else captures meanwhile."""
    hooks = [getattr(torch_module, f"_global_{name}") for name in _HOOKS]
    off = [(held, number, hook) for held in hooks for number, hook in held.items() if is_tools(hook)]
    for held, number, _ in off:
        del held[number]
    try:
        yield
    finally:
        for held, number, hook in off:
            held[number] = hook
