"""Notices changes of the values that a captured graph has as constants, fast enough for each call.

A graph is captured with the attributes, globals and closures that forward reads (see `visible`).
After a change, the next call needs another graph.

For `torch.compile` Dynamo makes guards for the values that its tracing reads, and checks them in
C++. Non-strict export does not use Dynamo and makes none for Python values (PyTorch 2.13). This
module and `visible` could go if export returned such guards.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import itertools
import operator
import zlib
from collections.abc import Callable, Hashable, Iterable
from types import FunctionType

from torch import Tensor, nn
from torch.nn.modules import module as _modules
from torch.utils.weak import WeakIdKeyDictionary

from torchshard.capture.attributes import COMPARED_BY_VALUE, describe
from torchshard.capture.keys import code_key
from torchshard.capture.namespaces import Array, Namespace, Place, array_content, is_array, is_container, stored_values
from torchshard.capture.tools import is_tools
from torchshard.capture.user_code import cells_of
from torchshard.capture.visible import Visible, visible_to
from torchshard.core.modules import version_of

LARGE_ITEMS = 4096
"""`Watch` compares only this many first items of a list or dict."""


class Watch:
    """Numbers the states of the values that forward can read: 0, then a new number per new state.

    Attributes of the modules themselves are not compared: a sharded model calls `look` when one is
    assigned.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._states = model, dict[str, int]()
        self._numbers = ObjectNumbers()
        self._texts: dict[Place, str] = {}
        self.look()
        self.latest_change = ""

    def __deepcopy__(self, memo: dict[int, object]) -> Watch:
        return Watch(copy.deepcopy(self._model, memo))

    def state(self) -> int:
        """The number of the current state."""
        if not self._is_same():
            self.look()
        return self.number

    def look(self) -> None:
        """Searches for the values again, because others may be visible now, and notes them."""
        visible, before = visible_to(self._model), self._texts
        self._texts = {place: self._text(value, visible) for place, value in visible.values()}
        changes = [p for p in dict.fromkeys([*before, *self._texts]) if before.get(p) != self._texts.get(p)]
        self.latest_change = describe(changes[0]) if changes else self.latest_change
        digest = hashlib.blake2b(repr(self._texts).encode(), digest_size=16).hexdigest()
        self.number = self._states.setdefault(digest, len(self._states))
        # the form that `_is_same` compares fastest
        self._readers = [_reader(space) for space in visible.namespaces if not isinstance(space.owner, nn.Module)]
        self._values = [tuple(read()) for read in self._readers]
        self._classes = [vars(space.owner) for space in visible.namespaces if isinstance(space.owner, type)]
        self._sizes = list(map(len, self._classes))  # a new name in a class may hide a base's
        self._arrays = [value for _, value in visible.values() if isinstance(value, Tensor) or is_array(value)]
        self._versions = [_version(value) for value in self._arrays]

    def _is_same(self) -> bool:
        for read, previous in zip(self._readers, self._values, strict=True):
            current = tuple(read())
            if len(current) != len(previous) or not all(map(operator.is_, current, previous)):
                return False
        if self._sizes != list(map(len, self._classes)):
            return False
        return all(map(operator.eq, map(_version, self._arrays), self._versions))

    def _text(self, value: object, visible: Visible) -> str:
        """A value as text; for containers and objects type and place, as their contents have texts.

        A value without a text has a number, in order of appearance, because addresses are reused.
        """
        if id(value) in visible.places:
            return f"a {self._numbers.of(type(value))} at {visible.places[id(value)]}"
        if isinstance(value, _WITH_TEXT):
            return f"{type(value).__name__} {value!r}"
        if is_array(value):
            return f"{type(value).__name__} {hashlib.blake2b(array_content(value), digest_size=16).hexdigest()}"
        version = version_of(value) if isinstance(value, Tensor) else 0
        return f"{type(value).__qualname__} {self._numbers.of(value)}.{version}"


class ObjectNumbers:
    """Numbers objects in order of appearance, without keeping them alive."""

    def __init__(self) -> None:
        self._weakly = WeakIdKeyDictionary()
        # An object without weak references stays referenced, so that its id is not reused.
        self._strongly: dict[int, tuple[int, object]] = {}
        self._next = itertools.count()

    def of(self, value: object) -> int:
        """The number of an object; a new number for a new object."""
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


def _version(value: Tensor | Array | bytearray) -> int:
    """A number that changes when a tensor or array is written to."""
    return version_of(value) if isinstance(value, Tensor) else zlib.crc32(array_content(value))


def _reader(namespace: Namespace) -> Callable[[], Iterable[object]]:
    """A function that reads a namespace's values; the kind is found here, not at each call."""
    owner, names = namespace.owner, namespace.names
    if isinstance(owner, FunctionType):
        return lambda: (owner.__code__, owner.__defaults__, owner.__kwdefaults__, *cells_of(owner).values())
    if isinstance(owner, (dict, type)) and names is not None:
        values = vars(owner) if isinstance(owner, type) else owner
        return lambda: map(values.get, names)
    if is_container(owner):
        return lambda: itertools.islice(stored_values(owner), LARGE_ITEMS)
    return lambda: namespace.items().values()


def global_hooks() -> tuple[Hashable, ...]:
    """The keys of the user's hooks on all modules, which are captured with a model."""
    # `_global_forward_hooks`, `_global_forward_pre_hooks`: no public way to list them (PyTorch 2.13.0).
    hooks = (*_modules._global_forward_pre_hooks.values(), *_modules._global_forward_hooks.values())
    return tuple(code_key(hook) for hook in hooks if not is_tools(hook))
