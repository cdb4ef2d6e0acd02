"""For plans, only the first and last of equal layers are traced; the graph equals that of a full capture."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchshard as ts
from tests.helpers import nightly
from tests.layers import DIFFERENT, EQUAL, Layer, Stack
from torchshard.capture import flat
from torchshard.capture.call_arguments import flatten_call
from torchshard.capture.equal_layers import equal_layers
from torchshard.capture.layer_calls import DifferentLayers
from torchshard.ir.graph import fake_mode
from torchshard.ir.listing import listing
from torchshard.passes import normalize

IDS = torch.zeros(2, 5, dtype=torch.long)


def _captured(model: nn.Module, args: tuple[Any, ...], *, repeating: bool) -> flat.Captured:
    call = flatten_call(model, args, {})
    shapes = [flat.DYNAMIC_DIMS & set(range(t.ndim)) for t in call.tensors]
    return flat.captured_flat(model, call, shapes, {}, repeating=repeating)


def _text(captured: flat.Captured) -> str:
    """Returns the normalized graph as text, with facts of its nodes and the places where forward leaves tensors."""
    normalize(captured.graph)
    nodes = captured.graph.graph.nodes
    facts = [f"{n.name} {n.meta.get('module')} {n.meta.get('recompute')} {n.meta.get('autocast')}" for n in nodes]
    return "\n".join([listing(captured.graph), *facts, *map(str, captured.left)])


@nightly(but=["layers"])
@pytest.mark.parametrize("name", EQUAL)
def test_most_layers_are_not_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = EQUAL[name]()
    repeated = _captured(model, (IDS,), repeating=True)
    whole = _captured(model, (IDS,), repeating=False)
    assert _text(repeated) == _text(whole)
    cls, runs = type(equal_layers(model)[0][0].module), []
    own = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runs.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", forward)
    _captured(model, (IDS,), repeating=True)
    assert len(set(map(id, runs))) <= 3


@nightly(
    but=["has a class with a default for its number", "has a hook", "is put in eval mode", "reads its part's number"]
)
@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_traced(name: str) -> None:
    torch.manual_seed(0)
    model = DIFFERENT[name]()
    try:
        repeated = _text(_captured(model, (IDS,), repeating=True))
    except DifferentLayers:  # then each layer is traced
        repeated = ""
    whole = _text(_captured(model, (IDS,), repeating=False))
    assert repeated in ("", whole)


class Last(Layer):
    """A layer that computes differently as the last one, without an attribute that shows it."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, 0.5 if _is_last(self) else 1.0)


_LAST: list[nn.Module] = []


def _is_last(layer: nn.Module) -> bool:
    return any(layer is one for one in _LAST)


@pytest.mark.nightly
def test_what_the_last_layer_tells(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(Last)
    _LAST[:] = [model.layers[-1]]
    with pytest.raises(DifferentLayers, match=r"layers.5 computes something else than layers.0"):
        _captured(model, (IDS,), repeating=True)
    with caplog.at_level(logging.INFO, logger="torchshard.capture.flat"):
        captured = flat.capture(model, (IDS,), repeating=True)
    assert "each layer is traced" in caplog.text
    assert _text(captured) == _text(_captured(model, (IDS,), repeating=False))


def test_pytorchs_cache_is_kept_where_most_ops_repeat_an_earlier_one() -> None:
    for count, repeating, recur in ((2, False, False), (24, False, True), (24, True, False)):
        captured = flat.capture(Stack(count=count), (IDS,), repeating=repeating)
        mode = fake_mode(captured.graph.graph)
        assert isinstance(mode, FakeTensorMode) and mode.cache_enabled is recur


@pytest.mark.nightly
def test_a_model_that_runs_has_each_of_its_layers_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture misses the Python code of skipped layers, so only plans may skip layers."""
    asked: list[bool] = []
    own = flat.captured_flat

    def captured(*args: Any, repeating: bool, **kwargs: Any) -> flat.Captured:
        asked.append(repeating)
        return own(*args, repeating=repeating, **kwargs)

    monkeypatch.setattr(flat, "captured_flat", captured)
    plan = ts.plan(Stack(), example_inputs=(IDS,), mesh=2)
    assert asked == [True]
    ts.shard(Stack(), {}, (IDS,))(IDS)
    ts.check(Stack(), plan, example_inputs=(IDS,), mesh=2)
    assert asked[1:] and not any(asked[1:])
