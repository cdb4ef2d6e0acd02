"""Rows at the ranks of their experts: the factors of rows and of experts are split together.

A rank's rows are then not a slice of all rows: it has however many rows belong to its own experts.
"""

from __future__ import annotations

import torch

from torchshard.core.rows import Local, LocalFn, Row
from torchshard.custom_ops.experts import EXPERT_COUNTS, FROM_EXPERTS, TO_EXPERTS
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.rules.registry import Call, rule

aten, ops = torch.ops.aten, torch.ops.torchshard
TOGETHER = ("n", "e")
"""The factors of tensor rows and of experts, in the sharding rows of products at the experts."""


@rule(EXPERT_COUNTS)
def expert_counts(call: Call) -> Row:
    """`expert_counts(i32[4], 2) -> i64[4], i64[4,2], i32[4]     !f -> !f, e !w, e`."""
    (experts,) = call.tensors[0].shape

    def local(ctx: Local, ends: Traced, ranks: Argument) -> tuple[Traced, Traced, Traced]:
        before = aten.cat.default([aten.new_zeros.default(ends, [1]), aten.slice.Tensor(ends, 0, 0, -1)])
        sent = aten._to_copy.default(aten.sub.Tensor(ends, before), dtype=torch.int64)
        rows, columns = (0, [ranks, 1]), (1, [experts, 1])  # one table row per rank
        table = ops.all_to_all.default(aten.unsqueeze.default(sent, 0), *rows, *columns, ctx.group)
        received = aten.clone.default(aten.t.default(table), memory_format=torch.contiguous_format)
        own_ends = aten.cumsum.default(aten.sum.dim_IntList(received, [1]), 0)
        return sent, received, aten._to_copy.default(own_ends, dtype=call.tensors[0].dtype)

    return call.row("!f -> !f, e !w, e", local={"e": local}, reduced="e")


@rule(TO_EXPERTS)
def to_experts(call: Call) -> Row:
    """`f32[8,16], i64[4], i64[4,2] -> f32[8,16]     n ..., !f, e !w -> n ...`."""

    def local(ctx: Local, x: Traced, sent: Traced, received: Traced, rows: Argument = None) -> Traced:
        own = None if rows is None else rows // ctx.world
        return ops.dispatch.default(x, sent, received, own, ctx.group)

    return _row(call, local)


@rule(FROM_EXPERTS)
def from_experts(call: Call) -> Row:
    """`f32[8,16], i64[4], i64[4,2], 8 -> f32[8,16]     n ..., !f, e !w -> n ...`."""

    def local(ctx: Local, x: Traced, sent: Traced, received: Traced, n: Argument) -> Traced:
        return ops.combine.default(x, sent, received, n // ctx.world, ctx.group)

    return _row(call, local)


def _row(call: Call, local: LocalFn) -> Row:
    rest = " ".join("!" + name for name in "abcdghijk"[: len(call.tensors[0].shape) - 1])
    text = f"n {rest}".strip()
    return call.row(f"{text}, !f, e !w -> {text}", local={"n": local}, any_size="n", together=TOGETHER)
