"""The memory of a step is the same if only a few of a model's equal layers are looked at."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import predicted_memory

COUNT = 9


class Layer(nn.Module):
    """A residual MLP; its width may alternate between layers."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers between an embedding and a loss."""

    def __init__(
        self, widths: list[int], *, recomputed: int = 0, all_states: bool = False, shared: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        made = [Layer(width) for width in widths]
        self.layers = nn.ModuleList(made)
        self.scale = nn.Parameter(torch.ones(8)) if shared else None
        self.recomputed, self.all_states = recomputed, all_states

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        states = [x]
        for i, layer in enumerate(self.layers):
            if self.scale is not None:
                x = x * self.scale
            x = checkpoint(layer, x, use_reentrant=False) if i < self.recomputed else layer(x)
            states.append(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return (loss, states) if self.all_states else loss


def _llama(width: int = 16) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_attention_heads=4, num_key_value_heads=2, vocab_size=32,
        num_hidden_layers=COUNT, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "equal": lambda: Stack([24] * COUNT),
    "alternating": lambda: Stack([24, 40] * COUNT),
    "two runs": lambda: Stack([24] * COUNT + [40] * COUNT),
    "other ends": lambda: Stack([40] + [24] * COUNT + [16]),
    "recomputed": lambda: Stack([24] * COUNT, recomputed=COUNT),
    "some recomputed": lambda: Stack([24] * 2 * COUNT, recomputed=COUNT),
    "all states": lambda: Stack([24] * COUNT, all_states=True),
    "shared": lambda: Stack([24] * COUNT, shared=True),
    "llama": _llama,
    "wide llama": lambda: _llama(256),  # its gathers begin a layer early
}
MESHES: dict[str, Any] = {"tp": 2, "dp": {"dp": (2, "shard")}, "both": {"dp": (2, "shard"), "tp": 3}}


def _both(plan: ts.Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], dict[str, float]]:
    """The memory by few layers, and by all; checks that some layers were left out."""
    made: list[Any] = []
    of = sys.modules["torchshard.compiler.shortened"].shortened

    def seen(*args: Any) -> Any:
        made.append(of(*args))
        return made[-1]

    monkeypatch.setattr("torchshard.compiler.memory.shortened", seen)
    few = predicted_memory(plan)
    assert made[-1].gaps
    monkeypatch.setattr("torchshard.compiler.shortened.KEPT", 1000)
    return few, predicted_memory(plan)


@nightly(but=["tp-equal", "both-alternating", "tp-some recomputed", "dp-all states", "tp-llama", "dp-wide llama"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", MESHES)
def test_few_of_the_layers_take_the_memory_of_all(mesh: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = MODELS[name](), torch.randint(16, (4, 6))
    kwargs = {"input_ids": ids, "labels": ids} if "llama" in name else {"ids": ids}
    plan = ts.plan(model, "auto", example_kwargs=kwargs, mesh=MESHES[mesh])
    few, all_layers = _both(plan, monkeypatch)
    assert few == all_layers
    monkeypatch.undo()


@pytest.mark.parametrize("objective", [{"recompute": ["layers.[0-8]"]}, {"split": "sequence"}, {"mode": "infer"}])
def test_few_of_the_layers_take_the_memory_of_all_under(
    objective: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(16, (4, 6))
    plan = ts.plan(Stack([24] * 2 * COUNT), "auto", (ids,), mesh=2, objective=objective)
    few, all_layers = _both(plan, monkeypatch)
    assert few == all_layers


def test_a_limit_is_kept_by_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search within a memory limit looks at few layers too, and finds the plan that it finds with all of them."""
    model, ids = Stack([24] * COUNT), torch.randint(16, (32, 6))
    free = ts.plan(model, "auto", (ids,), mesh=2)
    objective = {"memory": 0.8 * predicted_memory(free)["peak"]}
    plan = functools.partial(ts.plan, model, "auto", (ids,), mesh=2, objective=objective)
    few = plan()
    assert few.recompute or few != free
    monkeypatch.setattr("torchshard.compiler.shortened.KEPT", 1000)
    assert plan() == few
