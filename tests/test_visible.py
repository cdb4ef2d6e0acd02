"""Values that forward reads, other than its arguments: a sharded model uses the current ones."""

from __future__ import annotations

import array
import configparser
import contextvars
import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
SCALE = 1.0
LOGGER = logging.getLogger("a logger that forward reads")


class _Config:
    def __init__(self) -> None:
        self.scale, self.flags = 1.0, {"doubled": False}


class _Slope:
    """An activation object."""

    def __init__(self) -> None:
        self.slope = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.slope


def _scaled_by_global(x: Tensor) -> Tensor:
    LOGGER.debug("scaled by %s", SCALE)
    return x * SCALE


def _closure() -> tuple[list[float], Callable[[Tensor], Tensor], Callable[[float], None]]:
    held, factor = [1.0], 1.0

    def scaled(x: Tensor) -> Tensor:
        return x * held[0] * factor

    def assign(value: float) -> None:
        nonlocal factor
        factor = value

    return held, scaled, assign


class _Sees(nn.Module):
    """A linear layer, scaled by every kind of value that a forward can read."""

    factor = 1.0

    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.up, self.config, self.act = nn.Linear(6, 8), config, _Slope()
        self.by_name, self.by_index, self.chosen = {"scale": 1.0}, [1.0, (1.0, {"deep": 1.0})], {1}
        self.plain, self.array = torch.ones(8), np.ones(8, dtype=np.float32)
        self.held, self.scaled, self.assign = _closure()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(_scaled_by_global(self.scaled(self.up(x)))) * self.config.scale * self.by_name["scale"]
        y = y * self.by_index[0] * self.by_index[1][1]["deep"] * self.plain * self.factor * sum(self.chosen)
        return y * torch.as_tensor(self.array) * (2 if self.config.flags["doubled"] else 1)


def _set_global(m: Any) -> None:
    global SCALE
    SCALE = 3.0


def _set_class(m: Any) -> None:
    _Sees.factor = 3.0


def _other_forward(m: Any) -> None:
    forward = _Sees.forward
    _Sees.forward = lambda self, x: forward(self, x) * 3  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an object": lambda m: setattr(m.config, "scale", 3.0),
    "a dict in an object": lambda m: m.config.flags.update(doubled=True),
    "a callable object": lambda m: setattr(m.act, "slope", 3.0),
    "a dict": lambda m: m.by_name.update(scale=3.0),
    "a list": lambda m: m.by_index.__setitem__(0, 3.0),
    "a dict in a tuple in a list": lambda m: m.by_index[1][1].update(deep=3.0),
    "a set": lambda m: m.chosen.add(2),
    "a tensor": lambda m: m.plain.mul_(3),
    "an array": lambda m: m.array.__imul__(3),
    "a list in a closure": lambda m: m.held.__setitem__(0, 3.0),
    "a variable of a closure": lambda m: m.assign(3.0),
    "a global": _set_global,
    "an attribute of the class": _set_class,
    "the method of the class": _other_forward,
}


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    global SCALE
    torch.manual_seed(0)
    forward = _Sees.forward
    model = _Sees(_Config())
    yield model, ts.shard(model, {"up": "column"}, example_inputs=(X,))
    ts.distributed.destroy_process_group()
    SCALE, _Sees.factor, _Sees.forward = 1.0, 1.0, forward  # type: ignore[method-assign]


@nightly("a dict in an object", "a global", "a list", "a set")
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_sharding_counts(pair: Any, change: str) -> None:
    model, sharded = pair
    before = sharded(X)
    assert torch.equal(before, model(X)) and sharded.captures == 1
    CHANGES[change](sharded)
    if torch.equal(model(X), before):
        CHANGES[change](model)  # the model has a separate copy
    expected = model(X)
    assert not torch.equal(expected, before) and torch.equal(sharded(X), expected), change
    assert sharded.captures == 2 and torch.equal(sharded(X), expected) and sharded.captures == 2


# --- code, and less common containers ---------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Slots:
    value: Any = 1.0


class _Base:
    value: Any = 1.0


class _Derived(_Base):
    """Inherits its value from its base."""


class _Doubles:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


class _Triples:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 3


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


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class _Referenced:
    """A class with objects that can be referenced weakly."""

    value = 2.0


class _Inherits(_Referenced):
    """Inherits its value, until it gets its own."""


class _Reads:
    """Methods that read values under names that their callers don't mention."""

    of_class = 2.0

    def __init__(self) -> None:
        self.hidden = 2.0

    def by_getattr(self, x: Tensor) -> Tensor:
        return x * getattr(self, "hid" + "den")

    @classmethod
    def by_class(cls, x: Tensor) -> Tensor:
        return x * cls.of_class

    def global_value(self, x: Tensor) -> Tensor:
        return x * SCALE


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


class _Trainer:
    """Has a method that serves as a hook."""

    def __init__(self) -> None:
        self.factor, self.step = 2.0, 0

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.factor

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


HOLDER = SimpleNamespace(value=None)
SLOTS, DERIVED, LOCAL, CONTEXT = _Slots(), _Derived(), threading.local(), contextvars.ContextVar[float]("CONTEXT")
BYTES, ARRAY, LAYER, READ_ONLY = bytearray([1]), array.array("d", [1.0]), nn.LeakyReLU(0.5), {"value": 1.0}
PROXY, TRAINER = MappingProxyType(READ_ONLY), _Trainer()


REFERENCED, INHERITS, READS, ITEMS, MISSING = _Referenced(), _Inherits(), _Reads(), _ReadsItems(), _ReadsMissing()
WEAKLY, WEAK_VALUES = weakref.ref(REFERENCED), weakref.WeakValueDictionary(a=REFERENCED)
NORMAL, SETTINGS = torch.distributions.Normal(torch.zeros(()), torch.ones(())), configparser.ConfigParser()
ARRAY_OF_SUBCLASS = np.array([2.0]).view(np.recarray)
DOUBLES, TRIPLES, TWO, THREE = _times(2.0), _times(3.0), _Slots(2.0), _Slots(3.0)


def _set(owner: Any, name: str, value: object) -> Callable[[], object]:
    return lambda: setattr(owner, name, value)


def _hold(value: object) -> Callable[[], object]:
    return _set(HOLDER, "value", value)


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
    "a bound method": (_hold(_Doubles().__call__), lambda x: HOLDER.value(x), _hold(_Triples().__call__)),
    "an object without attributes": (_hold(_Doubles()), lambda x: HOLDER.value(x), _hold(_Triples())),
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
    "a default": (lambda: None, lambda x: _by_default(x), _set(_by_default, "__defaults__", (3.0,))),
    "an attribute of a function": (
        _set(_by_attribute, "factor", 2.0),
        _by_attribute,
        _set(_by_attribute, "factor", 3.0),
    ),
    "the code of a function": (
        lambda: None,
        lambda x: _recoded(x),
        lambda: setattr(_recoded, "__code__", _tripled.__code__),
    ),
    "a global behind a decorator": (lambda: None, lambda x: x * _detached(x), lambda: _set_global(None)),
    "a slot": (_set(SLOTS, "value", 2.0), lambda x: x * SLOTS.value, _set(SLOTS, "value", 3.0)),
    "an attribute of a base": (lambda: None, lambda x: x * DERIVED.value, _set(_Base, "value", 3.0)),
    "a layer that is no submodule": (lambda: None, lambda x: LAYER(x), _set(LAYER, "negative_slope", 0.1)),
    "a context variable": (lambda: CONTEXT.set(2.0), lambda x: x * CONTEXT.get(), lambda: CONTEXT.set(3.0)),
    "a value of this thread": (_set(LOCAL, "value", 2.0), lambda x: x * LOCAL.value, _set(LOCAL, "value", 3.0)),
    "bytes": (lambda: None, lambda x: x * BYTES[0], lambda: BYTES.__setitem__(0, 3)),
    "an array of Python": (lambda: None, lambda x: x * ARRAY[0], lambda: ARRAY.__setitem__(0, 3.0)),
    "a read-only view": (lambda: None, lambda x: x * PROXY["value"], lambda: READ_ONLY.update(value=3.0)),
    "what is referenced weakly": (
        _set(REFERENCED, "value", 2.0),
        lambda x: x * WEAKLY().value,
        _set(REFERENCED, "value", 3.0),
    ),
    "a value of a weak dict": (
        _set(REFERENCED, "value", 2.0),
        lambda x: x * WEAK_VALUES["a"].value,
        _set(REFERENCED, "value", 3.0),
    ),
    "an attribute that hides a base's": (
        lambda: None,
        lambda x: x * INHERITS.value,
        _set(_Inherits, "value", 3.0),
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
        _set(READS, "hidden", 3.0),
    ),
    "what a class method reads": (_hold(_Reads.by_class), lambda x: HOLDER.value(x), _set(_Reads, "of_class", 3.0)),
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


class _Applies(nn.Module):
    """Two linear layers with a function in between, from the constructor or from the call."""

    def __init__(self, body: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(6, 8), nn.Linear(8, 6), body

    def forward(self, x: Tensor, body: Any = None) -> Tensor:
        return self.down((body or self.body)(self.up(x)))


@pytest.fixture
def own_process_group() -> Iterator[None]:
    ts.distributed.init_process_group()
    yield
    ts.distributed.destroy_process_group()


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
    model = _Applies(body)
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X,))
    before = model(X)
    assert torch.equal(sharded(X), before)
    change()
    expected = model(X)
    assert not torch.equal(expected, before) and torch.equal(sharded(X), expected)
    assert sharded.captures == 2 and torch.equal(sharded(X), expected) and sharded.captures == 2


class _ReadsGlobal:
    """A callable that only reads values of its class, and a global."""

    factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE * self.factor


class _Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE * self.factor


@pytest.mark.parametrize(
    "body",
    [
        _scaled_by_global, partial(_scaled_by_global), lambda x: [_scaled_by_global(x)][0], _ReadsGlobal(), _Scales(),
        READS.global_value,
    ],
    ids=["f", "partial", "lambda", "object", "module", "method"],
)  # fmt: skip
def test_globals_that_an_argument_reads_count(body: Any, own_process_group: None, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    model = _Applies()
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X, body))
    assert torch.equal(sharded(X, body), model(X, body))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert torch.equal(sharded(X, body), model(X, body))


class _Called(nn.Module):
    """Calls a method of an argument; an argument that is a class is instantiated first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, scale: Any) -> Tensor:
        return self.down((scale() if isinstance(scale, type) else scale).scaled(self.up(x)))


@pytest.mark.parametrize("scale", [_ReadsGlobal(), _ReadsGlobal], ids=["object", "class"])
def test_what_the_class_of_an_argument_holds_counts(scale: Any, own_process_group: None, monkeypatch: Any) -> None:
    model = _Called()
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X, scale))
    monkeypatch.setattr(_ReadsGlobal, "factor", 3.0)
    assert torch.equal(sharded(X, scale), model(X, scale))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert torch.equal(sharded(X, scale), model(X, scale)) and sharded.captures == 3


# --- state carried from one kind of call to another -------------------------------------------------------------------


class _TwoKinds(nn.Module):
    """Stores a value when it encodes, and reads it when it decodes."""

    shared: Tensor | None = None

    def __init__(self, leave: Callable[[Any, Tensor], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.leave, self.read, self.memory, self.seen = leave, read, torch.zeros(3, 8), [0.0]

    def forward(self, x: Tensor, encode: bool) -> Tensor:
        if encode:
            h = self.up(x)
            self.leave(self, h)
            return h
        return self.down(self.up(x) + self.read(self))


def _leave_in_class(m: Any, h: Tensor) -> None:
    _TwoKinds.shared = h


_leave_in_closure, _read_closure = (lambda held: (lambda m, h: held.append(h), lambda m: held[-1]))([torch.zeros(3, 8)])


@pytest.mark.parametrize(
    "leave, read",
    [
        (lambda m, h: setattr(m, "memory", h), lambda m: m.memory),
        (lambda m, h: m.seen.append(h), lambda m: m.seen[-1]),
        (_leave_in_class, lambda m: 0.0 if _TwoKinds.shared is None else _TwoKinds.shared),
        (_leave_in_closure, _read_closure),
    ],
    ids=["attribute", "list", "class", "closure"],
)
@pytest.mark.parametrize("first", [True, False])
def test_state_left_by_one_kind_of_call_cannot_be_read_by_another(leave: Any, read: Any, first: bool) -> None:
    sharded = ts.shard(_TwoKinds(leave, read), {"up": "column"})
    sharded(X, first)
    with pytest.raises(ts.CaptureError, match=r"reads what an earlier one has left|computes something else"):
        sharded(X, not first)
    assert _TwoKinds.shared is None
    ts.distributed.destroy_process_group()


def test_state_that_no_other_kind_of_call_reads_may_be_left() -> None:
    torch.manual_seed(0)
    model = _TwoKinds(lambda m, h: setattr(m, "memory", h), lambda m: 1.0)
    sharded = ts.shard(model, {"up": "column"})
    for encode in (True, False, True):
        assert torch.allclose(sharded(X, encode), model(X, encode))
    ts.distributed.destroy_process_group()


def _counts(m: Any, h: Tensor) -> None:
    global SCALE
    SCALE += 1


def test_a_global_that_forward_counts_up_is_state() -> None:
    before = SCALE
    with pytest.raises(ts.CaptureError, match=r"SCALE again"):
        ts.shard(_TwoKinds(_counts, lambda m: 0.0), {}, example_inputs=(X, True))
    assert before == SCALE
    ts.distributed.destroy_process_group()
