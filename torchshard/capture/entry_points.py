"""Replaces, in the modules of one model, the functions that a call enters while the model is captured.

Export calls `model.forward` with a flat list of tensors and knows no hooks of the model itself. So the model gets a
flat forward and no hooks, and has its own back while the flat forward calls it. All of this is stored in the model's
own `__dict__`s, so that other models and threads are not affected.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

_NAMES = ("forward", "_forward_hooks", "_forward_pre_hooks")
"""The attributes that decide what a call of a module runs, apart from its class."""


def replace_forward(model: nn.Module, forward: Callable[..., object]) -> Callable[[], contextlib.ExitStack]:
    """Gives a model another forward and no hooks.

    Returns:
        A function that opens a block in which the model has its own forward and hooks.
    """
    own = {name: model.__dict__[name] for name in _NAMES if name in model.__dict__}
    replaced = {"forward": forward, **{name: OrderedDict[int, object]() for name in _NAMES[1:]}}
    _store(model, replaced)

    def own_entry_points() -> contextlib.ExitStack:
        _store(model, own)
        stack = contextlib.ExitStack()
        stack.callback(_store, model, replaced)
        stack.enter_context(_buffers_as_attributes(model))
        return stack

    return own_entry_points


def _store(model: nn.Module, values: Mapping[str, object]) -> None:
    for name in _NAMES:
        model.__dict__.pop(name, None)
    model.__dict__.update(values)


@contextlib.contextmanager
def _buffers_as_attributes(model: nn.Module) -> Iterator[None]:
    """Makes a buffer that forward registers a plain attribute: a cache, or state, as plain attributes are.

    Export refuses new buffers, because it takes the buffers to be complete before forward runs.
    """
    modules = [module for module in model.modules() if "register_buffer" not in module.__dict__]
    for module in modules:
        module.__dict__["register_buffer"] = functools.partial(_register_buffer, module)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("register_buffer", None)


def _register_buffer(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
    if name in module._buffers:
        type(module).register_buffer(module, name, tensor, persistent)
    else:
        module.__dict__[name] = tensor


class _PlainModule(nn.Module):
    """Stands for an `fx.GraphModule`."""


def as_plain_module(model: nn.Module) -> nn.Module:
    """The model for export, which would run the nodes of an `fx.GraphModule` and not its forward."""
    if not isinstance(model, torch.fx.GraphModule):
        return model
    module = object.__new__(_PlainModule)
    module.__dict__ = model.__dict__  # the same dict, so that the forward that is set here counts too
    return module
