"""Values that forward reads from globals, classes, closures, slots, weak references and other holders."""

from __future__ import annotations

import array
import configparser
import contextvars
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from tests.visible import HOLDER, Applies, Doubles, Reads, Slots, Triples, X, set_to, times

SCALE = 1.0


class _Base:
    value: Any = 1.0


class _Derived(_Base):
    """Inherits its value from its base."""


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def _tripled(x: Tensor) -> Tensor:
    return x * 3


def _by_default(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


def _by_attribute(x: Tensor) -> Tensor:
    return x * _by_attribute.factor  # type: ignore[attr-defined]


@torch.no_grad()
def _detached(x: Tensor) -> Tensor:
    return torch.ones_like(x) * SCALE


class _Referenced:
    """A class with objects that can be referenced weakly."""

    value = 2.0


class _Inherits(_Referenced):
    """Inherits its value, until it gets its own."""


class _ReadsItems(dict[str, float]):
    """A dict with a method."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * self["factor"]


class _ReadsMissing:
    """Reads an attribute through `__getattr__`."""

    def __init__(self) -> None:
        self._values = {"factor": 2.0}

    def __getattr__(self, name: str) -> float:
        return self._values[name]

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


SLOTS, DERIVED, LOCAL, CONTEXT = Slots(), _Derived(), threading.local(), contextvars.ContextVar[float]("CONTEXT")
BYTES, ARRAY, LAYER, READ_ONLY = bytearray([1]), array.array("d", [1.0]), nn.LeakyReLU(0.5), {"value": 1.0}
PROXY = MappingProxyType(READ_ONLY)
REFERENCED, INHERITS, READS, ITEMS, MISSING = _Referenced(), _Inherits(), Reads(), _ReadsItems(), _ReadsMissing()
WEAKLY, WEAK_VALUES = weakref.ref(REFERENCED), weakref.WeakValueDictionary(a=REFERENCED)
NORMAL, SETTINGS = torch.distributions.Normal(torch.zeros(()), torch.ones(())), configparser.ConfigParser()
ARRAY_OF_SUBCLASS = np.array([2.0]).view(np.recarray)
DOUBLES, TRIPLES, TWO, THREE = times(2.0), times(3.0), Slots(2.0), Slots(3.0)


def _hold(value: object) -> Callable[[], object]:
    return set_to(HOLDER, "value", value)


def _rescale() -> None:
    global SCALE
    SCALE = 3.0


def _redefine() -> None:
    global _doubled
    _doubled = _tripled


HELD: dict[str, tuple[Callable[[], object], Callable[[Tensor], Tensor], Callable[[], object]]] = {
    "a function": (_hold(torch.relu), lambda x: HOLDER.value(x), _hold(torch.tanh)),
    "a function in a list": (
        _hold([torch.relu]),
        lambda x: HOLDER.value[0](x),
        lambda: HOLDER.value.insert(0, _tripled),
    ),
    "a function in a dict": (
        _hold({"f": _doubled}),
        lambda x: HOLDER.value["f"](x),
        lambda: HOLDER.value.update(f=_tripled),
    ),
    "a partial": (
        _hold(partial(_by_default, factor=2)),
        lambda x: HOLDER.value(x),
        _hold(partial(_by_default, factor=3)),
    ),
    "a partial's keywords": (
        _hold(partial(_by_default, factor=2)),
        lambda x: HOLDER.value(x),
        lambda: HOLDER.value.keywords.update(factor=3),
    ),
    "a bound method": (_hold(Doubles().__call__), lambda x: HOLDER.value(x), _hold(Triples().__call__)),
    "an object without attributes": (_hold(Doubles()), lambda x: HOLDER.value(x), _hold(Triples())),
    "which of two closures of one function": (
        _hold(dict(zip("abc", (DOUBLES, TRIPLES, DOUBLES), strict=True))),
        lambda x: HOLDER.value["c"](x),
        lambda: HOLDER.value.update(c=TRIPLES),
    ),
    "which of two objects": (
        _hold(dict(zip("abc", (TWO, THREE, TWO), strict=True))),
        lambda x: x * HOLDER.value["c"].value,
        lambda: HOLDER.value.update(c=THREE),
    ),
    "a global function": (lambda: None, lambda x: _doubled(x), _redefine),
    "a default": (lambda: None, lambda x: _by_default(x), set_to(_by_default, "__defaults__", (3.0,))),
    "an attribute of a function": (
        set_to(_by_attribute, "factor", 2.0),
        _by_attribute,
        set_to(_by_attribute, "factor", 3.0),
    ),
    "the code of a function": (
        lambda: None,
        lambda x: _recoded(x),
        lambda: setattr(_recoded, "__code__", _tripled.__code__),
    ),
    "a global behind a decorator": (lambda: None, lambda x: x * _detached(x), _rescale),
    "a slot": (set_to(SLOTS, "value", 2.0), lambda x: x * SLOTS.value, set_to(SLOTS, "value", 3.0)),
    "an attribute of a base": (lambda: None, lambda x: x * DERIVED.value, set_to(_Base, "value", 3.0)),
    "a layer that is no submodule": (lambda: None, lambda x: LAYER(x), set_to(LAYER, "negative_slope", 0.1)),
    "a context variable": (lambda: CONTEXT.set(2.0), lambda x: x * CONTEXT.get(), lambda: CONTEXT.set(3.0)),
    "a value of this thread": (set_to(LOCAL, "value", 2.0), lambda x: x * LOCAL.value, set_to(LOCAL, "value", 3.0)),
    "bytes": (lambda: None, lambda x: x * BYTES[0], lambda: BYTES.__setitem__(0, 3)),
    "an array of Python": (lambda: None, lambda x: x * ARRAY[0], lambda: ARRAY.__setitem__(0, 3.0)),
    "a read-only view": (lambda: None, lambda x: x * PROXY["value"], lambda: READ_ONLY.update(value=3.0)),
    "what is referenced weakly": (
        set_to(REFERENCED, "value", 2.0),
        lambda x: x * WEAKLY().value,
        set_to(REFERENCED, "value", 3.0),
    ),
    "a value of a weak dict": (
        set_to(REFERENCED, "value", 2.0),
        lambda x: x * WEAK_VALUES["a"].value,
        set_to(REFERENCED, "value", 3.0),
    ),
    "an attribute that hides a base's": (
        lambda: None,
        lambda x: x * INHERITS.value,
        set_to(_Inherits, "value", 3.0),
    ),
    "a distribution": (
        lambda: None,
        lambda x: x * NORMAL.mean.exp(),
        lambda: NORMAL.loc.fill_(1),
    ),
    "a configuration file": (
        lambda: SETTINGS.read_dict({"model": {"factor": "2"}}),
        lambda x: x * SETTINGS.getfloat("model", "factor"),
        lambda: SETTINGS.set("model", "factor", "3"),
    ),
    "an array of a subclass": (
        lambda: None,
        lambda x: x * float(ARRAY_OF_SUBCLASS[0]),
        lambda: ARRAY_OF_SUBCLASS.fill(3.0),
    ),
    "what a method reads by getattr": (
        _hold(READS.by_getattr),
        lambda x: HOLDER.value(x),
        set_to(READS, "hidden", 3.0),
    ),
    "what a class method reads": (_hold(Reads.by_class), lambda x: HOLDER.value(x), set_to(Reads, "of_class", 3.0)),
    "what a dict's method reads": (
        lambda: (ITEMS.update(factor=2.0), _hold(ITEMS.scaled)()),
        lambda x: HOLDER.value(x),
        lambda: ITEMS.update(factor=3.0),
    ),
    "what __getattr__ finds": (
        _hold(MISSING.scaled),
        lambda x: HOLDER.value(x),
        lambda: MISSING._values.update(factor=3.0),
    ),
    "the environment": (
        lambda: None,
        lambda x: x * float(os.environ["FACTOR"]),
        lambda: os.environ.update(FACTOR="3"),
    ),
}
"""Case -> (function that sets the first value, function that reads it, function that changes it)."""


def _recoded(x: Tensor) -> Tensor:
    return x * 2


@nightly(
    "a global behind a decorator",
    "a layer that is no submodule",
    "a partial's keywords",
    "a value of a weak dict",
    "an array of a subclass",
    "an attribute of a function",
    "an attribute that hides a base's",
    "what a dict's method reads",
    "what a method reads by getattr",
    "what is referenced weakly",
    "which of two objects",
)
@pytest.mark.parametrize("kind", HELD)
def test_what_is_changed_wherever_it_is_held_counts(kind: str, own_process_group: None, monkeypatch: Any) -> None:
    monkeypatch.setenv("FACTOR", "2")
    monkeypatch.setattr(_Base, "value", 1.0)
    monkeypatch.setitem(globals(), "_doubled", _doubled)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setattr(_Inherits, "value", 2.0)
    monkeypatch.delattr(_Inherits, "value")
    start, body, change = HELD[kind]
    start()
    model = Applies(body)
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X,))
    before = model(X)
    assert torch.equal(sharded(X), before)
    change()
    expected = model(X)
    assert not torch.equal(expected, before) and torch.equal(sharded(X), expected)
    assert sharded.captures == 2 and torch.equal(sharded(X), expected) and sharded.captures == 2
