"""What a forward can see beside its arguments, parameters and buffers, and change: where that is, and what it is now.

    attributes of modules        self.scale, and what lists, dicts and objects in them hold: self.config.scale
    data of their classes        Block.scale
    of the user's own code       globals and closures that forwards read: SCALE, and `scale` of a factory function

A graph is captured with the values that these have at its capture. `Watch` tells, cheaply enough for each call, when
one of them has changed since.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import itertools
import operator
import random
import sys
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from torchshard.capture.own_code import cells_of, classes_of, closure_of, is_own_file, names_in, own_functions

_EVERY_MODULE_HAS = frozenset(nn.Module().__dict__) | {"training"}
"""Parameters, buffers, submodules, hooks, the mode."""
_COMPARED = (int, float, str, bool, bytes, frozenset, tuple, list, dict, torch.Size, torch.dtype, torch.device)
_OPEN_PACKAGES = frozenset({"argparse", "collections", "functools", "types"})
"""Of Python's own packages, those whose objects hold what a user has put there and nothing else."""
LARGE_ITEMS = 4096
"""Of a list or dict with more items than this, `Watch` looks at the first ones."""

Place = tuple[str, ...]
"""Module path (or class, or package), attribute, and keys within lists, dicts and objects."""
Attributes = dict[Place, Any]


@dataclass(frozen=True)
class Holder:
    """Something that holds values by name, and may come to hold others."""

    place: Place
    held: Any
    """A module, a plain object, a list, dict, deque or set; a class; the globals of a package; a function (closure)."""
    names: tuple[str, ...] | None = None
    """What is looked at of a class or of globals."""

    def items(self) -> dict[Any, Any]:
        """Name -> value, as it is now."""
        if isinstance(self.held, FunctionType):
            return cells_of(self.held)
        if isinstance(self.held, set):
            return {"": frozenset(self.held)}
        if isinstance(self.held, (list, deque)):
            return dict(enumerate(self.held))
        held = self.held if isinstance(self.held, dict) else vars(self.held)
        if self.names is not None:
            return {name: held[name] for name in self.names if name in held}
        if isinstance(self.held, nn.Module):
            return {name: value for name, value in held.items() if name not in _EVERY_MODULE_HAS}
        return dict(held)

    def place_of(self, name: Any) -> Place:
        """The place of one of its values."""
        inside = len(self.place) > 1
        item = isinstance(self.held, (dict, list, deque)) and self.names is None
        return (*self.place, f"[{name!r}]" if item else f".{name}" if inside and name else str(name))

    def put_back(self, was: Mapping[Any, Any]) -> None:
        """Makes it hold again what it held."""
        now = self.items()
        if now.keys() == was.keys() and all(map(operator.is_, now.values(), was.values())):
            return
        if isinstance(self.held, FunctionType):
            for name, value in was.items():
                closure_of(self.held)[name].cell_contents = value
        elif isinstance(self.held, type):
            for name, value in was.items():
                setattr(self.held, name, value)
        elif isinstance(self.held, (list, deque, set)):
            self.held.clear()
            self.held.extend(was.values()) if not isinstance(self.held, set) else self.held.update(was[""])
        else:
            held = self.held if isinstance(self.held, dict) else vars(self.held)
            for name in now.keys() - was.keys():
                del held[name]
            held.update(was)


def holders(model: nn.Module) -> list[Holder]:
    """All that a model's forward can see; each list, dict and object once."""
    found: list[Holder] = []
    seen: set[int] = set()
    for holder in _roots(model):
        _walk(holder, found, seen)
    return found


def _roots(model: nn.Module) -> Iterator[Holder]:
    for path, module in model.named_modules():
        yield Holder((path,), module)
    for cls in classes_of(model):
        data = _some_names(cls.__qualname__, cls, vars(cls), vars(cls))
        yield replace(data, names=(*(data.names or ()), "forward"))
    for function in own_functions(model):
        names = sorted(names_in(function.__code__))
        yield _some_names(function.__module__, function.__globals__, function.__globals__, names)
        for value in (function.__globals__.get(name) for name in names):
            if isinstance(value, ModuleType) and is_own_file(getattr(value, "__file__", None)):
                yield _some_names(value.__name__, vars(value), vars(value), names)
            elif isinstance(value, type) and is_own_file(getattr(sys.modules.get(value.__module__), "__file__", None)):
                yield _some_names(value.__qualname__, value, vars(value), names)
        if function.__closure__:
            yield Holder((function.__qualname__,), function)


def _some_names(place: str, held: Any, values: Mapping[str, Any], names: Any) -> Holder:
    """A holder that looks at data alone: no functions, classes and packages."""
    return Holder((place,), held, tuple(name for name in names if name in values and _is_data(name, values[name])))


def _is_data(name: str, value: Any) -> bool:
    code = (type, ModuleType, nn.Module, property, staticmethod, classmethod)
    return not (name.startswith("__") or isinstance(value, code) or (callable(value) and not _is_open(value)))


def _walk(holder: Holder, found: list[Holder], seen: set[int]) -> None:
    found.append(holder)
    for name, value in holder.items().items():
        if id(value) not in seen and (isinstance(value, (dict, list, deque, set, tuple)) or _is_open(value)):
            seen.add(id(value))
            inner = list(value) if isinstance(value, tuple) else value
            _walk(Holder(holder.place_of(name), inner), found, seen)


def _is_open(value: Any) -> bool:
    """Whether a value is a plain object whose attributes a forward may read: no tensor, module, function or class."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType)) or package in ("torch", "torchshard"):
        return False
    plain = package not in sys.stdlib_module_names or package in _OPEN_PACKAGES or package == "__main__"
    return plain and isinstance(getattr(value, "__dict__", None), dict)


def attributes(model: nn.Module) -> Attributes:
    """The values that a forward can see, taken apart; functions left out."""
    return {place: _settled(value) for place, value in _leaves(model)}


def _leaves(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    for holder in holders(model):
        for name, value in holder.items().items():
            opened = isinstance(value, (dict, list, deque, tuple)) and bool(value) and not isinstance(value, torch.Size)
            method = callable(value) and not isinstance(holder.held, type)
            if not opened and not method and not isinstance(value, set) and not _is_open(value):
                yield holder.place_of(name), value


def settings(model: nn.Module) -> list[Any]:
    """The objects and dicts among a model's attributes that hold plain values alone, such as a configuration."""
    attributes = (pair for module in model.modules() for pair in Holder(("",), module).items().items())
    held = {id(value): value for _, value in attributes if (isinstance(value, dict) and value) or _is_open(value)}
    return [value for value in held.values() if _is_plain(value)]


def global_hooks() -> tuple[str, ...]:
    """The user's hooks on the forwards of all modules, which are captured with a model."""
    held = (*_modules._global_forward_pre_hooks.values(), *_modules._global_forward_hooks.values())
    users = [hook for hook in held if not str(getattr(hook, "__module__", "")).startswith("torch.")]
    return tuple(f"{getattr(hook, '__qualname__', type(hook))} {_line_of(hook)}" for hook in users)


def _line_of(hook: Any) -> int:
    return hook.__code__.co_firstlineno if isinstance(hook, FunctionType) else 0


def _is_plain(value: Any) -> bool:
    found: list[Holder] = []
    _walk(Holder(("",), value), found, set())
    values = [inner for holder in found for inner in holder.items().values()]
    return not any(isinstance(v, (Tensor, nn.Module)) or (callable(v) and not isinstance(v, type)) for v in values)


def _settled(value: Any) -> Any:
    """What tells later whether a value was changed in place: a copy of what may be."""
    if _is_array(value):
        return value.tobytes()
    if hasattr(value, "bit_generator"):  # numpy.random.Generator
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    return value


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _mark(value: Any) -> int:
    """What is another number after a write to a tensor or array."""
    return value._version if isinstance(value, Tensor) else zlib.crc32(value.tobytes())


def changed(before: Attributes, after: Attributes) -> list[Place]:
    """The places whose value is another."""
    places = dict.fromkeys([*before, *after])
    return [p for p in places if not (p in before and p in after and _same(before[p], after[p]))]


def _same(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, nn.Parameter):  # a tracer puts tensors of its own in the place of parameters
        return True
    if type(a) is not type(b) or type(a) not in _COMPARED:
        return False
    dynamic = isinstance(a, torch.Size) and any(isinstance(size, torch.SymInt) for size in (*a, *b))
    return not dynamic and bool(a == b)


def shown(place: Place) -> str:
    """'attn.cache', 'seen[3]'."""
    path, name, *keys = place
    return ".".join(filter(None, (path, name))) + "".join(keys)


class Kept:
    """All that a model's forward can see, as it is now, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        inner = [
            value for m in model.modules() for value in (m.__dict__, *m.__dict__.values()) if type(value) in _DICTS
        ]
        self._was = [(h, h.items()) for h in (*holders(model), *(Holder(("",), value) for value in inner))]

    def put_back(self) -> None:
        """Undoes what was assigned, added or deleted since."""
        for holder, was in self._was:
            holder.put_back(was)


_DICTS = (dict, OrderedDict)
"""What a module keeps its parameters, buffers, submodules and hooks in."""


# --- changes between calls -------------------------------------------------------------------------------------------


class Watch:
    """Numbers the states of what a model's forward can see: 0 as it was first, and a new number for each new state.

    Attributes of the modules themselves are left out: those of a sharded model can't be assigned.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._states = model, dict[str, int]()
        self._known: dict[int, tuple[int, Any]] = {}
        self.latest_change = ""
        self._look()
        self._before = attributes(model)
        self.number = self._numbered()

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return Watch(copy.deepcopy(self._model, memo))

    def state(self) -> int:
        """The number of the state that there is now."""
        if not self._is_same():
            now = attributes(self._model)
            places = [
                p for p in dict.fromkeys([*self._before, *now]) if self._text(p, self._before) != self._text(p, now)
            ]
            self.latest_change = shown(places[0]) if places else self.latest_change
            self._before = now
            self.number = self._numbered()
            self._look()
        return self.number

    def _look(self) -> None:
        """Notes what there is, in the form in which it is soon compared."""
        found = [h for h in holders(self._model) if not isinstance(h.held, nn.Module)]
        self._values = [_values_of(holder) for holder in found]
        self._was = [tuple(values()) for values in self._values]
        self._written = [value for _, value in _leaves(self._model) if isinstance(value, Tensor) or _is_array(value)]
        self._marks = [_mark(value) for value in self._written]

    def _is_same(self) -> bool:
        for values, was in zip(self._values, self._was, strict=True):
            now = tuple(values())
            if len(now) != len(was) or not all(map(operator.is_, now, was)):
                return False
        return all(map(operator.eq, map(_mark, self._written), self._marks))

    def _numbered(self) -> int:
        text = repr([(place, self._text(place, self._before)) for place in self._before])
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._states.setdefault(digest, len(self._states))

    def _text(self, place: Place, held: Attributes) -> str:
        """A value as it is the same on every rank; what can't be written down has a number, in order of appearance."""
        if place not in held:
            return "nothing"
        value = held[place]
        if isinstance(value, _WRITTEN):
            return f"{type(value).__name__} {value!r}"
        number, _ = self._known.setdefault(id(value), (len(self._known), value))
        return f"{type(value).__qualname__} {number}.{value._version if isinstance(value, Tensor) else 0}"


_WRITTEN = (type(None), *_COMPARED, complex, range, slice, enum.Enum)


def _values_of(holder: Holder) -> Callable[[], Iterable[Any]]:
    """What gives a holder's values, as fast as can be."""
    held, names = holder.held, holder.names
    if isinstance(held, FunctionType):
        return lambda: cells_of(held).values()
    if isinstance(held, (list, deque, set)):
        return lambda: itertools.islice(held, LARGE_ITEMS)
    values = held if isinstance(held, dict) else vars(held)
    if names is not None:
        return lambda: map(values.get, names)
    return lambda: itertools.islice(values.values(), LARGE_ITEMS)
