"""Random ops: at any number of ranks exactly the unsharded model's numbers.

The ranks of a group share one seeded stream. Each draws the whole mask, as the unsharded model does, and keeps its
slice: the masks agree bit for bit and every rank's stream stays where the unsharded one is. The price is drawing the
whole mask on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchshard.core.layouts import Part, Shard, local_size, parts_of, parts_size, ranges
from torchshard.core.notation import Local, Row
from torchshard.custom_ops.whole import WholeCall
from torchshard.rules.registry import Call, block, letters, rule, spaced

aten = torch.ops.aten
RANDOM_TAG = torch.Tag.nondeterministic_seeded


def is_random(target: Any) -> bool:
    """Whether the op draws from the random stream."""
    if isinstance(target, WholeCall):
        return target.uses_rng
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
    if layout.repeated:  # the repetitions become a dim of their own, for their number is not known before the call
        parts = layout.parts or ()
        whole = [own[dim] // local_size(parts, ctx.rank, ctx.world), parts_size(parts)]
    else:
        whole = [ctx.whole_shape()[dim]]
        parts = parts_of(whole[0], layout)
    mask = aten.dropout.default(aten.new_ones.default(x, [*own[:dim], *whole, *own[dim + 1 :]]), p, True)
    part = _own_part(ctx, mask, dim + len(whole) - 1, parts)
    return aten.mul.Tensor(x, aten.reshape.default(part, own) if layout.repeated else part)


def _own_part(ctx: Local, mask: Any, dim: int, parts: Sequence[Part]) -> Any:
    """This rank's part of a whole mask, of which a dim is split in these parts."""
    pieces = [aten.slice.Tensor(mask, dim, start, stop) for start, stop in ranges(parts, ctx.rank, ctx.world)]
    return pieces[0] if len(pieces) == 1 else aten.cat.default(pieces, dim)


@rule(aten.dropout.default)
def dropout(call: Call) -> Row:
    """`f32[2,8,16] -> f32[2,8,16]     ... -> ...`."""
    active = bool(call["train"]) and call["p"] > 0

    def local(ctx: Local, x: Any, p: float, train: bool) -> Any:
        return dropped(ctx, x, p, len(call.tensors[0].shape))

    return call.row("... -> ...", local={"*": local} if active else {}, fills_ranks=active)


@rule(aten.feature_dropout.default)
def feature_dropout(call: Call) -> Row:
    """`f32[2,8,5,5] -> f32[2,8,5,5]     a b c d -> a b c d`: channels of a sample are dropped by one number each."""
    ndim = len(call.tensors[0].shape)
    names = letters(ndim)

    def local(ctx: Local, x: Any, p: float, train: bool) -> Any:
        whole = [s if isinstance(s, int) else aten.sym_size.int(x, d) for d, s in enumerate(ctx.whole_shape()[:2])]
        mask = aten.feature_dropout.default(aten.new_ones.default(x, whole + [1] * (ndim - 2)), p, True)
        axis = ctx.choice.axes[0][0]
        dim = names.index(axis)
        return aten.mul.Tensor(x, mask if dim > 1 else _own_part(ctx, mask, dim, ctx.parts(axis) or ()))

    active = bool(call["train"]) and call["p"] > 0
    return call.row(f"{spaced(names)} -> {spaced(names)}", local=dict.fromkeys(names, local) if active else {})


@rule(aten.bernoulli.default)
def bernoulli(call: Call) -> Row:
    """`f32[2,8] -> f32[2,8]     !a !b -> !a !b`: the draws follow the probabilities, so every rank draws all."""
    ndim = len(call.tensors[0].shape)
    names = block(letters(ndim), range(ndim))
    return call.row(f"{spaced(names)} -> {spaced(names)}")
