"""Replaces a model's entry points, its forward and hooks, while the model is captured.

`torch.export` passes a flat list of tensors, and the model's own hooks expect its real arguments.
So export sees a flat forward without hooks; while the flat forward calls the model, its own forward
and hooks are back. All of this is stored in the model's own `__dict__`s, so other models are not
affected. No other thread may call this model meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

# `_forward_hooks`, `_forward_pre_hooks`: no public way to list a module's hooks (PyTorch 2.13.0).
_NAMES = ("forward", "_forward_hooks", "_forward_pre_hooks")
"""The attributes that decide which code a call of a module runs, apart from its class."""


def replace_forward(model: nn.Module, forward: Callable[..., object]) -> Callable[[], contextlib.ExitStack]:
    """Gives a model a different forward and no hooks, until the caller restores its attributes.

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
    """Turns a buffer that forward registers into a plain attribute, which `rehearsal` then judges.

    `StateBefore` would refuse a new buffer. Export would lose it: PyTorch 2.13 finds buffers by
    their position (`_export_to_aten_ir_make_fx`), and writes a new one into a different
    placeholder.
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
    """The class of an `fx.GraphModule` while it is exported."""


def as_plain_module(model: nn.Module) -> nn.Module:
    """The model for export, which would run an `fx.GraphModule`'s nodes, not its forward."""
    if not isinstance(model, torch.fx.GraphModule):
        return model
    module = object.__new__(_PlainModule)
    module.__dict__ = model.__dict__  # the same dict, so that the replaced forward counts here too
    return module
