"""Tensors that share elements, and buffers with gradients, are refused; disjoint parts of one memory are accepted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.models import MLP
from tests.test_errors import X, _raises

# --- shared memory ---------------------------------------------------------------------------------------------------


class _Sharing(MLP):
    """A model with the tensors that `hold` adds, of which forward uses those that `read` returns."""

    def __init__(self, hold: Callable[[Any], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.register_buffer("stats", torch.rand(2, 12))
        hold(self)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.read(self))


def _flat(m: Any) -> None:
    flat = torch.rand(12, 4)
    m.register_buffer("first", flat[:, 0], persistent=False)
    m.second, m.scale = nn.Parameter(flat[:, 1]), nn.Parameter(torch.rand(()).expand(12))
    m.third, m.unread = flat[:, 2], m.stats[0]


def _in_closure(m: Any) -> None:
    mean = m.stats[1]
    m.shift = lambda: mean


SHARING: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "buffer 'stats' and buffer 'mean'": (
        lambda m: m.register_buffer("mean", m.stats[1], persistent=False),
        lambda m: m.mean,
    ),
    "parameter 'up.weight' and buffer 'first'": (
        lambda m: m.register_buffer("first", m.up.weight.data),
        lambda m: m.first[0],
    ),
    "parameter 'w' and parameter 'v'": (
        lambda m: (setattr(m, "w", nn.Parameter(m.stats.clone())), setattr(m, "v", nn.Parameter(m.w.data[1]))),
        lambda m: m.v * m.w.sum(0),
    ),
    "parameter 'up.bias' and buffer 'column'": (
        lambda m: m.register_buffer("column", m.up.bias.data[::2]),
        lambda m: m.column.sum(),
    ),
    "shares memory with buffer 'stats'": (lambda m: setattr(m, "mean", m.stats[0]), lambda m: m.mean),
    "with buffer 'stats' (a list)": (lambda m: setattr(m, "means", [m.stats[0]]), lambda m: m.means[0]),
    "with buffer 'stats' (a closure)": (_in_closure, lambda m: m.shift()),
    "with buffer 'stats' (a number)": (
        lambda m: setattr(m, "flag", m.stats[0, :1]),
        lambda m: m.stats[1] * (2 if m.flag > 2 else 1),
    ),
    "shares memory with parameter 'up.weight'": (
        lambda m: setattr(m, "before", m.up.weight.data),
        lambda m: m.before[0],
    ),
}
"""Text of the error -> (function that adds tensors to a model, function that reads them in forward)."""


@pytest.mark.parametrize("name", SHARING)
def test_memory_that_two_tensors_share_is_refused(name: str) -> None:
    calls: list[Callable[[nn.Module], Any]] = [
        lambda m: ts.shard(m, {}, (X,)),
        lambda m: ts.plan(m, {}, example_inputs=(X,), mesh=2),
        lambda m: ts.check(m, {}, example_inputs=(X,), mesh=2),
    ]
    for call in calls:
        text = _raises(lambda: call(_Sharing(*SHARING[name])))  # noqa: B023
        assert name.partition(" (")[0] in text and ".clone()" in text
    ts.distributed.destroy_process_group()


def test_memory_that_is_shared_is_refused_whenever_a_capture_finds_it() -> None:
    hold, read = SHARING["shares memory with buffer 'stats'"]
    early = ts.shard(_Sharing(hold, read), {})
    assert "test_shared_tensors.py" in _raises(lambda: early(X))
    assert "with buffer 'stats'" in _raises(lambda: copy.deepcopy(early)(X))
    with ts.lazy():
        lazy = _Sharing(hold, read)
    assert "with buffer 'stats'" in _raises(lambda: ts.shard(lazy, {}, (X,)))
    ts.distributed.destroy_process_group()


def test_tensors_beside_each_other_in_one_memory_are_accepted() -> None:
    model = _Sharing(_flat, lambda m: m.first + m.second * m.scale + m.third)
    assert torch.equal(ts.shard(model, {}, (X,))(X), model(X))
    assert ts.check(model, {"up": "column", "down": "row"}, example_inputs=(X,), mesh=2).ok
    tied = _Sharing(lambda m: (m.register_buffer("same", m.stats), setattr(m, "alias", m.stats)), lambda m: m.alias[0])
    assert torch.equal(ts.shard(tied, {}, (X,))(X), tied(X))
    ts.distributed.destroy_process_group()


# --- gradients of buffers --------------------------------------------------------------------------------------------


class _Scaled(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_a_buffer_that_requires_a_gradient_is_refused() -> None:
    trained = _Scaled()
    sharded = ts.shard(copy.deepcopy(trained), {}, (X,))
    trained.scale.requires_grad_(True)
    calls: list[Callable[[], Any]] = [
        lambda: ts.shard(trained, {}),
        lambda: ts.check(trained, {}, example_inputs=(X,), mesh=2),
        lambda: torch.func.functional_call(sharded, {"scale": torch.tensor(2.0, requires_grad=True)}, (X,)),
        lambda: sharded(X),
    ]
    sharded(X)
    sharded.scale.requires_grad_(True)
    for call in calls:
        assert "buffer 'scale' requires a gradient" in _raises(call)
    with torch.no_grad():
        assert torch.equal(sharded(X), trained(X))
    sharded.scale.requires_grad_(False)
    assert sharded(X).requires_grad
    ts.distributed.destroy_process_group()


class _Averages(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.scale.lerp_(y.mean(), 0.5)
        return y


def test_a_buffer_to_which_forward_writes_values_with_gradients_is_refused() -> None:
    sharded = ts.shard(_Averages(), {})
    sharded(X)
    assert "try:   store detached values in scale, or write to it under torch.no_grad()" in _raises(lambda: sharded(X))
    ts.distributed.destroy_process_group()
