"""PyTorch's attention and transformers are split by heads, with Megatron's collectives, exactly for any mask."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import nightly
from torchshard.testing import CapturedCall, capture

WIDTH = 24


def _draw(*shape: int) -> Tensor:
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    return made.requires_grad_()


def _padding(batch: int, length: int) -> Tensor:
    return torch.arange(length).expand(batch, -1) >= torch.tensor([[length - 2], *([[length]] * (batch - 1))])


def _causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


class _Encoder(nn.Module):
    def __init__(self, heads: int, *, causal: bool = False, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, heads, 2 * WIDTH, dtype=torch.float64, **options)
        self.layers, self.causal = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), causal

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = _causal(x.shape[1]) if self.causal else None
        y: Tensor = self.layers(x, mask, padding, is_causal=self.causal)
        return y


class _Transformer(nn.Module):
    def __init__(self, heads: int, **options: Any) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, heads, 1, 1, 2 * WIDTH, batch_first=True, dtype=torch.float64, **options)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = _causal(y.shape[1])
        z: Tensor = self.body(x, y, tgt_mask=mask, tgt_is_causal=True, src_key_padding_mask=padding)
        return z


class _Attention(nn.Module):
    def __init__(self, heads: int = 4, *, average: bool = True, **options: Any) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(WIDTH, heads, batch_first=True, dtype=torch.float64, **options)
        self.average = average

    def forward(
        self, x: Tensor, y: Tensor | None = None, padding: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y = x if y is None else y
        found: tuple[Tensor, Tensor] = self.body(
            x, y, y, key_padding_mask=padding, attn_mask=mask, average_attn_weights=self.average
        )
        return found


def _encoder(heads: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: _Encoder(heads, **{"batch_first": True, "dropout": 0.0, **options})


def _sizes(batch: int, length: int, other: int) -> tuple[Tensor, Tensor]:
    return _draw(batch, length, WIDTH), _draw(batch, other, WIDTH)


X, Y = _sizes(3, 5, 7)
CASES: dict[str, tuple[Callable[[], nn.Module], list[tuple[Any, ...]], int]] = {
    "encoder, padded, with dropout": (
        _encoder(4, dropout=0.1), [(X, _padding(3, 5)), (_draw(2, 9, WIDTH), _padding(2, 9))], 2
    ),
    "encoder, length first": (_encoder(4, batch_first=False), [(X,), (_draw(6, 2, WIDTH),)], 2),
    "encoder, causal, norms first": (_encoder(6, causal=True, norm_first=True), [(X,), (_draw(2, 8, WIDTH),)], 4),
    "encoder, a rank without heads": (_encoder(6, dropout=0.1), [(X, _padding(3, 5))], 4),
    "encoder, five ranks without heads": (_encoder(3), [(X,), (_draw(1, 4, WIDTH),)], 8),
    "transformer": (lambda: _Transformer(4), [(X, Y, _padding(3, 5)), (*_sizes(2, 4, 3), _padding(2, 4))], 2),
    "attention, with dropout": (lambda: _Attention(dropout=0.2), [(X,), (_draw(4, 3, WIDTH),)], 2),
    "attention, other keys, a weight for each head": (
        lambda: _Attention(average=False), [(X, Y, _padding(3, 7)), (*_sizes(2, 3, 6), _padding(2, 6))], 2
    ),
    "attention, a bias of keys and a zero key": (
        lambda: _Attention(add_bias_kv=True, add_zero_attn=True), [(X,), (_draw(4, 3, WIDTH),)], 3
    ),
    "attention, a mask for each head": (_Attention, [(X, None, None, _draw(12, 5, 5).detach())], 2),
    "attention, weights of their own": (lambda: _Attention(kdim=WIDTH, vdim=WIDTH), [(X, Y), _sizes(2, 3, 6)], 3),
}  # fmt: skip
"""Case -> (model, calls that one graph serves, ranks)."""


@nightly(but=["attention, a mask for each head"])
@pytest.mark.parametrize("name", CASES)
def test_one_graph_is_exact_for_any_batch_and_length(name: str) -> None:
    build, calls, world_size = CASES[name]
    torch.manual_seed(0)
    model = build()
    made = capture(model, calls[0]).plan("auto", world_size)
    for call in calls:
        report = made.call(*call).check()
        assert report.ok, str(report)


LAYER = {"d_model": 256, "nhead": 8, "dim_feedforward": 1024, "batch_first": True}
STACKS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, int]]] = {
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2, enable_nested_tensor=False),
        1,
        {"reduce": 4, "copy": 4},
    ),
    "decoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER), 2), 2, {"reduce": 6, "copy": 7}),
}
"""Case -> (model, number of inputs, collectives of a forward). A decoder copies its memory once for all layers."""


@functools.cache
def _captured_stack(kind: str) -> CapturedCall:
    """Captures a stack on the meta device, once for all numbers of ranks."""
    build, inputs, _ = STACKS[kind]
    with torch.device("meta"):
        model, x = build(), torch.empty(8, 128, 256).requires_grad_()
    return capture(model, (x,) * inputs)


@nightly(but=["encoder-8"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("kind", STACKS)
def test_a_layer_sends_as_much_as_megatrons(kind: str, world_size: int) -> None:
    """One forward all-reduce for each attention and feed-forward block, one backward all-reduce for each copy."""
    assert Counter(_captured_stack(kind).plan({}, world_size).collectives()) == STACKS[kind][2]
