"""Branches on the values of buffers, constants and random draws, which are known before a call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, disable_fake_quant, disable_observer
from torch.ao.quantization import observer as observers

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import gradient_error, run_ranks

SPLIT = {"up": "column", "down": "row"}
X = torch.arange(48, dtype=torch.float64).reshape(6, 8).sin()


class _Branch(nn.Module):
    """Two linear layers, and the function `body` between them, which uses the buffers."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(8, 16), nn.Linear(16, 8), body
        self.register_buffer("ready", torch.tensor(0))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("loc", torch.zeros(16))
        self.cached: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self, self.up(x)).relu())


def _first_batch(m: Any, h: Tensor) -> Tensor:
    """Initializes a buffer by the first batch, like an ActNorm."""
    if m.ready.item() == 0:
        m.loc.copy_(h.detach().mean(0))
        m.ready.fill_(1)
    return h - m.loc


def _warm_up(m: Any, h: Tensor) -> Tensor:
    """Branches on a buffer that it has just written, and on a constant."""
    m.steps[0] += 1
    limit = torch.tensor(2.5)
    if m.steps > limit and float(limit) > 2:
        h = h * 2
    return h


def _drops_layers(m: Any, h: Tensor) -> Tensor:
    for _ in range(2):
        if not m.training or torch.rand(1) > 0.5:
            h = h + nn.functional.dropout(h, 0.5)
            break
    return h


def _caches(m: Any, h: Tensor) -> Tensor:
    m.cached = torch.ones(16) if m.steps < 1e6 else h.new_zeros(16)
    return h * m.cached


BODIES = {"first batch": _first_batch, "warm up": _warm_up, "drops": _drops_layers, "caches": _caches}


@pytest.mark.parametrize("name", BODIES)
def test_a_graph_holds_the_side_that_the_model_takes(name: str) -> None:
    ts.check(_Branch(BODIES[name]), SPLIT, example_inputs=(X,), mesh=2).raise_on_error()


def _step(model: nn.Module, x: Tensor, seed: int) -> None:
    torch.manual_seed(seed)
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def _trains(rank: int) -> tuple[dict[str, float], str, int]:
    """Each model's largest error after some steps, the error text if ranks' buffers differ, the number of captures."""
    ts.distributed.init_process_group()
    warnings.simplefilter("ignore")
    found = {}
    for name, body in BODIES.items():
        for mesh in (None, "shard"):
            torch.manual_seed(0)
            model = _Branch(body).double()
            sharded: Any = ts.shard(copy.deepcopy(model), {} if mesh else SPLIT, mesh=mesh)
            for i in range(5):
                x = X + i / 10
                _step(model, x, i)
                _step(sharded, x.chunk(2)[rank] if mesh else x, i)
            expected, got = model.state_dict(), sharded.full_state_dict()
            errors = [float((expected[key] - got[key]).abs().max()) for key in expected]
            found[f"{name}, mesh={mesh}"] = max(*errors, gradient_error(sharded, model))
    again: Any = copy.deepcopy(sharded)
    torch.manual_seed(0)
    first: Any = ts.shard(_Branch(_first_batch).double(), SPLIT)
    for _ in range(4):
        first(X)
    captures = first.captures
    first.ready.fill_(rank)
    with pytest.raises(ts.InputError) as error:
        first(X)
    again(X.chunk(2)[rank])
    return found, str(error.value), captures


@pytest.mark.nightly
def test_another_value_gets_a_graph_of_its_own() -> None:
    for found, error, captures in run_ranks(_trains, 2):
        assert not {name: error for name, error in found.items() if not error < 1e-10}
        assert "numbers that forward takes from its buffers" in error and "m.ready.item() == 0" in error
        assert captures == 2


def _of_the_call(m: Any, h: Tensor) -> Tensor:
    m.steps.copy_(h.detach().mean())
    return h if m.steps > 0 else -h


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "an activation": (_of_the_call, "depend on the values of a tensor"),
    "a parameter": (lambda m, h: h if m.down.bias[0] > 0 else -h, "depend on the values of a tensor"),
    "a draw for it": (lambda m, h: h if torch.rand_like(h).sum() > 3 else -h, "depend on the values of a tensor"),
    "many elements": (lambda m, h: h if m.loc.any() else -h, r"of loc with 16 elements[\s\S]*a buffer of one"),
    "counts calls": (lambda m, h: h / float(m.steps.add_(1)), "depend on the values of a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_no_rank_knows_before_the_call_are_refused(name: str) -> None:
    body, text = REFUSED[name]
    with pytest.raises(ts.CaptureError, match=text):
        ts.check(_Branch(body), SPLIT, example_inputs=(X,), mesh=2)


def test_a_buffer_without_a_value_is_named() -> None:
    with torch.device("meta"):
        model = _Branch(_first_batch)
    with pytest.raises(ts.CaptureError, match="the graph depends on the value of ready, which has none"):
        ts.plan(model, SPLIT, example_inputs=(X.to("meta"),), mesh=2)


# --- libraries -------------------------------------------------------------------------------------------------------


class _Quantized(nn.Module):
    """The unfused fake quantizers of torch.ao: for a weight per channel, for an activation per tensor."""

    def __init__(self) -> None:
        super().__init__()
        channels = observers.MovingAveragePerChannelMinMaxObserver
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.of_weight = FakeQuantize(channels, -128, 127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
        self.of_value = FakeQuantize(observers.MovingAverageMinMaxObserver, 0, 255)

    def forward(self, x: Tensor) -> Tensor:
        up = nn.functional.linear(x, self.of_weight(self.up.weight), self.up.bias)
        y: Tensor = self.down(self.of_value(up))
        return y


@pytest.mark.nightly
def test_fake_quantizers_are_exact_while_they_do_not_observe_activations() -> None:
    model, x = _Quantized(), X.float()
    model(x)  # gives the buffers their shapes
    with pytest.raises(ts.CaptureError, match="depend on the values of a tensor"):
        ts.check(model, "auto", example_inputs=(x,), mesh=2, dtype=None)
    model.of_value.apply(disable_observer)
    ts.check(model, "auto", example_inputs=(x,), mesh=2, dtype=None).raise_on_error()
    model.of_weight.apply(disable_fake_quant)
    ts.check(model, "auto", example_inputs=(x,), mesh=2, dtype=None).raise_on_error()


ADAPTERS = {
    "LoHa": peft.LoHaConfig(r=4, target_modules=["up"], init_weights=False),
    "LoKr": peft.LoKrConfig(r=4, target_modules=["up"], init_weights=False),
    "VBLoRA": peft.VBLoRAConfig(r=2, target_modules=["up"], num_vectors=8, vector_length=4, topk=2),
}


@nightly(but=["LoHa"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_that_ask_for_values(kind: str) -> None:
    model: Any = peft.get_peft_model(_Branch(lambda m, h: h), ADAPTERS[kind])  # type: ignore[arg-type]
    ts.check(model.train(), "auto", example_inputs=(X,), mesh=2).raise_on_error()
