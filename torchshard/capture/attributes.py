"""The values that a forward reads and writes beside its arguments, parameters and buffers, before and after a call.

A graph is captured with the values that they have at its capture. `attributes` lists them, `changed` compares two
lists, and `Snapshot` undoes the assignments of a capture; `watch` notices changes between calls.
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
    """Place -> value, for all values that a forward can read and that hold no others, except code."""
    visible = visible_to(model)
    return {
        place: _frozen(value)
        for place, value in visible.values()
        if id(value) not in visible.places and not callable(value)
    }


def settings(model: nn.Module) -> list[object]:
    """The objects that a model reads and that are no part of it.

    These are its hooks and the containers and objects among its attributes, such as a configuration, if they hold no
    modules and none of its tensors; and the objects whose methods are its hooks, such as a trainer, whatever they hold.
    """
    values = [value for module in model.modules() for value in Namespace(("",), module).items().values()]
    hooks = [hook for module in model.modules() for hook in hooks_of(module)]
    owners = [hook.__self__ for hook in hooks if isinstance(hook, MethodType) and is_open(hook.__self__)]
    candidates = {id(v): v for v in (*values, *hooks) if (is_container(v) and not is_empty(v)) or is_open(v)}
    own_tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [*owners, *(value for value in candidates.values() if not _is_part(value, own_tensors))]


def _is_part(value: object, own_tensors: set[int]) -> bool:
    """Whether a value holds modules, or tensors that are the model's or have gradients."""
    held = [one for _, one in visible_from(value, code=False).values()]
    tensors = [one for one in held if isinstance(one, Tensor)]
    return any(isinstance(one, nn.Module) for one in held) or any(
        id(tensor) in own_tensors or tensor.requires_grad for tensor in tensors
    )


def _frozen(value: object) -> object:
    """A copy of a value that may be written to, by which `changed` finds writes; other values as they are."""
    if is_array(value):
        return array_content(value)
    if hasattr(type(value), "bit_generator"):  # numpy.random.Generator
        return repr(value.bit_generator.state)  # type: ignore[attr-defined]
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, Iterator) and not isinstance(value, IOBase):
        return Unknown()  # how far it has come can't be seen without moving it
    return value


class Unknown:
    """The content of a value that can't be compared: it may be another one each time."""


def changed(before: Attributes, after: Attributes) -> list[Place]:
    """The places whose value is another one afterwards, or that exist on one side only."""
    places = dict.fromkeys([*before, *after])
    return [p for p in places if not (p in before and p in after and _is_same(before[p], after[p]))]


def _is_same(a: object, b: object) -> bool:
    if a is b or isinstance(a, nn.Parameter):  # a tracer puts its own tensors in the place of parameters
        return True
    if type(a) is not type(b) or type(a) not in COMPARED_BY_VALUE:
        return False
    if isinstance(a, torch.Size) and isinstance(b, torch.Size):
        # Comparing dynamic sizes would add a guard to the graph.
        return not any(isinstance(size, torch.SymInt) for size in (*a, *b)) and a == b
    return bool(a == b)


def describe(place: Place) -> str:
    """'attn.cache', 'seen[3]'."""
    path, name, *keys = place
    return ".".join(filter(None, (path, name))) + "".join(keys)


class Snapshot:
    """The values that a model's forward can read or write, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        own_dicts = [value for m in model.modules() for value in (m.__dict__, *m.__dict__.values())]
        self.visible = visible_to(model)
        self._attributes = [(namespace, namespace.items()) for namespace in self.visible.namespaces]
        found = [value for _, value in self.visible.values()]
        functions = [v.__func__ if isinstance(v, (staticmethod, classmethod)) else v for v in found]
        caches = {id(f): f for f in functions if isinstance(f, functools._lru_cache_wrapper)}
        self._caches = [(cache, cache.cache_info().misses) for cache in caches.values()]
        # Forward may register parameters, buffers, submodules and hooks, whose dicts are not attributes.
        namespaces_of_dicts = [Namespace(("",), value) for value in own_dicts if type(value) in (dict, OrderedDict)]
        self._dicts = [(namespace, namespace.items()) for namespace in namespaces_of_dicts]

    def restore_attributes(self) -> None:
        """Undoes assignments to attributes; parameters, buffers, submodules and hooks stay as they are."""
        for namespace, previous in self._attributes:
            namespace.restore(previous)
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # it may hold tensors of the capture, which have no values

    def restore(self) -> None:
        """Undoes all assignments."""
        self.restore_attributes()
        for namespace, previous in self._dicts:
            namespace.restore(previous)
