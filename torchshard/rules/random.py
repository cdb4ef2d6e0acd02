"""Random ops: at any number of ranks exactly the unsharded model's numbers.

The ranks of a group share one seeded stream. Each draws the whole mask, as the unsharded model does, and keeps its
slice: the masks agree bit for bit and every rank's stream stays where the unsharded one is. The price is drawing the
whole mask on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchshard.layouts import Shard, local_size, parts_of, parts_size, ranges
from torchshard.notation import Local, Row
from torchshard.rules.registry import Call, block, letters, rule, spaced
from torchshard.whole import WholeCall

aten = torch.ops.aten
RANDOM_TAG = torch.Tag.nondeterministic_seeded


def is_random(target: Any) -> bool:
    """Whether the op draws from the random stream."""
    if isinstance(target, WholeCall):
        return target.draws
    return RANDOM_TAG in getattr(target, "tags", ()) or "dropout" in str(target)


BY_ELEMENT = frozenset([
    aten.dropout.default, aten.bernoulli.p, aten.alpha_dropout.default,
])  # fmt: skip
"""Ops that draw one number per element of their first operand, in the order in which it lies in memory. In a graph that
operand is contiguous, so that the order is that of the indices."""


def dropped(ctx: Local, x: Any, p: float, ndim: int) -> Any:
    """Dropout of this rank's slice `x` by its part of the whole mask; `x` is split in the result's split dim."""
    layout = ctx.choice.results[0]
    if not isinstance(layout, Shard):
        return aten.dropout.default(x, p, True)
    dim, own = layout.dim, [aten.sym_size.int(x, i) for i in range(ndim)]
    if not layout.repeated or layout.parts is None:
        whole = ctx.whole_shape()[dim]
        mask = _mask(x, p, [*own[:dim], whole, *own[dim + 1 :]])
        return aten.mul.Tensor(x, _part(mask, dim, ranges(parts_of(whole, layout), ctx.rank, ctx.world)))
    times = own[dim] // local_size(layout.parts, ctx.rank, ctx.world)
    mask = _mask(x, p, [*own[:dim], times, parts_size(layout.parts), *own[dim + 1 :]])
    held = _part(mask, dim + 1, ranges(layout.parts, ctx.rank, ctx.world))
    return aten.mul.Tensor(x, aten.reshape.default(held, own))


def _mask(x: Any, p: float, sizes: Sequence[Any]) -> Any:
    return aten.dropout.default(aten.new_ones.default(x, sizes), p, True)


def _part(mask: Any, dim: int, held: Sequence[tuple[int, int]]) -> Any:
    pieces = [aten.slice.Tensor(mask, dim, start, stop) for start, stop in held]
    return pieces[0] if len(pieces) == 1 else aten.cat.default(pieces, dim)


@rule(aten.dropout.default)
def dropout(call: Call) -> Row:
    """`f32[2,8,16] -> f32[2,8,16]     ... -> ...`."""
    active = bool(call["train"]) and call["p"] > 0

    def local(ctx: Local, x: Any, p: float, train: bool) -> Any:
        return dropped(ctx, x, p, len(call.tensors[0].shape))

    return call.row("... -> ...", local={"*": local} if active else {}, fills_ranks=active)


@rule(aten.bernoulli.default)
def bernoulli(call: Call) -> Row:
    """`f32[2,8] -> f32[2,8]     !a !b -> !a !b`: the draws follow the probabilities, so every rank draws all."""
    ndim = len(call.tensors[0].shape)
    names = block(letters(ndim), range(ndim))
    return call.row(f"{spaced(names)} -> {spaced(names)}")
