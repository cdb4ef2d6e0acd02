"""What a call leaves in its arguments for the next one: caches, and the states of recurrent models.

    cache.keys = torch.cat([cache.keys, k], 2)     an object's tensor is replaced
    past.append((k, v))                            a list grows
    state["h"].mul_(0.9)                           a tensor is written to

A graph has the new values as further results. After a call they are stored in the caller's objects, where forward would
have stored them; a result that is one of these objects is the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchshard.capture.namespaces import kind_of, version_of
from torchshard.capture.signature import Leaves, ReferenceTo, argument_name, flatten, is_opened

Keys = tuple[Any, ...]
"""The names and indices that lead from (args, kwargs) to a value."""


@dataclass(frozen=True)
class Changes:
    """The objects among the arguments that hold other values after a call."""

    holders: tuple[Keys, ...] = ()
    results: int = 0
    """How many tensors the value of forward has; those of the changes follow."""
    names: tuple[str, ...] = ()
    """The place of each of the latter, as the inputs' are named: 'past.layers[0].keys'."""
    numbers: tuple[str, ...] = ()
    """The places of integers that are others after a call."""
    whole: frozenset[str] = frozenset()
    """The places of tensors that are written to, and not replaced: they stay whole."""

    def store(self, arguments: object, items: Sequence[Mapping[Any, object]]) -> None:
        """Stores values in the objects of a call.

        Args:
            items: of each object in `holders`, all that it holds then, by name or index.
        """
        for keys, values in zip(self.holders, items, strict=True):
            holder = value_at(arguments, keys)
            if _is_fixed(keys, holder):
                _write_tensors(holder, values)
            else:
                kind = kind_of(holder)
                kind.write(holder, dict(values), kind.read(holder))


def _is_fixed(keys: Keys, holder: object) -> bool:
    """Whether an object holds the same values always: a tuple, and the arguments themselves."""
    return isinstance(holder, tuple) or len(keys) == 1


def _write_tensors(holder: Any, values: Mapping[Any, object]) -> None:
    """Writes to the tensors of a tuple, which holds the same tensors always."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value is not holder[name]:
            holder[name].copy_(value)


def _children(value: object) -> dict[Any, object] | None:
    """The values that a container or an object holds, by name or index; None if it is neither."""
    if isinstance(value, tuple):
        return dict(enumerate(value))
    return kind_of(value).read(value) if isinstance(value, (list, dict)) or is_opened(value) else None


def _step(holder: object, name: object) -> str:
    """As pytree shows it: '[0]', "['h']" or '.keys'."""
    return f"[{name!r}]" if isinstance(holder, (list, dict, tuple)) else f".{name}"


class Arguments:
    """The objects among a call's arguments, as they were before it."""

    def __init__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self._holders: dict[int, tuple[Keys, str, Any, dict[Any, object]]] = {}
        self._versions: dict[int, int] = {}
        for keys, place, value in ((0,), "[0]", tuple(args)), ((1,), "[1]", dict(kwargs)):
            self._note(keys, place, value)
        self._tops = {id(holder) for keys, _, holder, _ in self._holders.values() if len(keys) == 1}

    def _note(self, keys: Keys, place: str, value: object) -> None:
        if isinstance(value, Tensor):
            self._versions[id(value)] = version_of(value)
        children = _children(value)
        if children is None or id(value) in self._holders:
            return
        self._holders[id(value)] = keys, place, value, children
        for name, child in children.items():
            self._note((*keys, name), place + _step(value, name), child)

    def referencing(self, value: object) -> object:
        """The value with a `ReferenceTo` in place of each object among the arguments."""
        known = self._holders.keys() - self._tops
        return pytree.tree_map(
            lambda leaf: ReferenceTo(self._holders[id(leaf)][0]) if id(leaf) in known else leaf,
            value,
            is_leaf=lambda leaf: id(leaf) in known and not isinstance(leaf, tuple),
        )

    def with_changes(self, value: object, positional: Sequence[str]) -> tuple[Leaves, Changes]:
        """The tensors of forward's value, and after them those that the arguments hold now.

        Args:
            positional: the names of the parameters of the positional arguments.
        """
        changes = list(self._changes())
        given, left = flatten(self.referencing(value)), flatten([items for _, _, items in changes])
        first = len(given.tensors)

        def rebuild(tensors: Sequence[object], find: Callable[[ReferenceTo], object]) -> tuple[object, object]:
            return given.rebuild(tensors[:first], find), left.rebuild(tensors[first:], find)

        structure = given.structure[0] + left.structure[0], [*given.structure[1], *left.structure[1]]
        leaves = Leaves((*given.tensors, *left.tensors), (*given.names, *left.names), structure, rebuild)
        places = [
            {f"[{name!r}]": place + _step(self._holder(keys), name) for name in items} for keys, place, items in changes
        ]
        names = tuple(argument_name(_place(name, places), positional) for name in left.names)
        numbers = tuple(argument_name(place, positional) for place in self._changed_numbers(changes))
        fixed = (items.values() for (keys, _, _), items in zip(changes, places, strict=True) if self._is_fixed(keys))
        whole = frozenset(argument_name(place, positional) for items in fixed for place in items)
        return leaves, Changes(tuple(keys for keys, _, _ in changes), first, names, numbers, whole)

    def _is_fixed(self, keys: Keys) -> bool:
        return _is_fixed(keys, self._holder(keys))

    def _changed_numbers(self, changes: Sequence[tuple[Keys, str, dict[Any, object]]]) -> Iterator[str]:
        before = {keys: items for keys, _, _, items in self._holders.values()}
        for keys, place, items in changes:
            for name, value in items.items():
                if isinstance(value, int | torch.SymInt) and type(before[keys].get(name)) in (int, torch.SymInt):
                    yield place + _step(self._holder(keys), name)

    def _holder(self, keys: Keys) -> object:
        return next(holder for own, _, holder, _ in self._holders.values() if own == keys)

    def _changes(self) -> Iterator[tuple[Keys, str, dict[Any, object]]]:
        """The objects that hold other values now, or tensors that were written to: their keys, place and items."""
        for keys, place, holder, before in self._holders.values():
            now = before if isinstance(holder, tuple) else _children(holder)
            assert now is not None
            changed = {name for name, value in now.items() if name not in before or self._is_new(before[name], value)}
            if changed or now.keys() != before.keys():
                items = {
                    name: self.referencing(value) if name in changed else ReferenceTo((*keys, name))
                    for name, value in now.items()
                }
                yield keys, place, items

    def _is_new(self, before: object, now: object) -> bool:
        if isinstance(now, Tensor):
            return now is not before or version_of(now) != self._versions[id(now)]
        if now is before:
            return False
        return type(now) is not type(before) or id(now) in self._holders or not _equal(before, now)


def _place(name: str, places: Sequence[Mapping[str, str]]) -> str:
    """The place of a tensor in (args, kwargs), of its name in the list that `with_changes` makes: "[3]['h'][0]".

    Args:
        places: of each object that has changed, the place of each of its items.
    """
    number, _, rest = name[1:].partition("]")
    item = next(item for item in places[int(number)] if rest.startswith(item))
    return places[int(number)][item] + rest.removeprefix(item)


def _equal(before: object, now: object) -> bool:
    simple = (bool, int, float, complex, str, bytes)
    return isinstance(now, simple) and repr(before) == repr(now)


def value_at(arguments: object, keys: Keys) -> Any:
    """The value to which names and indices lead."""
    for key in keys:
        children = _children(arguments)
        assert children is not None
        arguments = children[key]
    return arguments
