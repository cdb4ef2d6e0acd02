"""Scaled dot-product attention: batch, heads, query positions and value features are splittable.

`F.scaled_dot_product_attention` runs its fused kernels on a rank's heads as on all of them. With
dropout every rank draws the full mask from the common RNG state and keeps its heads' slice. Fused
kernels draw masks of their own, so the scores are then computed explicitly.
"""

from __future__ import annotations

import math

import torch

from torchshard.core.layouts import EQUAL
from torchshard.core.rows import Local, LocalFn, Row
from torchshard.custom_ops.fx_types import Traced
from torchshard.rules.empty import padded_if_empty
from torchshard.rules.random import sliced_dropout
from torchshard.rules.registry import Call, broadcast, letters, rule, spaced

aten = torch.ops.aten


@rule(aten.scaled_dot_product_attention.default)
def attention(call: Call) -> Row | None:
    """`f32[2,6,5,8], f32[2,2,7,8] x 2 -> f32[2,6,5,8]     b (g r) l !e, b g !s !e, b g !s v -> b (g r) l v`.

    With a causal mask a rank's queries see the keys up to their own; with dropout too, l is
    unsplittable. Grouped queries (`enable_gqa`) have heads `(g r)`: r for each of the g heads of keys and
    values.
    """
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    batch = call.results[0].shape[:-2]
    grouped = bool(call["enable_gqa"]) and len(query) > 2 and query[-3] != key[-3]
    names = letters(len(batch), used="glersv")
    if names:  # heads are the last dim before positions and features
        names[-1] = "(g r)" if grouped else "g"
    sizes = {"g": key[-3], "r": query[-3] // key[-3]} if grouped else {}
    drops, is_causal = call["dropout_p"] > 0, bool(call["is_causal"])
    row = "!l" if is_causal and drops else "l"
    kv_names, kv_batch = ([*names[:-1], "g"], [*batch[:-1], key[-3]]) if grouped else (names, batch)
    operands = [
        [*broadcast(names, query[:-2], batch), row, "!e"],
        [*broadcast(kv_names, key[:-2], kv_batch), "!s", "!e"],
        [*broadcast(kv_names, value[:-2], kv_batch), "!s", "v"],
    ]
    if call["attn_mask"] is not None:
        operands.append(broadcast([*names, row, "!s"], call["attn_mask"].shape, [*batch, query[-2], key[-2]]))
    stretched = [*query[:-2]] != [*batch] or any([*t[:-2]] != [*kv_batch] for t in (key, value))
    counted = [*([query[-1]] if drops else []), *([query[-3], key[-3]] if grouped else [])]
    if not all(isinstance(size, int) for size in counted):
        return None  # the replacement computes with these sizes, so they must be static
    if stretched and (grouped or drops):  # the explicit computation with dropout does not broadcast
        return None
    local = {"*": _dropout_attention(call) if drops else padded_if_empty(call)}
    local |= {"l": _causal_rows(call)} if is_causal and not drops else {}
    text = f"{spaced(*operands)} -> {spaced([*names, row, 'v'])}"
    return call.row(text, sizes=sizes, local=local, fills_ranks=drops, contiguous=drops or is_causal, any_size="*")


def _causal_rows(call: Call) -> LocalFn:
    """Returns a replacement for a rank's queries: keys up to its last one, and a mask of the rows of its queries."""
    dim = len(call["query"].shape) - 2

    def local(
        ctx: Local,
        query: Traced,
        key: Traced,
        value: Traced,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = True,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Traced:
        own = aten.sym_size.int(query, dim)
        start = own * ctx.rank if ctx.parts("l") == EQUAL else ctx.start("l")
        key, value = (aten.slice.Tensor(x, dim, 0, start + own) for x in (key, value))
        ones = aten.new_ones.default(query, [own, aten.sym_size.int(key, dim)], dtype=torch.bool)
        seen = aten.tril.default(ones, start)
        return call.target(query, key, value, seen, scale=scale, enable_gqa=enable_gqa)

    return local


def _dropout_attention(call: Call) -> LocalFn:
    """Returns a replacement like `_scaled_dot_product_attention_math`, with a slice of the mask."""

    def local(
        ctx: Local,
        query: Traced,
        key: Traced,
        value: Traced,
        attn_mask: Traced | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Traced:
        scale = 1 / math.sqrt(call["query"].shape[-1]) if scale is None else scale
        factor = math.sqrt(abs(scale))
        if enable_gqa:
            times = ctx.size("r") if "r" in ctx.row.sizes else 1
            key, value = (aten.repeat_interleave.self_int(t, times, -3) for t in (key, value))
        # as PyTorch does, scale each side by the root of the scale, so half precision does not
        # overflow
        scaled_query = aten.mul.Scalar(query, math.copysign(factor, scale))
        scores = aten.matmul.default(scaled_query, aten.mul.Scalar(aten.transpose.int(key, -2, -1), factor))
        if is_causal:
            ones = aten.ones_like.default(scores, dtype=torch.bool)
            scores = aten.masked_fill.Scalar(scores, aten.logical_not.default(aten.tril.default(ones)), -math.inf)
        if attn_mask is not None:
            if call["attn_mask"].dtype is torch.bool:
                scores = aten.masked_fill.Scalar(scores, aten.logical_not.default(attn_mask), -math.inf)
            else:
                scores = aten.add.Tensor(scores, attn_mask)
        weights = aten._safe_softmax.default(scores, -1)
        if ctx.choice.factors[0][0] == "v":  # features are split, so every rank has all scores and the full mask
            return aten.matmul.default(aten.dropout.default(weights, dropout_p, True), value)
        return aten.matmul.default(sliced_dropout(ctx, weights, dropout_p, len(call.tensors[0].shape)), value)

    return local
