"""Notices, cheaply enough for each call, that a value has changed which a captured graph holds as a constant.

A graph is captured with the attributes, globals and closures that forward reads (see `attributes`). When one of them
changes, the next call needs another graph.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import itertools
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from types import FunctionType

from torch import Tensor, nn
from torch.nn.modules import module as _modules
from torch.utils.weak import WeakIdKeyDictionary

from torchshard.capture.attributes import (
    COMPARED_BY_VALUE,
    Array,
    Attributes,
    Namespace,
    Place,
    array_content,
    attributes,
    describe,
    is_array,
    leaves,
    namespaces,
)
from torchshard.capture.user_code import cells_of

LARGE_ITEMS = 4096
"""Of a list or dict with more items than this, `Watch` compares the first ones only."""


class Watch:
    """Numbers the states of the values that a model's forward can read: 0 at first, a new number for each new state.

    Attributes of the modules themselves are left out: those of a sharded model can't be assigned.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._states = model, dict[str, int]()
        self._numbers = ObjectNumbers()
        self.latest_change = ""
        self._remember()
        self._before = attributes(model)
        self.number = self._number_of_state()

    def __deepcopy__(self, memo: dict[int, object]) -> Watch:
        return Watch(copy.deepcopy(self._model, memo))

    def state(self) -> int:
        """The number of the current state."""
        if not self._is_same():
            current = attributes(self._model)
            places = dict.fromkeys([*self._before, *current])
            changes = [place for place in places if self._text(place, self._before) != self._text(place, current)]
            self.latest_change = describe(changes[0]) if changes else self.latest_change
            self._before = current
            self.number = self._number_of_state()
            self._remember()
        return self.number

    def _remember(self) -> None:
        """Stores the current values in the form in which `_is_same` compares them fastest."""
        watched = [space for space in namespaces(self._model) if not isinstance(space.owner, nn.Module)]
        self._readers = [_reader(namespace) for namespace in watched]
        self._values = [tuple(read()) for read in self._readers]
        self._arrays = [value for _, value in leaves(self._model) if isinstance(value, Tensor) or is_array(value)]
        self._versions = [_version(value) for value in self._arrays]

    def _is_same(self) -> bool:
        for read, previous in zip(self._readers, self._values, strict=True):
            current = tuple(read())
            if len(current) != len(previous) or not all(map(operator.is_, current, previous)):
                return False
        return all(map(operator.eq, map(_version, self._arrays), self._versions))

    def _number_of_state(self) -> int:
        text = repr([(place, self._text(place, self._before)) for place in self._before])
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._states.setdefault(digest, len(self._states))

    def _text(self, place: Place, values: Attributes) -> str:
        """A value as text that is the same on every rank.

        An object without such a text has a number, in order of appearance: its address differs from rank to rank.
        """
        if place not in values:
            return "nothing"
        value = values[place]
        if isinstance(value, _WITH_TEXT):
            return f"{type(value).__name__} {value!r}"
        version = value._version if isinstance(value, Tensor) else 0
        return f"{type(value).__qualname__} {self._numbers.of(value)}.{version}"


class ObjectNumbers:
    """Numbers objects in order of appearance, without keeping them alive."""

    def __init__(self) -> None:
        self._weakly = WeakIdKeyDictionary()
        # An object that cannot be referenced weakly stays referenced, so that no other one can get its id.
        self._strongly: dict[int, tuple[int, object]] = {}
        self._next = itertools.count()

    def of(self, value: object) -> int:
        """The number of an object; a new one for an object not seen before."""
        if id(value) in self._strongly:
            return self._strongly[id(value)][0]
        if value in self._weakly:
            return int(self._weakly[value])
        number = next(self._next)
        try:
            self._weakly[value] = number
        except TypeError:
            self._strongly[id(value)] = number, value
        return number


_WITH_TEXT = (type(None), *COMPARED_BY_VALUE, complex, range, slice, enum.Enum)


def _version(value: Tensor | Array) -> int:
    """A number that changes when a tensor or array is written to."""
    return value._version if isinstance(value, Tensor) else zlib.crc32(array_content(value))


def _reader(namespace: Namespace) -> Callable[[], Iterable[object]]:
    """A function that returns a namespace's values: its kind is looked up here once, not at each call."""
    owner, names = namespace.owner, namespace.names
    if isinstance(owner, FunctionType):
        return lambda: cells_of(owner).values()
    if isinstance(owner, (list, deque, set)):
        return lambda: itertools.islice(owner, LARGE_ITEMS)
    values = owner if isinstance(owner, dict) else vars(owner)
    if names is not None:
        return lambda: map(values.get, names)
    return lambda: itertools.islice(values.values(), LARGE_ITEMS)


def global_hooks() -> tuple[str, ...]:
    """The user's hooks on the forwards of all modules, as text; they are captured with a model."""
    hooks = (*_modules._global_forward_pre_hooks.values(), *_modules._global_forward_hooks.values())
    of_user = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")]
    return tuple(f"{getattr(hook, '__qualname__', type(hook))} {_first_line(hook)}" for hook in of_user)


def _first_line(hook: Callable[..., object]) -> int:
    return hook.__code__.co_firstlineno if isinstance(hook, FunctionType) else 0
