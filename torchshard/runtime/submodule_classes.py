"""The classes of a sharded model and its submodules, made for the classes of the unsharded modules.

Each is a subclass of `ShardedSubmodule` and of the unsharded module's class, so loops over `modules()` that look for
layers by `isinstance` still work. (`torch.distributed.fsdp.fully_shard` makes an `FSDPLinear` in the same way.)
Methods of the model's own classes run with the sharded modules as `self`, until they call a submodule or treat a
slice as the full tensor.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import NoReturn, TypeVar, cast

from torch import nn

from torchshard.core.errors import SliceWarning
from torchshard.runtime.adapters import UNLOADING, is_unloading, merging_method
from torchshard.runtime.containers import container_methods
from torchshard.runtime.generation import with_self
from torchshard.runtime.refusals import no_method
from torchshard.weights.callers import running_method

AS_FORWARD = "let the model's forward compute this, as for an argument `only=...`, and call the whole model"
M = TypeVar("M", bound=nn.Module)


class EqualToItsSource(type):
    """The metaclass that makes each class here equal to its source's class: `type(m) == nn.Linear` stays true."""

    made_for: type | None = None

    def __eq__(cls, other: object) -> bool:
        return cls is other or (cls.made_for is not None and cls.made_for is other)

    def __hash__(cls) -> int:
        return type.__hash__(cls if cls.made_for is None else cls.made_for)


_CLASSES: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()
"""Class of unsharded modules -> class of their submodules here.

One class serves all models, so `type(a) is type(b)` stays true for two linears. Weak: a class lives
only as long as its instances.
"""
_MODEL_CLASSES: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()
"""Class of unsharded models -> class of sharded ones: `torch.func.stack_module_state` requires equal classes."""


def class_of_model(base: type[M], model: nn.Module) -> type[M]:
    """Returns a subclass of `base` with the signature of an unsharded model's forward, which training loops read."""
    if "forward" in vars(model):
        return _class_of_model(base, model)
    made = _MODEL_CLASSES.get(type(model))
    if made is None:
        made = _MODEL_CLASSES[type(model)] = _class_of_model(base, model)
    return cast(type[M], made)


def _class_of_model(base: type[M], model: nn.Module) -> type[M]:
    function = cast(FunctionType, base.forward)
    # a copy of the function, because each class has its own signature
    forward = FunctionType(function.__code__, function.__globals__)
    with contextlib.suppress(AttributeError, ValueError):  # `check_weights` refuses these
        forward.__signature__ = with_self(inspect.signature(model.forward))  # type: ignore[attr-defined]
    namespace = {"forward": forward, "made_for": base, "__module__": base.__module__, **container_methods(type(model))}
    return cast(type[M], cast(type, type(base))(type(model).__name__, (base,), namespace))


def class_for(base: type[M], source: type[nn.Module]) -> type[M]:
    """Returns a subclass of `base` and of a module's class, with that class's methods hidden.

    It has the name of that class, because recipes read it:
    `m.__class__.__name__.startswith("Dropout")`, `m._get_name()`.
    """
    made = _CLASSES.get(source)
    if made is None:
        metaclass = EqualToItsSource
        if type(source) is not type:  # a metaclass must be a subclass of the metaclasses of all bases
            metaclass = cast(type[EqualToItsSource], type("EqualToItsSource", (EqualToItsSource, type(source)), {}))
        namespace = {"made_for": source, "__module__": base.__module__, **_hiding_methods(base, source)}
        namespace |= container_methods(source)
        made = _CLASSES[source] = metaclass(source.__name__, (base, source), namespace)
    return cast(type[M], made)


def _hiding_methods(base: type[nn.Module], source: type) -> dict[str, object]:
    """Returns attributes that hide the methods of a module's class.

    A method that overrides one of `nn.Module` is hidden by the original, others by their
    `own_attribute`.
    """
    hidden: dict[str, object] = {}
    for cls in source.__mro__[: source.__mro__.index(nn.Module)]:
        for name, value in vars(cls).items():
            if name in hidden or name in _OF_CLASSES or name in vars(base):
                continue
            if hasattr(nn.Module, name):
                hidden[name] = inspect.getattr_static(nn.Module, name)
            elif isinstance(value, (FunctionType, classmethod, staticmethod)):
                hidden[name] = own_attribute(source, name, value)
    return hidden


def own_attribute(source: type, name: str, value: object) -> object:
    """Returns an attribute of an unsharded module's class for its sharded module, the `self` of its methods."""
    if isinstance(value, (classmethod, staticmethod)):
        return staticmethod(value.__get__(None, source))
    if not isinstance(value, FunctionType):
        return value
    full_name = f"{source.__name__}.{name}"
    if is_unloading(source, name):
        return functools.partialmethod(_refuse_called, full_name, "it replaces modules of the model", UNLOADING)
    return merging_method(source, name) or _with_slices(value, source, full_name)


def _with_slices(method: FunctionType, source: type, name: str) -> Callable[..., object]:
    """Returns a method that runs on a sharded module; it raises where it would treat a slice as the full tensor."""
    calls_super = "__class__" in inspect.unwrap(method).__code__.co_freevars

    @functools.wraps(method)
    def run(self: nn.Module, *args: object, **kwargs: object) -> object:
        if calls_super and not isinstance(self, source):
            raise no_method(name, f"it calls super(), and a sharded model is no {source.__name__}", AS_FORWARD)
        with warnings.catch_warnings(), running_method(name):
            warnings.simplefilter("error", SliceWarning)
            try:
                return method(self, *args, **kwargs)
            except SliceWarning as warning:
                raise no_method(name, f"it takes a slice for the whole: {warning}", AS_FORWARD) from warning

    return run


_OF_CLASSES = frozenset([
    *vars(type("", (), {})), "__annotations__", "__class_getitem__", "__parameters__", "__slots__",
])  # fmt: skip
"""Attributes that Python itself adds to classes."""


def _refuse_called(module: object, name: str, why: str, attempt: str, *args: object, **kwargs: object) -> NoReturn:
    raise no_method(name, why, attempt)
