"""The values that a forward reads and writes beside its arguments, parameters and buffers, and where they are stored.

    attributes of modules        self.scale, and the values in their lists, dicts and objects: self.config.scale
    data of their classes        Block.scale
    of the user's own code       globals and closures that forwards read: SCALE, and `scale` of a factory function

A graph is captured with the values that these have at its capture. `attributes` lists them, `changed` compares two
lists, and `Snapshot` undoes the assignments of a capture; `watch` notices changes between calls.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from torchshard.capture.user_code import cells_of, classes_of, closure_of, names_in, user_functions
from torchshard.core.user_files import is_user_file

_EVERY_MODULE_HAS = frozenset(nn.Module().__dict__) | {"training"}
"""Parameters, buffers, submodules, hooks, the mode."""
COMPARED_BY_VALUE = (int, float, str, bool, bytes, frozenset, tuple, list, dict, torch.Size, torch.dtype, torch.device)
_OPEN_PACKAGES = frozenset({"argparse", "collections", "functools", "types"})
"""Those of Python's own packages whose objects hold only values that the user has stored in them."""

Place = tuple[str, ...]
"""Module path (or class, or package), attribute, and keys within lists, dicts and objects."""
Attributes = dict[Place, object]


class Array(Protocol):
    """What is used here of NumPy's arrays and scalars; the package does not import NumPy."""

    @property
    def dtype(self) -> object:
        """The type of the elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""

    def tobytes(self) -> bytes:
        """The array's memory."""


@dataclass(frozen=True)
class Namespace:
    """An object that stores values by name or index."""

    place: Place
    owner: Any
    """A module, a plain object, a list, dict, deque or set; a class; the globals of a package; a function (closure)."""
    names: tuple[str, ...] | None = None
    """The names that are read of a class or of globals; None: all names."""

    def items(self) -> dict[Any, object]:
        """Name or index -> current value."""
        if isinstance(self.owner, FunctionType):
            return dict(cells_of(self.owner))
        if isinstance(self.owner, set):
            return {"": frozenset(self.owner)}
        if isinstance(self.owner, (list, deque)):
            return dict(enumerate(self.owner))
        values = self._dict()
        if self.names is not None:
            return {name: values[name] for name in self.names if name in values}
        if isinstance(self.owner, nn.Module):
            return {name: value for name, value in values.items() if name not in _EVERY_MODULE_HAS}
        return dict(values)

    def _dict(self) -> dict[Any, object]:
        return self.owner if isinstance(self.owner, dict) else vars(self.owner)

    def place_of(self, name: object) -> Place:
        """The place of one of the values: ('attn', 'cache', '[3]')."""
        if isinstance(self.owner, (dict, list, deque)) and self.names is None:
            return (*self.place, f"[{name!r}]")
        inside_object = len(self.place) > 1 and name
        return (*self.place, f".{name}" if inside_object else str(name))

    def restore(self, previous: Mapping[Any, object]) -> None:
        """Stores the previous values again."""
        current = self.items()
        if current.keys() == previous.keys() and all(map(operator.is_, current.values(), previous.values())):
            return
        if isinstance(self.owner, FunctionType):
            for name, value in previous.items():
                closure_of(self.owner)[name].cell_contents = value
        elif isinstance(self.owner, type):  # the __dict__ of a class is read-only
            for name, value in previous.items():
                setattr(self.owner, name, value)
        elif isinstance(self.owner, set):
            self.owner.clear()
            self.owner.update(previous[""])  # type: ignore[arg-type]
        elif isinstance(self.owner, (list, deque)):
            self.owner.clear()
            self.owner.extend(previous.values())
        else:
            values = self._dict()
            for name in current.keys() - previous.keys():
                del values[name]
            values.update(previous)


def namespaces(model: nn.Module) -> list[Namespace]:
    """All namespaces that a model's forward can read; each list, dict and object once."""
    result: list[Namespace] = []
    seen: set[int] = set()
    for namespace in _roots(model):
        _walk(namespace, result, seen)
    return result


def _roots(model: nn.Module) -> Iterator[Namespace]:
    for path, module in model.named_modules():
        yield Namespace((path,), module)
    for cls in classes_of(model):
        data = _data_of(cls.__qualname__, cls, vars(cls), vars(cls))
        yield replace(data, names=(*(data.names or ()), "forward"))
    for function in user_functions(model):
        names = sorted(names_in(function.__code__))
        yield _data_of(function.__module__, function.__globals__, function.__globals__, names)
        for value in (function.__globals__.get(name) for name in names):
            if isinstance(value, ModuleType) and is_user_file(getattr(value, "__file__", None)):
                yield _data_of(value.__name__, vars(value), vars(value), names)
            elif isinstance(value, type) and is_user_file(getattr(sys.modules.get(value.__module__), "__file__", None)):
                yield _data_of(value.__qualname__, value, vars(value), names)
        if function.__closure__:
            yield Namespace((function.__qualname__,), function)


def _data_of(place: str, owner: object, values: Mapping[str, object], names: Iterable[str]) -> Namespace:
    """A namespace reduced to data: no functions, classes and packages."""
    return Namespace((place,), owner, tuple(name for name in names if name in values and _is_data(name, values[name])))


def _is_data(name: str, value: object) -> bool:
    code = (type, ModuleType, nn.Module, property, staticmethod, classmethod)
    return not (name.startswith("__") or isinstance(value, code) or (callable(value) and not _is_open(value)))


def _walk(namespace: Namespace, result: list[Namespace], seen: set[int]) -> None:
    result.append(namespace)
    for name, value in namespace.items().items():
        if id(value) not in seen and (isinstance(value, (dict, list, deque, set, tuple)) or _is_open(value)):
            seen.add(id(value))
            owner = list(value) if isinstance(value, tuple) else value
            _walk(Namespace(namespace.place_of(name), owner), result, seen)


def _is_open(value: object) -> bool:
    """Whether a value is a plain object whose attributes a forward may read: no tensor, module, function or class."""
    cls = type(value)
    package = cls.__module__.partition(".")[0]
    if isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType)) or package in ("torch", "torchshard"):
        return False
    plain = package not in sys.stdlib_module_names or package in _OPEN_PACKAGES or package == "__main__"
    return plain and isinstance(getattr(value, "__dict__", None), dict)


def attributes(model: nn.Module) -> Attributes:
    """Place -> value, for all values that a forward can read, except functions."""
    return {place: _frozen(value) for place, value in leaves(model)}


def leaves(model: nn.Module) -> Iterator[tuple[Place, object]]:
    """(place, value) of all values that a forward can read and that are not taken apart further."""
    for namespace in namespaces(model):
        for name, value in namespace.items().items():
            if not _is_taken_apart(value) and not (callable(value) and not isinstance(namespace.owner, type)):
                yield namespace.place_of(name), value


def _is_taken_apart(value: object) -> bool:
    """Whether a value is a namespace itself; an empty container is a value, for it may be filled later."""
    if isinstance(value, (dict, list, deque, tuple)):
        return bool(value) and not isinstance(value, torch.Size)
    return isinstance(value, set) or _is_open(value)


def settings(model: nn.Module) -> list[object]:
    """The objects and dicts among a model's attributes that hold only plain values, such as a configuration."""
    values = [value for module in model.modules() for value in Namespace(("",), module).items().values()]
    candidates = {id(v): v for v in values if (isinstance(v, dict) and v) or _is_open(v)}
    return [value for value in candidates.values() if _holds_plain_values(value)]


def _holds_plain_values(value: object) -> bool:
    inner: list[Namespace] = []
    _walk(Namespace(("",), value), inner, set())
    values = [value for namespace in inner for value in namespace.items().values()]
    return not any(isinstance(v, (Tensor, nn.Module)) or (callable(v) and not isinstance(v, type)) for v in values)


def _frozen(value: object) -> object:
    """A copy of a value that may be written to, by which `changed` finds writes; other values as they are."""
    if is_array(value):
        return array_content(value)
    if hasattr(value, "bit_generator"):  # numpy.random.Generator
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    return value


def is_array(value: object) -> TypeGuard[Array]:
    """Whether a value is a NumPy array or scalar."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def array_content(value: Array) -> bytes:
    """Type, shape and elements of an array: equal bytes may be other numbers, or lie in another shape."""
    return f"{value.dtype} {value.shape} ".encode() + value.tobytes()


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
        self._attributes = [(namespace, namespace.items()) for namespace in namespaces(model)]
        # Forward may register parameters, buffers, submodules and hooks, whose dicts are not attributes.
        namespaces_of_dicts = [Namespace(("",), value) for value in own_dicts if type(value) in (dict, OrderedDict)]
        self._dicts = [(namespace, namespace.items()) for namespace in namespaces_of_dicts]

    def restore_attributes(self) -> None:
        """Undoes assignments to attributes; parameters, buffers, submodules and hooks stay as they are."""
        for namespace, previous in self._attributes:
            namespace.restore(previous)

    def restore(self) -> None:
        """Undoes all assignments."""
        self.restore_attributes()
        for namespace, previous in self._dicts:
            namespace.restore(previous)
