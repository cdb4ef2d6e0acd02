"""Models with equal layers, and models with differing layers, for tests of captures that trace equal layers once."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import Reversal

LAYERS = 6


class Layer(nn.Module):
    """A residual MLP with a norm and a dropout, and a number that forward ignores."""

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
    """Layers that accept and return several values, some of them unchanged."""

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
    """A layer that stores a tensor as an attribute."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.mean = x.mean()
        return super().forward(x)


class Counting(Stack):
    """Resets the layers' counters before and after a call, so that all calls compute the same."""

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
    """Calls its layers with different arguments."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, 0.5 if number == 3 else 1.0)
        return self.head(x)


class Twice(Stack):
    """Calls one of its layers twice."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in [*self.layers, self.layers[2]]:
            x = layer(x)
        return self.head(x)


class Chance(Layer):
    """A layer with a setting that equals the number of some layers by chance."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.kind = number % 2

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, 0.5 if self.kind else 1.0)


class Default(Layer):
    """A layer that reads its number, for which its class has a default."""

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
    """Calls its third layer within a context manager."""

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
