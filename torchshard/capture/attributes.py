"""The values that forward reads and writes beyond its arguments, parameters and buffers.

A graph is captured with the values of these attributes at its capture. `attributes` lists them,
`changed` compares two lists, and `Snapshot` undoes the assignments of a capture. `watch` notices
changes between calls.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Iterator
from io import IOBase
from types import MethodType

import torch
from torch import Tensor, nn

from torchshard.capture.namespaces import Namespace, Place, array_content, is_array, is_container, is_empty, is_open
from torchshard.capture.visible import hooks_of, visible_from, visible_to

COMPARED_BY_VALUE = (int, float, str, bool, bytes, frozenset, torch.Size, torch.dtype, torch.device)
Attributes = dict[Place, object]


def attributes(model: nn.Module) -> Attributes:
    """Place -> value, for each value that forward can read; not code, not containers of others."""
    visible = visible_to(model)
    return {
        place: _frozen(value)
        for place, value in visible.values()
        if id(value) not in visible.places and not callable(value)
    }


def settings(model: nn.Module) -> list[object]:
    """The objects that a model reads but does not own, such as a configuration or a trainer.

    These are its hooks, and the containers and objects among its attributes. Those that contain
    modules, tensors of the model or tensors that require gradients are left out. The owner of a
    hook that is a method is always included.
    """
    values = [value for module in model.modules() for value in Namespace(("",), module).items().values()]
    hooks = [hook for module in model.modules() for hook in hooks_of(module)]
    owners = [hook.__self__ for hook in hooks if isinstance(hook, MethodType) and is_open(hook.__self__)]
    candidates = {id(v): v for v in (*values, *hooks) if (is_container(v) and not is_empty(v)) or is_open(v)}
    own_tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [*owners, *(value for value in candidates.values() if not _is_part(value, own_tensors))]


def _is_part(value: object, own_tensors: set[int]) -> bool:
    """Whether a value contains modules, tensors of the model, or tensors that require gradients."""
    held = [one for _, one in visible_from(value, code=False).values()]
    tensors = [one for one in held if isinstance(one, Tensor)]
    return any(isinstance(one, nn.Module) for one in held) or any(
        id(tensor) in own_tensors or tensor.requires_grad for tensor in tensors
    )


def _frozen(value: object) -> object:
    """A value; a copy if it may be written to, so that `changed` finds writes."""
    if is_array(value):
        return array_content(value)
    if hasattr(type(value), "bit_generator"):  # numpy.random.Generator
        return repr(value.bit_generator.state)  # type: ignore[attr-defined]
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, Iterator) and not isinstance(value, IOBase):
        return Unknown()  # its position can't be read without moving it
    return value


class Unknown:
    """The content of a value that can't be compared; `changed` always reports it."""


def changed(before: Attributes, after: Attributes) -> list[Place]:
    """The places with a different value afterwards, and those that exist on one side only."""
    places = dict.fromkeys([*before, *after])
    return [p for p in places if not (p in before and p in after and _is_same(before[p], after[p]))]


def _is_same(a: object, b: object) -> bool:
    if a is b or isinstance(a, nn.Parameter):  # a tracer replaces parameters with tensors of its own
        return True
    if type(a) is not type(b) or type(a) not in COMPARED_BY_VALUE:
        return False
    if isinstance(a, torch.Size) and isinstance(b, torch.Size):
        # Comparing dynamic sizes would add a guard to the graph.
        return not any(isinstance(size, torch.SymInt) for size in (*a, *b)) and a == b
    return bool(a == b)


def describe(place: Place) -> str:
    """Formats a place as text: 'attn.cache', 'seen[3]'."""
    path, name, *keys = place
    return ".".join(filter(None, (path, name))) + "".join(keys)


class Snapshot:
    """Records the values that a model's forward can read or write, to restore them."""

    def __init__(self, model: nn.Module) -> None:
        own_dicts = [value for m in model.modules() for value in (m.__dict__, *m.__dict__.values())]
        self.visible = visible_to(model)
        self._attributes = [(namespace, namespace.items()) for namespace in self.visible.namespaces]
        found = [value for _, value in self.visible.values()]
        functions = [v.__func__ if isinstance(v, (staticmethod, classmethod)) else v for v in found]
        caches = {id(f): f for f in functions if isinstance(f, functools._lru_cache_wrapper)}
        self._caches = [(cache, cache.cache_info().misses) for cache in caches.values()]
        # `visible` leaves out the dicts of parameters, buffers, submodules and hooks, but forward
        # may register some.
        namespaces_of_dicts = [Namespace(("",), value) for value in own_dicts if type(value) in (dict, OrderedDict)]
        self._dicts = [(namespace, namespace.items()) for namespace in namespaces_of_dicts]

    def restore_attributes(self) -> None:
        """Undoes assignments to attributes, but not to parameters, buffers, submodules or hooks."""
        for namespace, previous in self._attributes:
            namespace.restore(previous)
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # may contain the capture's tensors, without values

    def restore(self) -> None:
        """Undoes all assignments, including those to parameters, buffers, submodules and hooks."""
        self.restore_attributes()
        for namespace, previous in self._dicts:
            namespace.restore(previous)
