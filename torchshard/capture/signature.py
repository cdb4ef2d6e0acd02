"""Splits arguments and results into tensors and structure; one graph serves equal structures.

Every value except tensors (None, numbers, flags) is part of the call's structure: a graph is
captured for it. Structures are compared by value (see `keys`). Objects that PyTorch's pytree does
not know are opened: their attributes are flattened.

PyTorch's own flattening (`torch.utils._pytree`, checked in 2.13) treats an object of an
unregistered class as one opaque leaf, and export refuses it as an input. This module opens such
objects, such as caches, and compares the leaves that are not tensors. It will be unnecessary once
export accepts any object as an argument and returns a key for the values that the graph depends on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchshard.capture.keys import KEYED_BY_IDENTITY, KEYED_BY_VALUE, ReferenceTo, VaryingInt, key_of
from torchshard.capture.namespaces import Values, has_attributes, kind_of, values_of_object
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


_TENSORS = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_opened(value: object) -> bool:
    """Whether a value is an object with attributes, of a class unknown to pytree and `key_of`."""
    known = (*_TENSORS, *KEYED_BY_VALUE, *KEYED_BY_IDENTITY, set, frozenset, dict, list, tuple)
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
    compared = [VaryingInt() if i in numbered else leaf for i, leaf in enumerate(others)]
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
    return dataclasses.replace(flat, structure=(spec, tuple(map(key_of, others))))


def check_results(results: Leaves) -> None:
    """Checks that all leaves of a result except tensors are constants, which a graph can return.

    Raises:
        InputError: a leaf is an object that may contain tensors, or differ between calls.
    """
    with_keys(results)


def children(value: object) -> Values | None:
    """The values in a container or object, by name or index; None for other values."""
    return kind_of(value).read(value) if isinstance(value, (list, dict, tuple)) or is_opened(value) else None


def varying(call: Leaves) -> tuple[bool, ...]:
    """For each integer among a call's arguments, whether it varies between calls."""
    kinds = (key[0] for key in call.structure[1] if isinstance(key, tuple))
    return tuple(kind is VaryingInt for kind in kinds if kind in (int, VaryingInt))
