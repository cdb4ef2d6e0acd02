"""Objects that store values by name or index: how to list their values and to restore earlier ones.

Modules, configurations, lists, dicts, globals, closures and the like differ in how Python reads and
writes them; `_KINDS` has one row for each. `visible` finds those that a forward can read.

Reading runs no code of the user's classes, and restoring writes only values that differ. A class
may compute its results: `ACT2FN["gelu"]` of transformers makes a new module at each `__getitem__`.
"""

from __future__ import annotations

import array
import enum
import operator
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from torchshard.capture.user_code import cells_of, closure_of

Place = tuple[str, ...]
"""Module path (or class, or package), attribute, and keys within lists, dicts and objects."""
Values = dict[Any, object]
"""Name or index -> value."""

OF_MEMORIES = "_torchshard_memories"
"""The attribute of a copied model in which `shared_memory` notes the original tensors' memory."""
_EVERY_MODULE_HAS = frozenset(nn.Module().__dict__) | {"training", "register_buffer", OF_MEMORIES}
"""Parameters, buffers, submodules, hooks, the mode, patches of `entry_points`, and our notes."""
_OPEN_PACKAGES = frozenset(
    {"argparse", "collections", "configparser", "functools", "optparse", "types", "weakref", "_thread"}
)
"""Standard-library packages with objects that contain only values stored by the user."""
_FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


@dataclass(frozen=True)
class Namespace:
    """An object that stores values by name or index."""

    place: Place
    owner: Any
    names: tuple[str, ...] | None = None
    """The names that are read, of a class, an object or globals; None: all names."""

    def items(self) -> Values:
        """Name or index -> current value."""
        values = kind_of(self.owner).read(self.owner)
        if self.names is None:
            return values
        return {name: values[name] for name in self.names if name in values}

    def place_of(self, name: object) -> Place:
        """The place of one of the values: ('attn', 'cache', '[3]')."""
        if isinstance(self.owner, (dict, list, deque, tuple, MappingProxyType)) and self.names is None:
            return (*self.place, f"[{name!r}]")
        inside_object = len(self.place) > 1 and name
        return (*self.place, f".{name}" if inside_object else str(name))

    def restore(self, previous: Values) -> None:
        """Restores the previous values that differ."""
        current = self.items()
        if current.keys() != previous.keys() or not all(map(operator.is_, current.values(), previous.values())):
            kind_of(self.owner).write(self.owner, previous, current)


class Kind(NamedTuple):
    """How to read and store the values of some types of objects."""

    types: tuple[type, ...]
    read: Callable[[Any], Values]
    write: Callable[[Any, Values, Values], None]
    """(owner, values to store, current ones): stores them, and removes names that they lack."""


def _differing(previous: Values, current: Values) -> Values:
    """The previous values that are not stored now."""
    missing = object()
    return {name: value for name, value in previous.items() if current.get(name, missing) is not value}


def _values_of_function(function: FunctionType) -> Values:
    return cells_of(function) | {name: getattr(function, name) for name in _FUNCTION_PARTS}


def _write_function(function: FunctionType, previous: Values, current: Values) -> None:
    cells = closure_of(function)
    for name, value in _differing(previous, current).items():
        if name in cells:
            cells[name].cell_contents = value
        else:
            setattr(function, name, value)


def _write_class(cls: type, previous: Values, current: Values) -> None:
    for name, value in _differing(previous, current).items():
        setattr(cls, name, value)  # the __dict__ of a class is read-only


def _write_set(owner: set[object], previous: Values, current: Values) -> None:
    if current[""] != previous[""]:
        set.clear(owner)
        set.update(owner, previous[""])  # type: ignore[arg-type]


def _write_list(owner: list[object], previous: Values, current: Values) -> None:
    list.__setitem__(owner, slice(None), previous.values())


def _write_deque(owner: deque[object], previous: Values, current: Values) -> None:
    deque.clear(owner)
    deque.extend(owner, previous.values())


def _write_dict(owner: Values, previous: Values, current: Values) -> None:
    for name in current.keys() - previous.keys():
        dict_class(owner).__delitem__(owner, name)
    dict_class(owner).update(owner, _differing(previous, current))


def dict_class(owner: Values) -> type[Values]:
    """The builtin class of a dict; methods of a subclass may compute or count."""
    return OrderedDict if isinstance(owner, OrderedDict) else dict


def stored_values(owner: object) -> Iterable[object]:
    """The values of a builtin container, in order, read without the methods of a subclass."""
    if isinstance(owner, dict):
        return dict_class(owner).values(owner)
    if isinstance(owner, MappingProxyType):
        return owner.values()
    base: Any = next(cls for cls in (list, tuple, deque, set) if isinstance(owner, cls))
    return base.__iter__(owner)


def is_empty(owner: object) -> bool:
    """Whether a builtin container is empty; a subclass's `len` may mean something else or raise."""
    return not any(True for _ in stored_values(owner))


def _values_of_context(variable: ContextVar[object]) -> Values:
    try:
        return {"": variable.get()}
    except LookupError:
        return {}


def _write_context(variable: ContextVar[object], previous: Values, current: Values) -> None:
    for value in previous.values():
        variable.set(value)


def _values_of_module(module: nn.Module) -> Values:
    return {name: value for name, value in vars(module).items() if name not in _EVERY_MODULE_HAS}


def own_dict(value: object) -> dict[str, Any] | None:
    """The `__dict__` of an object, read without code of its class; None if it has none."""
    readers = (vars(base).get("__getattribute__") for base in type(value).__mro__)
    # A `__getattribute__` that is a Python function is the user's code.
    read = next(one for one in readers if one is not None and not isinstance(one, FunctionType))
    try:
        found = read(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def values_of_object(value: object) -> Values:
    """The attributes of an object, in its slots and its `__dict__`; properties are not read."""
    return _values_of_slots(value) | (own_dict(value) or {})


def _values_of_slots(value: object) -> Values:
    found: Values = {}
    for name, slot in _slots_of(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue  # an empty slot
    return found


def _slots_of(cls: type) -> dict[str, MemberDescriptorType]:
    """Name -> slot, for all slots that a class and its bases declare."""
    declaring = [vars(base) for base in reversed(cls.__mro__) if "__slots__" in vars(base)]
    return {n: slot for names in declaring for n, slot in names.items() if isinstance(slot, MemberDescriptorType)}


def _write_object(owner: object, previous: Values, current: Values) -> None:
    slots, attributes = _slots_of(type(owner)), own_dict(owner) or {}
    for name in current.keys() - previous.keys():
        if name in slots:
            slots[name].__delete__(owner)
        else:
            del attributes[name]
    for name, value in _differing(previous, current).items():
        if name in slots:
            slots[name].__set__(owner, value)  # works for a frozen class, too
        else:
            attributes[name] = value


def _write_nothing(owner: object, previous: Values, current: Values) -> None:
    """Does not write: Python makes the parts of these objects read-only."""


_KINDS = (
    Kind((dict,), lambda owner: dict(dict_class(owner).items(owner)), _write_dict),
    Kind((MappingProxyType,), lambda owner: dict(owner.items()), _write_nothing),
    Kind((list,), lambda owner: dict(enumerate(stored_values(owner))), _write_list),
    Kind((deque,), lambda owner: dict(enumerate(stored_values(owner))), _write_deque),
    Kind((tuple,), lambda owner: dict(enumerate(stored_values(owner))), _write_nothing),
    Kind((set,), lambda owner: {"": frozenset(stored_values(owner))}, _write_set),
    Kind((nn.Module,), _values_of_module, _write_object),
    Kind((FunctionType,), _values_of_function, _write_function),
    Kind((MethodType,), lambda m: {"__func__": m.__func__, "__self__": m.__self__}, _write_nothing),
    Kind((partial,), lambda p: {"func": p.func, "args": p.args, "keywords": p.keywords}, _write_nothing),
    Kind((weakref.ref,), lambda reference: {"": reference()}, _write_nothing),
    Kind((ContextVar,), _values_of_context, _write_context),
    Kind((type,), lambda cls: dict(vars(cls)), _write_class),
    Kind((object,), values_of_object, _write_object),
)
"""The first matching row is used."""


def kind_of(owner: object) -> Kind:
    """How the values of an object are read and stored."""
    return next(kind for kind in _KINDS if isinstance(owner, kind.types))


def is_container(value: object) -> bool:
    """Whether a value is a builtin container; a `torch.Size` counts as a number."""
    return isinstance(value, (dict, list, deque, set, tuple, MappingProxyType)) and not isinstance(value, torch.Size)


def is_open(value: object) -> bool:
    """Whether a value is an object with attributes that forward may read.

    Excluded are tensors, modules, functions, classes, arrays, and objects of PyTorch, of this
    package and of most of Python's own packages.
    """
    cls = type(value)
    package = cls.__module__.partition(".")[0]
    if isinstance(value, (MethodType, partial, ContextVar, weakref.ref, Distribution)):
        return True
    closed = (Tensor, nn.Module, type, ModuleType, FunctionType, enum.Enum, *weakref.ProxyTypes)
    if isinstance(value, closed) or is_array(value) or package in ("torch", "torchshard"):
        return False
    plain = package not in sys.stdlib_module_names or package in _OPEN_PACKAGES or package == "__main__"
    return plain and has_attributes(value)


def has_attributes(value: object) -> bool:
    """Whether an object may store attributes, in a `__dict__` or in slots."""
    return own_dict(value) is not None or bool(_slots_of(type(value)))


class Array(Protocol):
    """The part of an array's interface that is used here; the package does not import NumPy."""

    def tobytes(self) -> bytes:
        """The array's memory as bytes."""


def is_array(value: object) -> TypeGuard[Array | bytearray]:
    """Whether a value is an array of numbers: NumPy's arrays and scalars, and Python's own."""
    in_numpy = any(cls.__module__ == "numpy" for cls in type(value).__mro__)
    return (in_numpy and hasattr(value, "tobytes")) or isinstance(value, (bytearray, array.array, memoryview))


def array_content(value: Array | bytearray) -> bytes:
    """Dtype, shape and elements of an array; equal bytes may differ in dtype or shape."""
    kind = [getattr(value, name, None) for name in ("dtype", "typecode", "format", "shape")]
    return repr(kind).encode() + (bytes(value) if isinstance(value, bytearray) else value.tobytes())
