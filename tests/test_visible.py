"""What forward sees beside its arguments: where that changes, a sharded model computes with it as it is now."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import refused, run_ranks
from torchshard.capture import Watch
from torchshard.capture.attributes import attributes
from torchshard.capture.user_code import user_functions
from torchshard.capture.watch import ObjectNumbers

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
SCALE = 1.0
LOGGER = logging.getLogger("a logger that forward reads")


class _Config:
    def __init__(self) -> None:
        self.scale, self.flags = 1.0, {"doubled": False}


class _Slope:
    """An activation that is an object."""

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
    """A linear, scaled by everything that a forward can see."""

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


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_sharding_counts(pair: Any, change: str) -> None:
    model, sharded = pair
    before = sharded(X)
    assert torch.equal(before, model(X)) and sharded._ts_graphs.captures == 1
    CHANGES[change](sharded)
    if torch.equal(model(X), before):
        CHANGES[change](model)  # it has one of its own
    expected = model(X)
    assert not torch.equal(expected, before) and torch.equal(sharded(X), expected), change
    assert sharded._ts_graphs.captures == 2 and torch.equal(sharded(X), expected) and sharded._ts_graphs.captures == 2


def test_a_configuration_is_the_one_the_model_was_built_with(pair: Any) -> None:
    model, sharded = pair
    model.config.scale = 3.0
    assert sharded.config is model.config and torch.equal(sharded(X), model(X))
    model.config.scale = 1.0
    assert torch.equal(sharded(X), model(X)) and sharded._ts_graphs.captures == 2


def test_only_own_code_is_followed() -> None:
    names = {function.__name__ for function in user_functions(_Sees(_Config()))}
    assert {"forward", "scaled", "_scaled_by_global", "__call__"} <= names and "linear" not in names
    assert not [place for place in attributes(_Sees(_Config())) if "LOGGER" in place and len(place) > 2]


def test_states_are_numbered_as_they_appear() -> None:
    model = _Sees(_Config())
    watch = Watch(model)
    for scale, number in ((1.0, 0), (2.0, 1), (1.0, 0), (3.0, 2), (3.0, 2), (True, 3)):
        model.config.scale = scale
        assert watch.state() == number
    assert watch.latest_change == "config.scale"


def test_function_arguments_are_distinguished_by_their_behaviour() -> None:
    class Applies(nn.Module):
        def forward(self, x: Tensor, f: Any) -> Tensor:
            return f(x)

    sharded = ts.shard(Applies(), {})
    for factor in (2.0, 3.0, 2.0, 3.0):
        assert torch.equal(sharded(X, lambda x: x * factor), X * factor)  # noqa: B023
    assert sharded._ts_graphs.captures == 2
    ts.distributed.destroy_process_group()


# --- what one kind of call leaves for another ------------------------------------------------------------------------


class _TwoKinds(nn.Module):
    """Encodes, and decodes what was encoded."""

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


# --- ranks -----------------------------------------------------------------------------------------------------------


def _changed_on_one_rank(rank: int) -> list[bool]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    sharded = ts.shard(_Sees(_Config()), {"up": "column"}, example_inputs=(X,))
    sharded.config.scale = 2.0 if rank else 1.0
    found = [refused(lambda: sharded(X), "changed last: config.scale", ts.InputError)]
    sharded.config.scale = 3.0 + rank
    found.append(refused(lambda: sharded(X), "the attributes and globals that forward reads", ts.InputError))
    sharded.config.scale = 1.0
    return [*found, sharded(X) is not None]


def test_a_change_on_one_rank_is_an_error_on_all() -> None:
    assert run_ranks(_changed_on_one_rank, 2) == [[True] * 3] * 2


def test_objects_are_numbered_and_not_kept_alive() -> None:
    numbers, first, second = ObjectNumbers(), torch.ones(1), object()
    assert [numbers.of(value) for value in (first, second, first)] == [0, 1, 0]
    gone = weakref.ref(first)
    del first
    assert gone() is None and numbers.of(torch.ones(1)) == 2


class _Scaled(nn.Module):
    """Reads an array of its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config = SimpleNamespace(scale=np.arange(4, dtype=np.float32).reshape(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * torch.from_numpy(self.config.scale))


def test_an_array_of_equal_bytes_and_another_shape_is_another_value() -> None:
    ts.distributed.init_process_group()
    model, x = _Scaled(), torch.randn(4, 4)
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (x,))
    assert torch.equal(sharded(x), model(x))
    model.config.scale = model.config.scale.reshape(4, 1)
    assert torch.equal(sharded(x), model(x))
