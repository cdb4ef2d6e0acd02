"""Hugging Face's `generate()` for a sharded model, with Hugging Face's samplers, beams, stopping and streaming.

Their code runs as methods of a shell: an object of the unsharded model's class, with its
configuration. Calling the shell calls the sharded model.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from torchshard.core.errors import InputError
from torchshard.core.layouts import SEQUENCE

_GENERATION = "transformers.generation."
"""The package with the methods that a shell runs."""
_METHODS = frozenset({"generate", "can_generate"})
"""Methods that models may override, as Whisper does."""


class Sharded(Protocol):
    """A sharded model, as generation uses it."""

    @property
    def source(self) -> nn.Module:
        """The unsharded model, without memory."""

    @property
    def divided_dims(self) -> frozenset[int]:
        """The dims of inputs that are split across ranks: the batch, the sequence."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls the model."""

    def call_part(self, path: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Calls a submodule."""


def generation_method(model: Sharded, name: str) -> Callable[..., object] | None:
    """Returns a method of Hugging Face's generation, such as `generate`, for a sharded model; else None."""
    function = inspect.getattr_static(type(model.source), name, None)
    function = getattr(function, "__func__", function)
    is_theirs = getattr(function, "__module__", "").startswith("transformers.")
    if not is_theirs or (name not in _METHODS and not function.__module__.startswith(_GENERATION)):
        return None
    method: Callable[..., object] = getattr(_shell(model), name)
    return method


def _shell(model: Sharded) -> nn.Module:
    source, reference = model.source, weakref.ref(model)

    def sharded() -> Sharded:
        found = reference()
        assert found is not None
        return found

    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        return sharded()(*args, **kwargs)

    def never(self: nn.Module, *args: object, **kwargs: object) -> bool:
        return False

    def generate(self: nn.Module, *args: object, **kwargs: object) -> object:
        if SEQUENCE in sharded().divided_dims:
            raise InputError(
                "a model whose ranks divide the sequence can't generate",
                where="generate",
                why="each rank would continue its own part of the prompt",
                attempt="a mesh that divides the batch or the weights, with the same weights",
            )
        if sharded().divided_dims and kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True  # a rank that has finished its sequences keeps calling until all have
        return type(source).generate(self, *args, **kwargs)  # type: ignore[attr-defined]

    def get_encoder(self: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        part = source.get_encoder(*args, **kwargs)  # type: ignore[operator]
        path = next(path for path, module in source.named_modules() if module is part)

        def call_part(self: nn.Module, *args: object, **kwargs: object) -> object:
            return sharded().call_part(path, args, kwargs)

        return _with_methods(part, __call__=call_part)

    return _with_methods(
        source, __call__=call, generate=generate, get_encoder=get_encoder, _valid_auto_compile_criteria=never
    )


def entry_of(model: nn.Module, path: str) -> nn.Module:
    """Returns a module with a model's parameters and names, but with the forward of one submodule."""
    part = model.get_submodule(path)

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return self.get_submodule(path)(*args, **kwargs)

    forward.__signature__ = with_self(inspect.signature(part.forward))  # type: ignore[attr-defined]
    return _with_methods(model, forward=forward)


def with_self(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature with a first parameter `self`."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def _with_methods(module: nn.Module, **methods: Callable[..., object]) -> nn.Module:
    """Returns a module that shares all attributes with another one, but has these methods."""
    made = copy.copy(module)
    cls = type(module)
    made.__class__ = type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
    return made
