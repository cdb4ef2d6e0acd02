"""Splits arguments and results into tensors and structure; one graph serves equal structures.

Every value except tensors (None, numbers, flags) is part of the call's structure: a graph is
captured for it. Structures are compared by value. Objects that PyTorch's pytree does not know are
opened: their attributes are flattened. Functions and classes, including the classes of objects, are
compared by their code and the values that it reads.

PyTorch's own flattening (`torch.utils._pytree`, checked in 2.13) treats an object of an
unregistered class as one opaque leaf, and export refuses it as an input. This module opens such
objects, such as caches, and compares the leaves that are not tensors. It will be unnecessary once
export accepts any object as an argument and returns a key for the values that the graph depends on.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchshard.capture.looks import own_attributes, own_class
from torchshard.capture.namespaces import (
    Values,
    array_content,
    has_attributes,
    is_array,
    kind_of,
    values_of_object,
    version_of,
)
from torchshard.capture.visible import Visible, visible_from
from torchshard.core.errors import InputError


@dataclass(frozen=True)
class Leaves:
    """The tensors of a nested value, and a function that rebuilds the value from others."""

    tensors: tuple[Tensor, ...]
    """In order; while a model is traced, dynamic numbers (SymInt and the like) too."""
    names: tuple[str, ...]
    """The place of each tensor: 'ids', 'batch.mask', 'past[0][1]'."""
    structure: tuple[str, Sequence[object]]
    """(repr of the pytree spec, leaves other than tensors). For a call: hashable, and its repr equals on all ranks."""
    rebuild: Callable[..., Any]
    """Rebuilds the nested value from tensors; the second argument resolves each `ReferenceTo`."""
    arguments: tuple[Sequence[object], Mapping[str, object]] = ((), {})
    """For a call: the positional arguments and keywords as passed; `rebuild` makes new containers of equal content."""
    positional: Sequence[str] = ()
    """For a call: the parameter names of the positional arguments."""
    numbers: tuple[int, ...] = ()
    """The integers that vary between calls, such as a position; `rebuild`'s third argument."""
    number_names: tuple[str, ...] = ()
    """The places of the integers in `numbers`."""
    repeated: frozenset[int] = frozenset()
    """For a call: the ids of lists, dicts and objects that occur in more than one place."""

    @property
    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors with their names, in order."""
        return zip(self.names, self.tensors, strict=True)


@dataclass(frozen=True)
class ReferenceTo:
    """Refers to an object among a call's arguments, within the call's result."""

    keys: tuple[Hashable, ...]
    """The names and indices that lead to it from the positional arguments and the keywords."""


@dataclass(frozen=True)
class _Number:
    """Replaces, in a structure, an integer that varies between calls."""


_TENSORS = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_COMPARED_BY_VALUE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, ReferenceTo, _Number,
)  # fmt: skip
_COMPARED_BY_IDENTITY = (
    type, nn.Module, torch.Generator, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip


class _Identity:
    """A leaf that equals only itself; the reference keeps its id from being reused."""

    def __init__(self, leaf: object) -> None:
        self.leaf = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.leaf is other.leaf

    def __hash__(self) -> int:
        return id(self.leaf)

    def __repr__(self) -> str:
        # Without the address, which differs between ranks.
        name = getattr(self.leaf, "__qualname__", getattr(self.leaf, "co_qualname", type(self.leaf).__qualname__))
        return f"the object {name}"


def _key(leaf: object) -> Hashable:
    """The key of a leaf other than a tensor: equal for equal leaves of one type.

    Raises:
        InputError: leaves of this type can't be compared.
    """
    # A slice is not hashable before Python 3.12.
    if isinstance(leaf, slice):
        return (slice, leaf.start, leaf.stop, leaf.step)
    if isinstance(leaf, float | complex):
        return (type(leaf), repr(leaf))  # nan equals nan, and 0.0 does not equal -0.0
    if isinstance(leaf, _COMPARED_BY_VALUE):
        return (type(leaf), leaf)
    if isinstance(leaf, set | frozenset):
        return (type(leaf), tuple(sorted((_key(item) for item in leaf), key=repr)))
    if isinstance(leaf, types.FunctionType | types.MethodType | functools.partial | type | nn.Module):
        return code_key(leaf)
    if isinstance(leaf, _COMPARED_BY_IDENTITY):
        return _Identity(leaf)
    raise InputError(
        f"an argument holds a {type(leaf).__qualname__}",
        where=type(leaf).__module__,
        why="its content would become part of the graph, and two of these objects can't be compared",
        attempt="a tensor (torch.as_tensor of an array), numbers and strings, or a dict, list or dataclass of them",
    )


def code_key(value: object) -> Hashable:
    """The key of a function, class or other callable: equal for equal code that reads equal values.

    Identity would not do, because each call that passes a lambda makes a new function. Code alone
    would not do either, because it may read globals.
    """
    visible = visible_from(value)
    held = ((place, _key_of_held(one, visible)) for place, one in visible.values())
    return (_key_of_held(value, visible), *held)


def _key_of_held(value: object, visible: Visible) -> Hashable:
    if id(value) in visible.places:
        return (_Identity(type(value)), visible.places[id(value)])
    if isinstance(value, Tensor):
        return (_Identity(value), version_of(value))
    if is_array(value):
        return (type(value).__name__, array_content(value))
    if isinstance(value, types.FunctionType | types.MethodType | type | nn.Module):
        return _Identity(value)
    try:
        return _key(value)
    except InputError:
        return _Identity(value)


def look_key(tensor: Tensor) -> Hashable:
    """The key of a tensor's class and attributes, as Python code sees them; None if plain."""
    cls, attributes = own_class(tensor), own_attributes(tensor)
    if cls is None and not attributes:
        return None
    visible = visible_from(attributes)
    return (cls, *((name, _key_of_held(value, visible)) for name, value in sorted(attributes.items())))


def is_opened(value: object) -> bool:
    """Whether a value is an object with attributes, of a class unknown to pytree and `_key`."""
    known = (*_TENSORS, *_COMPARED_BY_VALUE, *_COMPARED_BY_IDENTITY, set, frozenset, dict, list, tuple)
    # `_Opened.close` makes the object by object.__new__.
    has_plain_new = getattr(type(value), "__new__", None) is object.__new__
    if isinstance(value, known) or type(value) in pytree.SUPPORTED_NODES or not has_plain_new:
        return False
    return has_attributes(value)


def _open(value: object, ancestors: tuple[int, ...] = ()) -> object:
    """Replaces unknown objects with `_Opened` ones, recursively.

    Raises:
        InputError: an object contains itself.
    """

    def open_leaf(leaf: object) -> object:
        if not is_opened(leaf):
            return leaf
        if id(leaf) in ancestors:
            raise InputError(
                f"an argument of type {type(leaf).__qualname__} holds itself",
                where=type(leaf).__module__,
                why="arguments are taken apart to find their tensors",
                attempt="pass the tensors themselves, or a dict of them",
            )
        return _Opened(type(leaf), {k: _open(v, (*ancestors, id(leaf))) for k, v in values_of_object(leaf).items()})

    return pytree.tree_map(open_leaf, value, is_leaf=is_opened)


class _Opened:
    """An object with attributes that pytree can flatten."""

    def __init__(self, cls: type, fields: Mapping[str, object]) -> None:
        self.cls, self.fields = cls, fields

    def close(self) -> object:
        """Rebuilds the object without running its `__init__`."""
        result: object = object.__new__(self.cls)
        for name, value in self.fields.items():
            object.__setattr__(result, name, _close(value))
        return result


def _opened_from(values: Iterable[Any], names: Sequence[str]) -> _Opened:
    cls, *fields = values
    return _Opened(cls, dict(zip(names, fields, strict=True)))


pytree.register_pytree_node(
    _Opened,
    lambda o: ([o.cls, *o.fields.values()], tuple(o.fields)),
    _opened_from,
    flatten_with_keys_fn=lambda o: (
        [(pytree.GetAttrKey(k), v) for k, v in {"__class__": o.cls, **o.fields}.items()],
        tuple(o.fields),
    ),
)


def _close(value: object) -> object:
    """Undoes `_open`."""
    return pytree.tree_map(
        lambda leaf: leaf.close() if isinstance(leaf, _Opened) else leaf,
        value,
        is_leaf=lambda leaf: isinstance(leaf, _Opened),
    )


def flatten(value: object, is_number: Callable[[str], bool] | None = None) -> Leaves:
    """Splits nested containers and objects into their tensors and the rest.

    Args:
        is_number: whether the integer at a place varies between calls; None: no integer does.
    """
    leaves, spec = _leaves_with_paths(value)
    opened = any(is_opened(leaf) for _, leaf in leaves)
    if opened:
        leaves, spec = _leaves_with_paths(_open(value))
    is_tensor = [isinstance(leaf, _TENSORS) for _, leaf in leaves]
    others = [None if isinstance(leaf, _TENSORS) else leaf for _, leaf in leaves]
    numbered: dict[int, str] = {}
    if is_number is not None:
        places = {i: pytree.keystr(path) for i, (path, leaf) in enumerate(leaves) if type(leaf) is int}
        numbered = {i: place for i, place in places.items() if is_number(place)}

    def rebuild(
        tensors: Sequence[object],
        find: Callable[[ReferenceTo], object] = lambda leaf: leaf,
        numbers: Sequence[object] | None = None,
    ) -> object:
        rest, own = iter(tensors), list(others)
        for i, number in zip(numbered, numbers or (), strict=numbers is not None):
            own[i] = number
        constants = (find(leaf) if isinstance(leaf, ReferenceTo) else leaf for leaf in own)
        full = [next(rest) if replaced else leaf for replaced, leaf in zip(is_tensor, constants, strict=True)]
        result = pytree.tree_unflatten(full, spec)
        return _close(result) if opened else result

    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, _TENSORS)]
    names = tuple(pytree.keystr(path) for path, _ in tensors)
    compared = [_Number() if i in numbered else leaf for i, leaf in enumerate(others)]
    return Leaves(
        tuple(leaf for _, leaf in tensors),  # type: ignore[misc]
        names,
        (repr(spec), compared),
        rebuild,
        numbers=tuple(others[i] for i in numbered),  # type: ignore[misc]
        number_names=tuple(numbered.values()),
    )


def _leaves_with_paths(value: object) -> tuple[list[tuple[pytree.KeyPath, object]], pytree.TreeSpec]:
    """pytree's leaves with their paths. If any class lacks key names, the path of every leaf is its index."""
    try:
        return pytree.tree_flatten_with_path(value)
    except ValueError:
        leaves, spec = pytree.tree_flatten(value)
        return [((pytree.SequenceKey(i),), leaf) for i, leaf in enumerate(leaves)], spec


def with_keys(flat: Leaves) -> Leaves:
    """Replaces the leaves in the structure with their keys, which can be compared."""
    spec, others = flat.structure
    return dataclasses.replace(flat, structure=(spec, tuple(map(_key, others))))


def check_results(results: Leaves) -> None:
    """Checks that all leaves of a result except tensors are constants, which a graph can return.

    Raises:
        InputError: a leaf is an object that may contain tensors, or differ between calls.
    """
    with_keys(results)


def memory_order(tensor: Tensor) -> Hashable:
    """The order of dims in memory, regardless of sizes; it decides whether a reshape is a view."""
    if tensor.is_contiguous():
        return None
    strides, shape = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    joined = tuple(strides[i] == strides[i + 1] * shape[i + 1] for i in range(tensor.ndim - 1))
    return order, joined, tuple(stride == 0 for stride in strides)


def children(value: object) -> Values | None:
    """The values in a container or object, by name or index; None for other values."""
    return kind_of(value).read(value) if isinstance(value, (list, dict, tuple)) or is_opened(value) else None


def varying(call: Leaves) -> tuple[bool, ...]:
    """For each integer among a call's arguments, whether it varies between calls."""
    kinds = (key[0] for key in call.structure[1] if isinstance(key, tuple))
    return tuple(kind is _Number for kind in kinds if kind in (int, _Number))
