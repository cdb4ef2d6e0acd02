"""Scaled dot-product attention: batch and heads split freely, positions and features stay whole.

`F.scaled_dot_product_attention` runs its fused kernels on a rank's heads as it does on all of them. With dropout the
mask is drawn whole on every rank, from the shared stream, and each rank keeps its heads' part of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchshard.notation import Local, Row
from torchshard.rules.random import dropped
from torchshard.rules.registry import Call, broadcast, letters, rule, spaced

aten = torch.ops.aten


@rule(aten.scaled_dot_product_attention.default)
def attention(call: Call) -> Row | None:
    """`f32[2,6,5,8], f32[2,2,7,8] x 2 -> f32[2,6,5,8]     b (g r) !l !e, b g !s !e, b g !s !v -> b (g r) !l !v`."""
    query, key = call["query"].shape, call["key"].shape
    lead = letters(len(query) - 3, used="gr") if len(query) > 2 else []
    grouped = bool(call["enable_gqa"]) and len(query) > 2 and query[-3] != key[-3]
    broadcast = len(query) != len(key) or query[:-3] != key[:-3] or key[:-2] != call["value"].shape[:-2]
    if broadcast or (len(query) > 2 and query[-3] != key[-3] and not grouped):
        return None
    heads = ["(g r)" if grouped else "g"] if len(query) > 2 else []
    kv_heads = ["g"] if len(query) > 2 else []
    sizes = {"g": key[-3], "r": query[-3] // key[-3]} if grouped else {}
    operands = [[*lead, *heads, "!l", "!e"], [*lead, *kv_heads, "!s", "!e"], [*lead, *kv_heads, "!s", "!v"]]
    if call["attn_mask"] is not None:
        operands.append(_mask(call["attn_mask"].shape, query, key, [*lead, *heads]))
    out = [*lead, *heads, "!l", "!v"]
    local = {"*": _dropout_attention(call)} if call["dropout_p"] > 0 else {}
    return call.row(f"{spaced(*operands)} -> {spaced(out)}", sizes=sizes, local=local, fills_ranks=bool(local))


def _mask(shape: Any, query: Any, key: Any, batch: list[str]) -> list[str]:
    """The mask's dims: those of the scores where it has them, 1 where it is broadcast."""
    whole = [*query[:-1], key[-2]]
    return broadcast([*batch, "!l", "!s"], shape, whole)


def _dropout_attention(call: Call) -> Any:
    """What `_scaled_dot_product_attention_math` computes, with this rank's part of the one mask."""

    def local(
        ctx: Local,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        width = call["query"].shape[-1]
        scale = 1 / math.sqrt(width) if scale is None else scale
        factor = math.sqrt(abs(scale))
        if enable_gqa:
            times = ctx.size("r") if "r" in ctx.row.sizes else 1
            key, value = (aten.repeat_interleave.self_int(t, times, -3) for t in (key, value))
        scores = aten.matmul.default(query * math.copysign(factor, scale), aten.transpose.int(key, -2, -1) * factor)
        if is_causal:
            ones = aten.ones_like.default(scores, dtype=torch.bool)
            scores = aten.masked_fill.Scalar(scores, aten.logical_not.default(aten.tril.default(ones)), -math.inf)
        if attn_mask is not None:
            boolean = call["attn_mask"].dtype is torch.bool
            hidden = (
                aten.masked_fill.Scalar(scores, aten.logical_not.default(attn_mask), -math.inf) if boolean else None
            )
            scores = hidden if boolean else aten.add.Tensor(scores, attn_mask)
        weights = aten._safe_softmax.default(scores, -1)
        return aten.matmul.default(dropped(ctx, weights, dropout_p, len(call.tensors[0].shape)), value)

    return local
