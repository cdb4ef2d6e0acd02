"""Carried values: values that a call stores in its arguments for the next call, such as caches.

    cache.keys = torch.cat([cache.keys, k], 2)     an object's tensor is replaced
    past.append((k, v))                            a list grows
    state["h"].mul_(0.9)                           a tensor is written to

A graph returns the new values as further results. After a call they are stored in the caller's
objects, where forward would have stored them. If forward returns one of these objects, the caller
gets its own object back.

`torch.export` records writes to tensors in the arguments, but not that an object gets another
tensor or that a list grows (PyTorch 2.13). This module could go if the exported program had such
changes of arguments among its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchshard.capture.call_arguments import argument_name
from torchshard.capture.keys import ReferenceTo
from torchshard.capture.namespaces import Values, kind_of
from torchshard.capture.signature import Leaves, children, flatten
from torchshard.core.modules import version_of

Keys = tuple[Hashable, ...]
"""The names and indices that lead from (args, kwargs) to a value."""


@dataclass(frozen=True)
class Changes:
    """The objects among the arguments that a call changes."""

    holders: tuple[Keys, ...] = ()
    results: int = 0
    """The number of tensors in forward's result; the tensors of the changes follow them."""
    names: tuple[str, ...] = ()
    """The place of each tensor of the changes, named as an input: 'past.layers[0].keys'."""
    numbers: tuple[str, ...] = ()
    """The places of integers that a call replaces."""
    whole: frozenset[str] = frozenset()
    """The places of tensors that are written to but not replaced: they stay replicated."""

    def store(self, find: Callable[[ReferenceTo], object], items: Sequence[Values]) -> None:
        """Stores the new values in the objects of a call.

        Args:
            find: returns the objects as they were before the call.
            items: for each object in `holders`, all its items after the call, by name or index.
        """
        holders = [find(ReferenceTo(keys)) for keys in self.holders]
        for keys, holder, values in zip(self.holders, holders, items, strict=True):
            kind = kind_of(holder)
            current = kind.read(holder)
            if _is_fixed(keys, holder):
                _write_tensors(current, values)
            else:
                kind.write(holder, dict(values), current)


def _is_fixed(keys: Keys, holder: object) -> bool:
    """Whether an object always has the same items: a tuple, or the arguments themselves."""
    return isinstance(holder, tuple) or len(keys) == 1


def _write_tensors(current: Values, values: Values) -> None:
    """Copies new values into the tensors of an object that always has the same items."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value is not current[name]:
            cast(Tensor, current[name]).copy_(value)


def _step(holder: object, name: object) -> str:
    """One step of a place, in pytree's format: '[0]', "['h']" or '.keys'."""
    return f"[{name!r}]" if isinstance(holder, (list, dict, tuple)) else f".{name}"


class _Holder(NamedTuple):
    """An object among the arguments that contains others, as it was before the call."""

    keys: Keys
    place: str
    value: object
    items: Values

    @property
    def is_fixed(self) -> bool:
        return _is_fixed(self.keys, self.value)

    def place_of(self, name: object) -> str:
        return self.place + _step(self.value, name)


class Arguments:
    """The objects among a call's arguments, as they were before the call."""

    def __init__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self._holders: dict[int, _Holder] = {}
        self._versions: dict[int, int] = {}
        for keys, place, value in ((0,), "[0]", tuple(args)), ((1,), "[1]", dict(kwargs)):
            self._note(keys, place, value)
        self._tops = {id(holder.value) for holder in self._holders.values() if len(holder.keys) == 1}

    def _note(self, keys: Keys, place: str, value: object) -> None:
        if isinstance(value, Tensor):
            self._versions[id(value)] = version_of(value)
        held = children(value)
        if held is None or id(value) in self._holders:
            return
        self._holders[id(value)] = _Holder(keys, place, value, held)
        for name, child in held.items():
            self._note((*keys, name), place + _step(value, name), child)

    def referencing(self, value: object) -> object:
        """Replaces each object among the arguments with a `ReferenceTo`."""
        known = self._holders.keys() - self._tops
        return pytree.tree_map(
            lambda leaf: ReferenceTo(self._holders[id(leaf)].keys) if id(leaf) in known else leaf,
            value,
            is_leaf=lambda leaf: id(leaf) in known and not isinstance(leaf, tuple),
        )

    def with_changes(self, value: object, positional: Sequence[str]) -> tuple[Leaves, Changes]:
        """Collects the tensors of forward's result, then those that the arguments contain now.

        Args:
            positional: the parameter names of the positional arguments.
        """
        changes = list(self._changes())
        given, left = flatten(self.referencing(value)), flatten([items for _, items in changes])
        first = len(given.tensors)

        def rebuild(tensors: Sequence[object], find: Callable[[ReferenceTo], object]) -> tuple[object, object]:
            return given.rebuild(tensors[:first], find), left.rebuild(tensors[first:], find)

        structure = given.structure[0] + left.structure[0], [*given.structure[1], *left.structure[1]]
        leaves = Leaves((*given.tensors, *left.tensors), (*given.names, *left.names), structure, rebuild)
        places = [{f"[{name!r}]": holder.place_of(name) for name in items} for holder, items in changes]

        def named(own: Iterable[str]) -> Iterator[str]:
            return (argument_name(place, positional) for place in own)

        return leaves, Changes(
            tuple(holder.keys for holder, _ in changes),
            first,
            tuple(named(_place(name, places) for name in left.names)),
            tuple(named(_changed_numbers(changes))),
            frozenset(named(holder.place_of(name) for holder, items in changes if holder.is_fixed for name in items)),
        )

    def _changes(self) -> Iterator[tuple[_Holder, Values]]:
        """The objects with replaced items or written tensors, and all their current items."""
        for holder in self._holders.values():
            before = holder.items
            now = before if isinstance(holder.value, tuple) else children(holder.value)
            assert now is not None
            changed = {name for name, value in now.items() if name not in before or self._is_new(before[name], value)}
            if changed or now.keys() != before.keys():
                yield (
                    holder,
                    {
                        name: self.referencing(value) if name in changed else ReferenceTo((*holder.keys, name))
                        for name, value in now.items()
                    },
                )

    def _is_new(self, before: object, now: object) -> bool:
        if isinstance(now, Tensor):
            return now is not before or version_of(now) != self._versions[id(now)]
        if now is before:
            return False
        return type(now) is not type(before) or id(now) in self._holders or not _equal(before, now)


def _changed_numbers(changes: Iterable[tuple[_Holder, Values]]) -> Iterator[str]:
    """The places of integers that a call replaces."""
    for holder, items in changes:
        for name, value in items.items():
            if isinstance(value, int | torch.SymInt) and type(holder.items.get(name)) in (int, torch.SymInt):
                yield holder.place_of(name)


def _place(name: str, places: Sequence[Mapping[str, str]]) -> str:
    """The place in (args, kwargs) of a tensor, by its name in the list that `with_changes` makes.

    The list has one entry per changed object, so a name is "[3]['h'][0]".

    Args:
        places: for each changed object, the place of each of its items.
    """
    number, _, rest = name[1:].partition("]")
    item = next(item for item in places[int(number)] if rest.startswith(item))
    return places[int(number)][item] + rest.removeprefix(item)


def _equal(before: object, now: object) -> bool:
    # By text, nan equals nan, and 0.0 does not equal -0.0.
    simple = (bool, int, float, complex, str, bytes)
    return isinstance(now, simple) and repr(before) == repr(now)


def finder(arguments: object) -> Callable[[ReferenceTo], object]:
    """Returns a function that finds objects in a call's arguments; it opens each object once."""
    opened: dict[Keys, Values] = {}

    def find(keys: Keys) -> object:
        if not keys:
            return arguments
        if keys[:-1] not in opened:
            held = children(find(keys[:-1]))
            assert held is not None
            opened[keys[:-1]] = held
        return opened[keys[:-1]][keys[-1]]

    return lambda reference: find(reference.keys)
