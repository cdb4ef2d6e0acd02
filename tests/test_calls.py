"""Calls of a sharded model: arguments that select a graph, arguments that are refused, and hooks."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import kept_graphs

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class _Scaled(nn.Module):
    """A linear layer that scales its result by an argument of any type."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(6, 8), nn.Dropout(0.5)
        self.config = {"width": 8}

    def forward(self, x: Tensor, by: Any = None) -> Tensor:
        return self.drop(self.up(x)) * _factor(by)


def _factor(by: Any) -> Any:
    if isinstance(by, _Options):
        return by.scale if by.mask is None else by.mask * by.scale
    if isinstance(by, UserDict):
        return by["mask"]
    return sum(by) if isinstance(by, set) else 1 if by is None else by() if callable(by) else by


class _Options:
    """A plain object."""

    def __init__(self, scale: float, mask: Tensor | None = None) -> None:
        self.scale, self.mask = scale, mask

    def __repr__(self) -> str:
        return "options"


def _two() -> int:
    return 2


@pytest.fixture
def pair() -> Iterator[tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    model = _Scaled().eval()
    yield model, ts.shard(model, {"up": "column"})
    ts.distributed.destroy_process_group()


LONG = torch.randn(3, 4, 8, 200)
ARGUMENTS = [
    [1.0, 1, True, 2.0],
    [0.0, -0.0, 2],
    [_Options(2.0), _Options(3.0), _Options(2.0, torch.ones(8)), _Options(2.0, torch.zeros(8))],
    [UserDict(mask=torch.full((4, 8), float(i))) for i in range(3)],
    [{1, 2}, {1, 3}, {3, 1}],
    [_two, lambda: 3, lambda: 4],
]


@nightly("float0", "function", "set")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: type(a[0]).__name__)
def test_non_tensor_arguments_are_distinguished_by_value(pair: Any, arguments: list[Any]) -> None:
    model, sharded = pair
    for by in [*arguments, *arguments]:
        expected, got = model(X, by), sharded(X, by)
        assert torch.equal(torch.signbit(expected), torch.signbit(got)) and torch.equal(expected, got), by


def test_an_object_that_was_changed_is_another(pair: Any) -> None:
    model, sharded = pair
    options = _Options(2.0)
    sharded(X, options)
    options.scale = 5.0
    assert torch.equal(model(X, options), sharded(X, options))


class _Itself:
    def __init__(self) -> None:
        self.me = self


class _Bag(dict[str, Tensor]):
    """A dict that is not registered with pytree."""


@pytest.mark.parametrize("by", [np.ones(8), iter([1]), _Itself(), _Bag(a=X)], ids=lambda v: type(v).__name__)
def test_what_cannot_be_compared_is_refused(pair: Any, by: Any) -> None:
    with pytest.raises(ts.InputError, match="an argument"):
        pair[1](X, by)


def test_an_argument_that_forward_changes_is_changed() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            seen.append(x * 2)
            return x

    class WritesToSet(nn.Module):
        def forward(self, x: Tensor, seen: set[str]) -> Tensor:
            seen.add("x")
            return x

    sharded, seen = ts.shard(Writes(), {}), list[Tensor]()
    for count in (1, 2, 3):
        sharded(X, seen)
        assert len(seen) == count and torch.equal(seen[-1], X * 2)
    with pytest.raises(ts.CaptureError, match="writes to its arguments"):
        ts.shard(WritesToSet(), {})(X, set())
    ts.distributed.destroy_process_group()


class _FlattensAndWrites(nn.Module):
    """Writes to a reshape, which is a view or a copy depending on the input's strides."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        h.reshape(h.shape[0], -1).add_(1)
        return h


def test_inputs_with_other_strides_get_their_own_graph() -> None:
    model = _FlattensAndWrites()
    sharded, x = ts.shard(model, {}), torch.randn(4, 6, 8)
    for value in (x, x.transpose(1, 2), x.permute(2, 0, 1), x[:, ::2], x[:, :1].expand(4, 6, 8), x[1:3, :, 2:5]):
        assert torch.equal(model(value), sharded(value))
    count = len(kept_graphs(sharded))
    sharded(torch.randn(6, 5, 8))
    sharded(torch.randn(3, 6, 7).transpose(1, 2))
    assert len(kept_graphs(sharded)) == count
    ts.distributed.destroy_process_group()


class _Named(nn.Module):
    """Arguments with the names of a parameter and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 6))
        self.register_buffer("mask", torch.randn(7))

    def forward(self, x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return (x @ self.w.t()) * w + self.mask.sum() * mask.sum()


def test_an_argument_may_be_named_like_a_parameter() -> None:
    report = ts.check(_Named(), {}, example_inputs=(X, torch.randn(8), torch.randn(3)), mesh=2)
    assert report.ok, str(report)


def _doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def _shifted(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "by": 3}


def test_hooks_on_the_model_and_its_submodules() -> None:
    model = _Scaled().eval()
    model.register_forward_hook(_doubled)
    model.register_forward_pre_hook(_shifted, with_kwargs=True)
    model.up.register_forward_hook(_doubled)
    report = ts.check(model, {"up": "column"}, example_inputs=(X,), mesh=2)
    assert report.ok, str(report)
    assert torch.equal(ts.shard(model, {"up": "column"})(X), model(X))
    ts.distributed.destroy_process_group()
