"""Finds the values that forward can read beyond its arguments, parameters and buffers.

    attributes of modules        self.scale, and the values in their lists, dicts and objects: self.config.scale
    classes                      Block.scale, and the methods that forward may call
    of the user's own code       globals, closures and defaults of the functions that forward may call
    of the process               context variables, os.environ

The search goes from a value to the values in it, and from a function to those that its code names.
Forward does not run, because it could change the state that is searched for. Code of installed
packages and of Python itself is not searched, because users do not set its globals.

Dynamo's guards cover the same values for `torch.compile`, but non-strict export makes none for
Python values (PyTorch 2.13). This module and `watch` could go if export did.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType

from torch import nn

from torchshard.capture.namespaces import Namespace, Place, Values, is_container, is_open, own_dict
from torchshard.capture.user_code import cells_of, mentions
from torchshard.core.user_files import is_user_file

_CALLED_BY_PYTORCH = frozenset({"forward", "backward", "setup_context"})


@dataclass(frozen=True)
class Visible:
    """The result of a search."""

    namespaces: list[Namespace]
    """Each list, dict, object, function and class once, and the globals of each file."""
    places: dict[int, Place]
    """id -> place of each value with contents that are found below that place."""

    def values(self) -> Iterator[tuple[Place, object]]:
        """(place, value) of all current values in the namespaces."""
        for namespace in self.namespaces:
            for name, value in namespace.items().items():
                yield namespace.place_of(name), value

    def functions(self) -> list[FunctionType]:
        """The functions that may be called, as far as the user's code and values lead to them."""
        return [space.owner for space in self.namespaces if isinstance(space.owner, FunctionType)]


def visible_to(model: nn.Module, *, code: bool = True) -> Visible:
    """The values that a call of a model can read.

    Args:
        code: whether to follow functions and classes too; without them, the result is the model's
            data.
    """
    search = _Search(code=code)
    search.add_model(model)
    return search.result()


def visible_from(value: object, *, code: bool = True) -> Visible:
    """The values that can be reached from one value.

    Args:
        code: whether to follow functions and classes too.
    """
    search = _Search(code=code)
    if isinstance(value, FunctionType):
        search.add_function(value)  # a library's too
    elif isinstance(value, type):
        search.add_class(value)
    else:
        search.visit(("",), value)
    return search.result()


def hooks_of(module: nn.Module) -> list[object]:
    """The hooks that are registered on a module."""
    registered = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return [hook for hooks in registered if isinstance(hooks, dict) for hook in hooks.values()]


@dataclass(frozen=True)
class _PartlyRead:
    """A namespace of which only some values are followed."""

    place: Place
    owner: object
    values: Values
    names: dict[str, None] = field(default_factory=dict)


class _Search:
    def __init__(self, *, code: bool = True) -> None:
        self._follows_code = code
        self._found: list[Namespace] = []
        self._places: dict[int, Place] = {}
        self._pending: list[tuple[Place, object]] = []
        self._roots: dict[str, int] = {}
        """First part of a place -> the number of places that have it."""
        self._in_libraries: set[int] = set()
        self._mentioned: dict[str, None] = {}
        """The names of attributes in all code met so far."""
        self._globals: dict[int, _PartlyRead] = {}
        """id -> globals of a file; a function reads those that its own code mentions."""
        self._with_methods: dict[int, _PartlyRead] = {}
        """id -> class, or owner of a called method; code reads the names in any code."""

    def result(self) -> Visible:
        """Follows all pending values."""
        while self._pending:
            self.visit(*self._pending.pop())
        partly = [*self._globals.values(), *self._with_methods.values()]
        return Visible([*self._found, *(Namespace(p.place, p.owner, tuple(p.names)) for p in partly)], self._places)

    def add_model(self, model: nn.Module) -> None:
        """Adds the values that a call of a model reads."""
        modules = dict(model.named_modules())
        self._roots.update(dict.fromkeys(modules, 1))
        self._places.update((id(module), (path,)) for path, module in modules.items())
        for path, module in modules.items():
            self._add(Namespace((path,), module))
            self._push(((path, "hook"), hook) for hook in hooks_of(module))
            self._add_classes(
                cls for cls in type(module).__mro__ if not cls.__module__.startswith(("torch.", "builtins"))
            )

    def visit(self, place: Place, value: object) -> None:
        """Follows one value, regardless of its place."""
        if id(value) in self._places:
            return
        if isinstance(value, FunctionType) and is_user_file(value.__code__.co_filename):
            self.add_function(value)
        elif isinstance(value, FunctionType):
            self._add_functions_in_library(place, value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(place, value.__func__)
        elif isinstance(value, property):
            self._push((place, function) for function in (value.fget, value.fset) if function)
        elif isinstance(value, type):
            for cls in filter(_is_of_user, value.__mro__ if self._follows_code else ()):
                self._read(self._class(cls), ["__init__"])  # code that mentions a class may call it
        elif isinstance(value, MethodType):
            self._add_method(place, value)
        elif isinstance(value, nn.Module):
            if not type(value).__module__.startswith("torchshard."):
                # It is not part of the model, so its parameters count too.
                self._add_object(place, value, vars(value))
        elif is_container(value) or is_open(value):
            self._add_object(place, value, value)

    def _add_object(self, place: Place, value: object, owner: object) -> None:
        self._places[id(value)] = place
        self._add(Namespace(place, owner))
        self._add_classes(filter(_is_of_user, type(value).__mro__))

    def _add_classes(self, classes: Iterable[type]) -> None:
        """Follows an object's classes: all their data, and the methods that may run."""
        for cls in classes if self._follows_code else ():
            self._read(self._class(cls), [name for name, value in vars(cls).items() if _is_data(name, value)])

    def _class(self, cls: type) -> _PartlyRead:
        names = [name for name, value in vars(cls).items() if _runs_unmentioned(name, value)]
        return self._with_methods.get(id(cls)) or self._add_with_methods(cls, cls.__qualname__, names)

    def add_class(self, cls: type) -> None:
        """Follows all values in a class and its bases."""
        for base in filter(_is_of_user, cls.__mro__):
            self._read(self._class(base), [name for name in vars(base) if name not in _OF_EVERY_CLASS])

    def _add_method(self, place: Place, method: MethodType) -> None:
        """Follows a bound method; of its object (a trainer), only the names that code mentions."""
        owner = method.__self__
        self._places[id(method)] = place
        self._found.append(Namespace(place, method))
        self._push([(place, method.__func__)])
        is_known = id(owner) in self._places or id(owner) in self._with_methods
        reads_all = is_container(owner) or (is_open(owner) and _may_read_everything(method))
        if isinstance(owner, type) or reads_all or not self._follows_code:
            self._push([(place, owner)])
        elif not is_known and (is_open(owner) or isinstance(owner, nn.Module)):
            self._add_with_methods(owner, type(owner).__qualname__, ())
            self._add_classes(filter(_is_of_user, type(owner).__mro__))

    def _add_with_methods(self, owner: object, name: str, names: Iterable[str]) -> _PartlyRead:
        partly = self._with_methods[id(owner)] = _PartlyRead(self._root(name), owner, Namespace((), owner).items())
        self._read(partly, [*names, *self._mentioned])
        return partly

    def add_function(self, function: FunctionType) -> None:
        """Follows a function's closure, defaults and attributes, and the names in its code."""
        if not self._follows_code:
            return
        place = self._places[id(function)] = self._root(function.__qualname__)
        self._add(Namespace(place, function))
        self._push([((*place, "."), vars(function))])
        names = mentions(function.__code__)
        self._read_globals(str(function.__module__), function.__globals__, names.globals)
        mentioned = [function.__globals__.get(name) for name in names.globals]
        for module in (*mentioned, *map(sys.modules.get, names.imports)):
            if isinstance(module, ModuleType) and is_user_file((own_dict(module) or {}).get("__file__")):
                self._read_globals(module.__name__, vars(module), names.attributes)
        if not _OF_ENVIRONMENT.isdisjoint(names.attributes) and id(os.environ) not in self._places:
            self._add_object(("os", "environ"), os.environ, vars(os.environ))
        new = [name for name in names.attributes if name not in self._mentioned]
        self._mentioned.update(dict.fromkeys(new))
        for partly in list(self._with_methods.values()):
            self._read(partly, new)

    def _add_functions_in_library(self, place: Place, function: FunctionType) -> None:
        """Follows functions in a library's function: `torch.no_grad()` decorates the user's."""
        if id(function) not in self._in_libraries:
            self._in_libraries.add(id(function))
            self._push((place, held) for held in cells_of(function).values() if isinstance(held, FunctionType))

    def _read_globals(self, file: str, values: Values, names: Iterable[str]) -> None:
        if id(values) not in self._globals:
            self._globals[id(values)] = _PartlyRead(self._root(file), values, values)
        self._read(self._globals[id(values)], names)

    def _read(self, partly: _PartlyRead, names: Iterable[str]) -> None:
        # Forward may assign a global that does not exist yet.
        may_be_added = not isinstance(partly.owner, type)
        new = [name for name in names if name not in partly.names and (may_be_added or name in partly.values)]
        partly.names.update(dict.fromkeys(new))
        self._push(((*partly.place, name), partly.values[name]) for name in new if name in partly.values)

    def _add(self, namespace: Namespace) -> None:
        self._found.append(namespace)
        self._push((namespace.place_of(name), value) for name, value in namespace.items().items())

    def _push(self, found: Iterable[tuple[Place, object]]) -> None:
        self._pending += reversed(list(found))  # the stack is popped from its end

    def _root(self, name: str) -> Place:
        """A place of its own for a value: functions and classes may have equal names."""
        count = self._roots[name] = self._roots.get(name, 0) + 1
        return (name if count == 1 else f"{name} ({count})",)


_OF_EVERY_CLASS = frozenset({"__dict__", "__weakref__", "__module__", "__doc__"})
_OF_ENVIRONMENT = frozenset({"environ", "getenv"})
_ANY_ATTRIBUTE = frozenset({"getattr", "hasattr", "vars", "__dict__", "__getattribute__", "attrgetter"})
"""Names by which code reads attributes that it does not mention."""


def _is_of_user(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ == "__main__" or is_user_file(file)  # a notebook's __main__ has no file


def _may_read_everything(method: MethodType) -> bool:
    """Whether a method may read attributes of its object that the user's code does not mention."""
    code = getattr(method.__func__, "__code__", None)
    reads_any = code is not None and not _ANY_ATTRIBUTE.isdisjoint(mentions(code).attributes)
    return reads_any or hasattr(type(method.__self__), "__getattr__")


def _is_method(value: object) -> bool:
    return isinstance(value, (FunctionType, staticmethod, classmethod, property))


def _is_data(name: str, value: object) -> bool:
    return not (name.startswith("__") or _is_method(value) or isinstance(value, (type, ModuleType)))


def _runs_unmentioned(name: str, value: object) -> bool:
    """Whether a method may run without code that mentions its name, as operators do."""
    return _is_method(value) and name != "__init__" and (name.startswith("__") or name in _CALLED_BY_PYTORCH)
