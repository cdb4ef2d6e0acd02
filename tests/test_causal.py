"""A mask that is exactly causal is recognised; any other mask is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import nightly
from torchshard.testing import capture

aten = torch.ops.aten


def _attention(graph: fx.GraphModule) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.target is aten.scaled_dot_product_attention.default)


def _normalized(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return capture(model, inputs).graph


class _Masked(nn.Module):
    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        mask = self.mask(i[:, None], i[None, :]).expand(x.shape[0], 1, -1, -1)
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def _halves(length: int, size: int) -> Tensor:
    """The number of each position's document, of which the first has this length: one document at small sizes."""
    ones = torch.ones(length, dtype=torch.long)
    return torch.cat([ones, ones + 1])[:size]


def _documents(positions: Tensor, step: int) -> Tensor:
    """The number of each position's document, as transformers finds it: a new one begins where positions don't step."""
    return (torch.diff(positions, prepend=positions[:1] - 1) != step).cumsum(0)


@nightly("3-<lambda>-True0")
@pytest.mark.parametrize(
    "mask, causal",
    [
        (lambda q, k: k <= q, True),
        (lambda q, k: (q >= k) & (k + 0 <= q), True),
        (lambda q, k: (k <= q) & (k > q - 1000), False),
        (lambda q, k: k < q, False),
        (lambda q, k: k >= q, False),
        (lambda q, k: k <= q + 1, False),
        (lambda q, k: (k <= q) & (_documents(k.reshape(-1), 1)[q] == _documents(k.reshape(-1), 1)[k]), True),
        (lambda q, k: (k <= q) & (_documents(k.reshape(-1) // 4, 1)[q] == _documents(k.reshape(-1) // 4, 1)[k]), False),
        (lambda q, k: (k <= q) & (_documents(k.reshape(-1), 0)[q] == _documents(k.reshape(-1), 0)[k]), False),
        (lambda q, k: (k <= q) & (k - 7 <= q), False),
        (lambda q, k: (k <= q) & (_halves(20, q.numel())[q] == _halves(20, q.numel())[k]), False),
        (lambda q, k: (k <= q) & (torch.cat([k[:, 1:], k[:, :1]], 1) - 7 <= q), False),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_only_the_plain_triangle(mask: Callable[[Tensor, Tensor], Tensor], causal: bool, batch: int) -> None:
    x = torch.randn(batch, 6, 8)
    node = _attention(_normalized(_Masked(mask), x))
    assert (len(node.args) > 5 and node.args[5] is True and node.args[3] is None) == causal


def test_llama_keeps_is_causal_without_padding_and_its_mask_with() -> None:
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=32, vocab_size=50
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(0, 50, (2, 7))
    graph = _normalized(model, ids)
    assert _attention(graph).args[5] is True
    assert not any(n.target is aten.le.Tensor for n in graph.graph.nodes)
    assert _attention(_normalized(model, ids, torch.ones_like(ids))).args[3] is not None
    assert _attention(_normalized(model.train(), ids)).args[5] is True  # it looks for packed documents then
