"""Scaled dot-product attention: batch, heads, the queries' positions and the values' features split.

`F.scaled_dot_product_attention` runs its fused kernels on a rank's heads as it does on all of them. With dropout the
mask is drawn whole on every rank, from the shared stream, and each rank keeps its heads' part of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchshard.core.notation import Local, Row
from torchshard.rules.empty import where_not_empty
from torchshard.rules.random import dropped
from torchshard.rules.registry import Call, broadcast, letters, rule, spaced

aten = torch.ops.aten


@rule(aten.scaled_dot_product_attention.default)
def attention(call: Call) -> Row | None:
    """`f32[2,6,5,8], f32[2,2,7,8] x 2 -> f32[2,6,5,8]     b (g r) l !e, b g !s !e, b g !s v -> b (g r) l v`.

    With a causal mask, what a query sees is decided by its position: l is closed then.
    """
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    batch, wide = call.results[0].shape[:-2], len(call.results[0].shape) - 2
    grouped = bool(call["enable_gqa"]) and len(query) > 2 and query[-3] != key[-3]
    names = letters(wide, used="glersv")
    if wide:
        names[-1] = "(g r)" if grouped else "g"
    sizes = {"g": key[-3], "r": query[-3] // key[-3]} if grouped else {}
    row = "!l" if call["is_causal"] else "l"
    kv_names, kv_batch = ([*names[:-1], "g"], [*batch[:-1], key[-3]]) if grouped else (names, batch)
    operands = [
        [*broadcast(names, query[:-2], batch), row, "!e"],
        [*broadcast(kv_names, key[:-2], kv_batch), "!s", "!e"],
        [*broadcast(kv_names, value[:-2], kv_batch), "!s", "v"],
    ]
    if call["attn_mask"] is not None:
        operands.append(broadcast([*names, row, "!s"], call["attn_mask"].shape, [*batch, query[-2], key[-2]]))
    drops = call["dropout_p"] > 0
    stretched = [*query[:-2]] != [*batch] or any([*t[:-2]] != [*kv_batch] for t in (key, value))
    if stretched and (grouped or drops):
        return None
    local = {"*": _dropout_attention(call) if drops else where_not_empty(call)}
    return call.row(f"{spaced(*operands)} -> {spaced([*names, row, 'v'])}", sizes=sizes, local=local, fills_ranks=drops)


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
        if ctx.choice.axes[0][0] == "v":
            return aten.matmul.default(aten.dropout.default(weights, dropout_p, True), value)
        return aten.matmul.default(dropped(ctx, weights, dropout_p, len(call.tensors[0].shape)), value)

    return local
