"""Changes of values in module arguments, hooks, iterators and shared objects take effect."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.visible import HOLDER, Applies, Scales, Slots, X, set_to, times


def test_what_a_module_argument_holds_counts(own_process_group: None) -> None:
    model, scales = Applies(), Scales()
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X, scales))
    scales.factor = 3.0
    assert torch.equal(sharded(X, scales), model(X, scales))


class _Scaling:
    """A hook object."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.factor


def _hook_by_factor(factors: list[float], module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * factors[0]


@pytest.mark.parametrize(
    ("held", "read", "change"),
    [
        (held := [2.0], lambda held, x: x * held[0], partial(held.insert, 0, 3.0)),
        ([one := Slots(2.0)], lambda held, x: x * held[0].value, set_to(one, "value", 3.0)),
        ((one := Slots(2.0),), lambda held, x: x * held[0].value, set_to(one, "value", 3.0)),
        (numbers := {2.0}, lambda held, x: x * sum(held), partial(numbers.add, 3.0)),
        ({"mask": (mask := torch.ones(8))}, lambda held, x: x * held["mask"], partial(mask.fill_, 3.0)),
        (Slots(mask := torch.ones(8)), lambda held, x: x * held.value, partial(mask.fill_, 3.0)),
    ],
    ids=["list", "list of objects", "tuple of objects", "set", "dict of tensors", "object with a tensor"],
)
def test_what_a_model_holds_is_shared_with_the_original(
    held: Any, read: Any, change: Any, own_process_group: None
) -> None:
    model = Applies()
    model.held, model.body = held, lambda x: x  # type: ignore[assignment]
    model.down.register_forward_pre_hook(lambda module, args: read(module.held, args[0]))
    model.down.held = held  # type: ignore[assignment]
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X,))
    before = model(X)
    assert torch.equal(sharded(X), before)
    change()
    expected = model(X)
    assert not torch.equal(expected, before) and torch.equal(sharded(X), expected)


@pytest.mark.parametrize(
    ("hook", "change"),
    [
        (hook := _Scaling(), set_to(hook, "factor", 3.0)),
        (partial(_hook_by_factor, factors := [2.0]), partial(factors.insert, 0, 3.0)),
    ],
    ids=["object", "partial"],
)
def test_what_a_hook_holds_is_shared_with_the_original(hook: Any, change: Any, own_process_group: None) -> None:
    model = Applies(torch.relu)
    model.up.register_forward_hook(hook)
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X,))
    change()
    assert torch.equal(sharded(X), model(X))


def test_a_list_of_the_models_own_tensors_is_copied(own_process_group: None) -> None:
    model = Applies(torch.relu)
    model.weights = [model.up.weight, model.down.weight]  # type: ignore[assignment]
    sharded, before = ts.shard(model, {"up": "column", "down": "row"}, (X,)), model(X)
    with torch.no_grad():
        model.up.weight.zero_()
    assert torch.equal(sharded(X), before)


def test_equal_functions_that_are_made_anew_need_no_new_graph(own_process_group: None) -> None:
    HOLDER.value, trainer = [times(2.0)], _Trainer()
    sharded = ts.shard(Applies(lambda x: HOLDER.value[0](x)), {"up": "column", "down": "row"}, (X,))
    for _ in range(3):
        HOLDER.value = [times(2.0)]
        sharded(X)
        sharded(X, trainer.scaled)
    assert sharded.captures == 2


class _Trainer:
    """Has a method that serves as a hook."""

    def __init__(self) -> None:
        self.factor, self.step = 2.0, 0

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.factor

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_of_an_object_whose_method_is_a_hook_only_what_code_reads_counts(own_process_group: None) -> None:
    model, trainer = Applies(torch.relu), _Trainer()
    model.up.register_forward_hook(trainer.hook)
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X,))
    for trainer.step in range(3):
        assert torch.equal(sharded(X), model(X))
    assert sharded.captures == 1
    trainer.factor = 3.0
    assert torch.equal(sharded(X), model(X)) and sharded.captures == 2


class _Counts:
    """A class with one value that code reads, and one that it doesn't read."""

    factor, step = 2.0, 0


def test_of_a_class_that_code_mentions_only_what_code_reads_counts(
    own_process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Applies(lambda x: x * _Counts.factor)
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X,))
    for step in range(3):
        monkeypatch.setattr(_Counts, "step", step)
        assert torch.equal(sharded(X), model(X))
    assert sharded.captures == 1
    monkeypatch.setattr(_Counts, "factor", 3.0)
    assert torch.equal(sharded(X), model(X)) and sharded.captures == 2


class _Collector:
    """Has a hook method that keeps an activation."""

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output


def test_a_capture_leaves_nothing_in_the_object_behind_a_hook(own_process_group: None) -> None:
    model, collector = Applies(torch.relu), _Collector()
    model.up.register_forward_hook(collector.hook)
    assert torch.equal(ts.shard(model, {"up": "column", "down": "row"}, (X,))(X), model.down(torch.relu(model.up(X))))
    del collector.kept
    ts.shard(model, {"up": "column", "down": "row"}, (X,))
    assert not hasattr(collector, "kept")


def test_hooks_on_all_modules_are_told_apart_by_what_they_hold(own_process_group: None) -> None:
    def scales(factor: float) -> Callable[..., Tensor | None]:
        return lambda module, args, output: output * factor if isinstance(module, nn.Linear) else None

    model = Applies(torch.relu)
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X,))
    for factor in (2.0, 3.0):
        handle = nn.modules.module.register_module_forward_hook(scales(factor))
        try:
            assert torch.equal(sharded(X), model(X))
        finally:
            handle.remove()


ENDLESS, CONSTANT = itertools.cycle([1.0, 2.0]), itertools.repeat(2.0)


def test_an_iterator_that_forward_advances_is_state() -> None:
    with pytest.raises(ts.CaptureError, match="keeps state"):
        ts.shard(Applies(lambda x: x * next(ENDLESS)), {}, example_inputs=(X,))
    ts.distributed.destroy_process_group()


def test_an_iterator_whose_values_are_equal_may_be_read(own_process_group: None) -> None:
    model = Applies(lambda x: x * next(CONSTANT))
    assert torch.equal(ts.shard(model, {"up": "column", "down": "row"}, (X,))(X), model(X))


class _Caches(nn.Module):
    """Makes a tensor at its first call, and reads it at the later ones."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.up, self.make, self.cached = nn.Linear(6, 6), make, None

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = self.make() * 2
        return self.up(x) + self.cached


DRAWS = {
    "randn": lambda: torch.randn(6),
    "in place": lambda: torch.empty(6).normal_(),
    "dropout": lambda: nn.functional.dropout(torch.ones(6), 0.5),
    "numbers": lambda: torch.randperm(6).to(torch.float32),
}


@pytest.mark.parametrize("make", DRAWS.values(), ids=DRAWS)
def test_a_draw_that_later_calls_read_is_state(make: Callable[[], Tensor], own_process_group: None) -> None:
    """A graph would draw anew at each call."""
    with pytest.raises(ts.CaptureError, match=r"(?s)keeps state.*where: cached"):
        ts.shard(_Caches(make), {}, (X,))


def test_a_constant_that_later_calls_read_is_none(own_process_group: None) -> None:
    model = _Caches(lambda: torch.arange(6.0))
    sharded = ts.shard(model, {"up": "column"}, (X,))
    assert torch.equal(sharded(X), model(X)) and torch.equal(sharded(X), model(X))


def test_function_arguments_are_distinguished_by_their_behaviour() -> None:
    class Applies(nn.Module):
        def forward(self, x: Tensor, f: Any) -> Tensor:
            return f(x)

    sharded = ts.shard(Applies(), {})
    for factor in (2.0, 3.0, 2.0, 3.0):
        assert torch.equal(sharded(X, lambda x: x * factor), X * factor)  # noqa: B023
    assert sharded.captures == 2
    ts.distributed.destroy_process_group()
