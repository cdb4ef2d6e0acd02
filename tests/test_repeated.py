"""Equal layers are traced for the first and the last alone, to be planned: the graph is that of a capture of each."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import torchshard as ts
from tests.helpers import nightly
from tests.models import Reversal
from torchshard.capture import flat
from torchshard.capture.equal_layers import equal_layers
from torchshard.capture.repeated import DifferentLayers
from torchshard.capture.signature import flatten_call
from torchshard.ir.graph import fake_mode
from torchshard.ir.listing import listing
from torchshard.passes import normalize

LAYERS = 6


class Layer(nn.Module):
    """Attention of a kind, a dropout, and a number that nothing reads."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.1)
        self.number = number

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """An embedding, layers, a head."""

    def __init__(self, layer: Callable[[int], nn.Module] = Layer, count: int = LAYERS) -> None:
        super().__init__()
        self.tok = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(layer(number) for number in range(count))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.zeros(2, 5, dtype=torch.long)


def _captured(model: nn.Module, args: tuple[Any, ...], *, repeating: bool) -> flat.Captured:
    call = flatten_call(model, args, {})
    shapes = [flat.DYNAMIC_DIMS & set(range(t.ndim)) for t in call.tensors]
    return flat.captured_flat(model, call, shapes, {}, repeating=repeating)


def _text(captured: flat.Captured) -> str:
    """The whole graph, after the writes have become functional, and what it leaves."""
    normalize(captured.graph)
    nodes = captured.graph.graph.nodes
    facts = [f"{n.name} {n.meta.get('module')} {n.meta.get('recompute')} {n.meta.get('autocast')}" for n in nodes]
    return "\n".join([listing(captured.graph), *facts, *map(str, captured.left)])


class Conv(nn.Module):
    """A layer that writes to its buffers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += x
        return y.relu_()


class Checkpointed(Stack):
    """Layers in checkpoints."""

    use_reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Reentrant(Checkpointed):
    use_reentrant = True


class Tuples(Stack):
    """Layers that take and return several values, some as they came in."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(
            self, state: tuple[Tensor, Tensor], mask: Tensor, *, flag: bool
        ) -> tuple[dict[str, Tensor], Tensor]:
            x = self.up(state[0]) * mask if flag else state[0]
            return {"x": x, "first": state[1]}, x.detach().sum()

    def __init__(self) -> None:
        super().__init__(lambda number: self.Layer())

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok(ids)
        state, total = {"x": x, "first": x}, torch.zeros(())
        mask = (ids > 0).unsqueeze(-1).float()
        for layer in self.layers:
            state, one = layer((state["x"], state["first"]), mask, flag=True)
            total = total + one
        return self.head(state["x"] + state["first"]), total


def _llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "vocab_size": 11}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, num_key_value_heads=2, use_cache=False, **sizes))


def _tied() -> nn.Module:
    model = Stack()
    for layer in model.layers:
        layer.up.weight = model.layers[0].up.weight
    return model


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "layers": Stack,
    "in eval mode": lambda: Stack().eval(),
    "llama": _llama,
    "checkpoints": Checkpointed,
    "reentrant checkpoints": Reentrant,
    "several values": Tuples,
    "PyTorch's encoder": lambda: Stack(lambda number: nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True)),
}


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


COUNT = [0]
TOGETHER = [0]


class ReadsNumber(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, 0.5 if self.number == 2 else 1.0)


class ReadsNumberOfPart(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.down.number = number  # type: ignore[assignment]

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, [1.0, 1.0, 0.5, 1.0, 1.0, 1.0][self.down.number])  # type: ignore[index]


class CountsGlobally(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        COUNT[0] += 1
        return super().forward(x, 0.5 if COUNT[0] % LAYERS == 3 else 1.0)


class CountsInClass(Layer):
    count = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        type(self).count += 1
        return super().forward(x, 0.5 if self.count % LAYERS == 3 else 1.0)


class CountsTogether(Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.count = TOGETHER

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.count[0] += 1
        return super().forward(x, 0.5 if self.count[0] % LAYERS == 3 else 1.0)


class Keeps(Layer):
    """Leaves a tensor that others read."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.mean = x.mean()
        return super().forward(x)


class Counting(Stack):
    """Sets what its layers count back to zero, so that each call leaves the same."""

    def forward(self, ids: Tensor) -> Tensor:
        COUNT[0] = TOGETHER[0] = CountsInClass.count = 0
        result = super().forward(ids)
        COUNT[0] = TOGETHER[0] = CountsInClass.count = 0
        return result


class Reverses(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(Reversal.apply(x), scale)


class ChecksInside(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return checkpoint(super().forward, x, scale, use_reentrant=False)


class Scaled(Stack):
    """Layers that are called in different ways."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, 0.5 if number == 3 else 1.0)
        return self.head(x)


class Twice(Stack):
    """A layer that is called twice."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in [*self.layers, self.layers[2]]:
            x = layer(x)
        return self.head(x)


class Chance(Layer):
    """A setting that is some layers' number by chance."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.kind = number % 2

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, 0.5 if self.kind else 1.0)


class Default(Layer):
    """A number whose class has a default for it."""

    number = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, 1.0 + self.number)


class Slots(Layer):
    __slots__ = ("rate",)

    def __init__(self, number: int) -> None:
        super().__init__()
        self.rate = 0.5 if number == 2 else 1.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, self.rate)


class ReadsContext(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, CONTEXT.get())


class Appends(Layer):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:  # type: ignore[override]
        seen.append(x.mean())
        return super().forward(x)


CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)


class Appended(Stack):
    """Layers that append to a list among their arguments."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, seen = self.tok(ids), list[Tensor]()
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(x), torch.stack(seen).sum()


class Around(Stack):
    """Layers of which the third is called in a state that is set around it."""

    def __init__(self, around: Callable[[nn.Module], AbstractContextManager[object]], layer: Any = Layer) -> None:
        super().__init__(layer)
        self.around = around

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for number, layer in enumerate(self.layers):
            with self.around(layer) if number == 2 else nullcontext():
                x = layer(x)
        return self.head(x)


@contextmanager
def _in_eval_mode(layer: nn.Module) -> Iterator[None]:
    layer.eval()
    yield
    layer.train()


@contextmanager
def _with_a_hook(layer: nn.Module) -> Iterator[None]:
    with layer.up.register_forward_hook(lambda m, args, result: result * 2.0):
        yield


@contextmanager
def _with_another_scale(layer: nn.Module) -> Iterator[None]:
    token = CONTEXT.set(0.5)
    yield
    CONTEXT.reset(token)


def _changed(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Stack()
        change(model.layers[2])
        return model

    return make


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "reads its number": lambda: Stack(ReadsNumber),
    "reads its part's number": lambda: Stack(ReadsNumberOfPart),
    "counts in a global": lambda: Counting(CountsGlobally),
    "keeps a tensor": lambda: Stack(Keeps),
    "counts in what layers share": lambda: Counting(CountsTogether),
    "counts in its class": lambda: Counting(CountsInClass),
    "has a custom Function": lambda: Stack(Reverses),
    "has a checkpoint inside": lambda: Stack(ChecksInside),
    "is called in another way": Scaled,
    "is called twice": Twice,
    "has a setting that is a number by chance": lambda: Stack(Chance, 8),
    "has a class with a default for its number": lambda: Stack(Default),
    "has slots": lambda: Stack(Slots),
    "appends to an argument": lambda: Appended(Appends),
    "writes in place": lambda: Stack(Conv),
    "is put in eval mode": lambda: Around(_in_eval_mode),
    "gets a hook": lambda: Around(_with_a_hook),
    "reads another context": lambda: Around(_with_another_scale, ReadsContext),
    "has another rate": _changed(lambda layer: setattr(layer.drop, "p", 0.3)),
    "is in eval mode": _changed(lambda layer: layer.eval()),
    "has a hook": _changed(lambda layer: layer.register_forward_hook(lambda m, args, result: result * 2.0)),
    "has a hook inside": _changed(lambda layer: layer.up.register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))),
    "has another forward": _changed(lambda layer: setattr(layer, "forward", lambda x: x * 2.0)),
    "is frozen": _changed(lambda layer: layer.requires_grad_(False)),
    "has another width": _changed(lambda layer: layer._modules.update(up=nn.Linear(8, 4), down=nn.Linear(4, 8))),
    "has no bias": _changed(lambda layer: layer.up.register_parameter("bias", None)),
    "shares a parameter": _tied,
}


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
    """A layer whose last one is told from the others by what no attribute shows."""

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
    """What Python code does in the layers between is not seen, so that it serves for plans alone."""
    asked: list[bool] = []
    own = flat.captured_flat

    def captured(*args: Any, repeating: bool, **kwargs: Any) -> flat.Captured:
        asked.append(repeating)
        return own(*args, repeating=repeating, **kwargs)

    monkeypatch.setattr(flat, "captured_flat", captured)
    plan = ts.plan(Stack(), world_size=2, example_inputs=(IDS,))
    assert asked == [True]
    ts.shard(Stack(), {}, (IDS,))(IDS)
    ts.check(Stack(), plan, world_size=2, example_inputs=(IDS,))
    assert asked[1:] and not any(asked[1:])
