"""Values that forward reads, other than its arguments: a sharded model uses the current ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests import visible
from tests.helpers import nightly
from tests.visible import Applies, Config, Reads, ReadsGlobal, Scales, Sees, X, scaled_by_global


def _set_global(m: Any) -> None:
    visible.SCALE = 3.0


def _set_class(m: Any) -> None:
    Sees.factor = 3.0


def _other_forward(m: Any) -> None:
    forward = Sees.forward
    Sees.forward = lambda self, x: forward(self, x) * 3  # type: ignore[method-assign]


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
    torch.manual_seed(0)
    forward = Sees.forward
    model = Sees(Config())
    yield model, ts.shard(model, {"up": "column"}, example_inputs=(X,))
    ts.distributed.destroy_process_group()
    visible.SCALE, Sees.factor, Sees.forward = 1.0, 1.0, forward  # type: ignore[method-assign]


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


def test_a_configuration_is_the_one_the_model_was_built_with(pair: Any) -> None:
    model, sharded = pair
    model.config.scale = 3.0
    assert sharded.config is model.config and torch.equal(sharded(X), model(X))
    model.config.scale = 1.0
    assert torch.equal(sharded(X), model(X)) and sharded.captures == 2


@pytest.mark.parametrize(
    "body",
    [
        scaled_by_global, partial(scaled_by_global), lambda x: [scaled_by_global(x)][0], ReadsGlobal(), Scales(),
        Reads().global_value,
    ],
    ids=["f", "partial", "lambda", "object", "module", "method"],
)  # fmt: skip
def test_globals_that_an_argument_reads_count(body: Any, own_process_group: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(visible, "SCALE", 2.0)
    model = Applies()
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X, body))
    assert torch.equal(sharded(X, body), model(X, body))
    monkeypatch.setattr(visible, "SCALE", 3.0)
    assert torch.equal(sharded(X, body), model(X, body))


class _Called(nn.Module):
    """Calls a method of an argument; an argument that is a class is instantiated first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, scale: Any) -> Tensor:
        return self.down((scale() if isinstance(scale, type) else scale).scaled(self.up(x)))


@pytest.mark.parametrize("scale", [ReadsGlobal(), ReadsGlobal], ids=["object", "class"])
def test_what_the_class_of_an_argument_holds_counts(scale: Any, own_process_group: None, monkeypatch: Any) -> None:
    model = _Called()
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X, scale))
    monkeypatch.setattr(ReadsGlobal, "factor", 3.0)
    assert torch.equal(sharded(X, scale), model(X, scale))
    monkeypatch.setattr(visible, "SCALE", 3.0)
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


CALLS = 0


def _counts(m: Any, h: Tensor) -> None:
    global CALLS
    CALLS += 1


def test_a_global_that_forward_counts_up_is_state() -> None:
    before = CALLS
    with pytest.raises(ts.CaptureError, match=r"CALLS again"):
        ts.shard(_TwoKinds(_counts, lambda m: 0.0), {}, example_inputs=(X, True))
    assert before == CALLS
    ts.distributed.destroy_process_group()
