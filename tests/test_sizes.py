"""Sizes that the ranks don't divide evenly: heads, vocabularies, hidden sizes; batches of one, any length."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import CapturedCall, PlannedCall, Shard, capture, split


def _ids(batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(3))}


@functools.cache
def _llama(heads: int, kv_heads: int, head: int = 4, inner: int = 22, vocabulary: int = 29) -> CapturedCall:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=heads * head, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head, vocab_size=vocabulary, use_cache=False,
    )  # fmt: skip
    return capture(transformers.LlamaForCausalLM(config).double(), (), _ids(2, 5, vocabulary))


def _check(call: CapturedCall, world: int, *calls: dict[str, Tensor]) -> PlannedCall:
    made = call.plan({}, world)
    for each in calls:
        report = made.call(**each).check()
        assert report.ok, str(report)
    return made


def _held(made: PlannedCall, name: str) -> list[int]:
    """Returns each rank's number of rows of a weight."""
    layout, world = made.plan.parameters[name], made.plan.world_size
    assert isinstance(layout, Shard) and layout.dim == 0, f"{name} {layout}"
    rows = torch.arange(made.plan.stored[name].shape[0])
    return [len(split(rows, layout, rank, world)) for rank in range(world)]


@nightly(but=["8-3"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_kv_heads_beside_ranks(kv_heads: int, world: int) -> None:
    """More ranks than key heads, equally many, or a number that doesn't divide them."""
    made = _check(_llama(6, kv_heads), world, _ids(2, 5, 29))
    layers = [p for name, p in made.plan.parameters.items() if ".mlp." in name]
    assert layers and all(p != ts.I for p in layers)


@pytest.mark.nightly
@pytest.mark.parametrize("heads, most", [(7, 4), (28, 16)])
def test_heads_that_eight_ranks_do_not_share_evenly(heads: int, most: int) -> None:
    """Heads are never cut in two: with seven heads, the eighth rank has none."""
    made = _check(_llama(heads, heads), 8, _ids(1, 3, 29))
    held = _held(made, "model.layers.0.self_attn.q_proj.weight")
    assert sum(held) == heads * 4 and max(held) == most and all(rows % 4 == 0 for rows in held)


@pytest.mark.parametrize("vocabulary, hidden, world", [(99, 12, 2), (99, 12, 4), (50_257, 4, 3)])
def test_vocabularies_that_do_not_divide(vocabulary: int, hidden: int, world: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.norm = nn.Embedding(vocabulary, hidden), nn.LayerNorm(hidden)

        def forward(self, ids: Tensor) -> Tensor:
            logits = self.norm(self.tok(ids)) @ self.tok.weight.T
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    torch.manual_seed(0)
    model, ids = Tied().double(), torch.randint(vocabulary, (2, 4))
    made = capture(model, (ids,)).plan({"tok": "vocab"}, world)
    assert sum(_held(made, "tok.weight")) == vocabulary
    report = made.check()
    assert report.ok, str(report)


@nightly("5-*")
@pytest.mark.parametrize("head, inner, world", [(5, 13, 2), (3, 7, 3), (5, 13, 4)])
def test_hidden_sizes_that_do_not_divide(head: int, inner: int, world: int) -> None:
    """Rotary embeddings need even head sizes; this model has learned positions."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=5 * head, n_inner=inner, n_layer=1, n_head=5, vocab_size=31, n_positions=16, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).double()
    _check(capture(model, (), _ids(2, 5, 31)), world, _ids(2, 5, 31))


@nightly("2")
@pytest.mark.parametrize("world", [2, 3])
def test_one_graph_for_any_batch_and_length(world: int) -> None:
    calls: list[dict[str, Any]] = [_ids(batch, length, 29) for batch, length in ((2, 5), (3, 2), (7, 9))]
    _check(_llama(6, 2), world, *calls)


def test_a_batch_of_one() -> None:
    call = _ids(1, 4, 29)
    _check(capture(_llama(6, 2).model, (), call), 3, call)


class _Windows(nn.Module):
    """A model with windows of four places, merged into the batch and split off again, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x.unsqueeze(1).expand(-1, 4, -1).flatten(0, 1)).relu()
        return self.down(heads.reshape(-1, 4, 2))


def test_a_size_is_inferred_though_a_rank_holds_nothing() -> None:
    torch.manual_seed(0)
    model, example = _Windows().double(), (torch.randn(3, 8).double(),)
    for world in (2, 3):
        report = ts.check(model, {"up": "column", "down": "row"}, example_inputs=example, mesh=world)
        assert report.ok, str(report)
