"""Random ops, which give exactly the unsharded model's numbers on any number of ranks.

The ranks of a group share one RNG state. Each rank draws the full mask, as the unsharded model
does, and keeps its slice. So the masks are equal bit for bit, and after each op every rank has the
unsharded model's RNG state. The price is that every rank draws the full mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchshard.core.layouts import Part, Shard, Size, local_size, parts_of, parts_size, ranges
from torchshard.core.rows import Local, Row
from torchshard.custom_ops.fx_types import Target, Traced
from torchshard.custom_ops.whole import WholeCall
from torchshard.rules.registry import Call, letters, rule, spaced, unsplittable

aten = torch.ops.aten
RANDOM_TAG = torch.Tag.nondeterministic_seeded


def is_random(target: Target | str) -> bool:
    """Returns whether the op draws random numbers."""
    if isinstance(target, WholeCall):
        return target.uses_rng
    # PyTorch does not tag all of its dropouts
    return RANDOM_TAG in getattr(target, "tags", ()) or "dropout" in str(target)


BY_ELEMENT = frozenset([
    aten.dropout.default, aten.bernoulli.p, aten.alpha_dropout.default,
])  # fmt: skip
"""Ops that draw one number per element of their first operand, in memory order. Graphs make that
operand contiguous, so memory order is index order on every rank."""


def sliced_dropout(ctx: Local, x: Traced, p: float, ndim: int) -> Traced:
    """Applies dropout to this rank's slice `x`, with its slice of the full mask.

    Args:
        x: split along the same dim as the op's result.
    """
    layout = ctx.choice.results[0]
    if not isinstance(layout, Shard):
        return aten.dropout.default(x, p, True)
    dim, own = layout.dim, [aten.sym_size.int(x, i) for i in range(ndim)]
    if layout.repeated:
        # the number of repetitions is known only at the call, so the mask has a dim of repetitions
        # before its dim of parts
        parts = layout.listed
        whole: list[Size] = [own[dim] // local_size(parts, ctx.rank, ctx.world), parts_size(parts)]
    elif isinstance(ctx.whole_shape()[dim], int):
        whole = [ctx.whole_shape()[dim]]
        parts = parts_of(whole[0], layout)
    else:
        whole, parts = [ctx.world, own[dim]], ()  # a dim of ranks before the dim of their slices
    # dropout of ones is the mask with its scale; it draws the same numbers as dropout of the full
    # value
    mask = aten.dropout.default(aten.new_ones.default(x, [*own[:dim], *whole, *own[dim + 1 :]]), p, True)
    if parts:
        part = _own_part(ctx, mask, dim + len(whole) - 1, parts)
    else:
        part = aten.clone.default(aten.select.int(mask, dim, ctx.rank))
    return aten.mul.Tensor(x, aten.reshape.default(part, own) if layout.repeated else part)


def _own_part(ctx: Local, mask: Traced, dim: int, parts: Sequence[Part]) -> Traced:
    """Returns this rank's slice of a full mask with a dim split into these parts.

    It has memory of its own: for a view, backward would keep the full mask.
    """
    pieces = [aten.slice.Tensor(mask, dim, start, stop) for start, stop in ranges(parts, ctx.rank, ctx.world)]
    return aten.clone.default(pieces[0]) if len(pieces) == 1 else aten.cat.default(pieces, dim)


@rule(aten.dropout.default)
def dropout(call: Call) -> Row:
    """`f32[2,8,16] -> f32[2,8,16]     ... -> ...`."""
    active = bool(call["train"]) and call["p"] > 0

    def local(ctx: Local, x: Traced, p: float, train: bool) -> Traced:
        return sliced_dropout(ctx, x, p, len(call.tensors[0].shape))

    return call.row(
        "... -> ...", local={"*": local} if active else {}, fills_ranks=active, contiguous=active, any_size="*"
    )


@rule(aten.feature_dropout.default)
def feature_dropout(call: Call) -> Row:
    """`f32[2,8,5,5] -> f32[2,8,5,5]     a b c d -> a b c d`: one number drops a whole channel of a sample."""
    ndim = len(call.tensors[0].shape)
    names = letters(ndim)

    def local(ctx: Local, x: Traced, p: float, train: bool) -> Traced:
        whole = [s if isinstance(s, int) else aten.sym_size.int(x, d) for d, s in enumerate(ctx.whole_shape()[:2])]
        mask = aten.feature_dropout.default(aten.new_ones.default(x, whole + [1] * (ndim - 2)), p, True)
        # the mask has size one in a channel's dims, so it fits any slice of those unchanged
        factor = ctx.choice.factors[0][0]
        dim = names.index(factor)
        return aten.mul.Tensor(x, mask if dim > 1 else _own_part(ctx, mask, dim, ctx.parts(factor) or ()))

    active = bool(call["train"]) and call["p"] > 0
    return call.row(f"{spaced(names)} -> {spaced(names)}", local=dict.fromkeys(names, local) if active else {})


@rule(aten.bernoulli.default)
def bernoulli(call: Call) -> Row:
    """`f32[2,8] -> f32[2,8]     !a !b -> !a !b`: the operand has the probabilities, so all ranks draw all."""
    ndim = len(call.tensors[0].shape)
    names = unsplittable(letters(ndim), range(ndim))
    return call.row(f"{spaced(names)} -> {spaced(names)}")
