"""Ops that sum, compare or scan along dims.

A sum over a split dim is Partial, and a mean divides it by the global count. A scanned or sorted dim
is unsplittable. `gathered_reductions` has norms, products, extremes and variances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Unpack

import torch

from torchshard.core.layouts import Shard
from torchshard.core.notation import RowKeywords
from torchshard.core.rows import Local, Row
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.rules.empty import anywhere
from torchshard.rules.registry import (
    Call,
    acc_dtype,
    cast,
    dims_of,
    letters,
    positive,
    rule,
    spaced,
    sum_dtype,
    unsplittable,
)

aten = torch.ops.aten
ops = torch.ops.torchshard


def _reduced(call: Call, dims: Sequence[int], names: list[str]) -> list[str]:
    """Returns the factors of the result of a reduction over some dims."""
    if call.args.get("keepdim", False):
        return ["1" if i in dims else name for i, name in enumerate(names)]
    return [name for i, name in enumerate(names) if i not in dims]


def reduction_row(call: Call, dims: Sequence[int], *, splits: bool, **options: Unpack[RowKeywords]) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a b c -> a c` over dim 1.

    Args:
        splits: whether the reduced dims are splittable, because the slices' results can be
            combined.
    """
    names = letters(len(call.tensors[0].shape))
    left = names if splits else unsplittable(names, dims)
    right = _reduced(call, dims, names)
    return call.row(f"{spaced(left)} -> {spaced(*([right] * len(call.results)))}", **options)


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a b c -> a c`."""
    return reduction_row(call, dims_of(call, len(call.tensors[0].shape)), splits=True, linear=[{0}])


@rule(aten.nansum.default, aten.count_nonzero.dim_IntList, aten.count_nonzero.default)
def counted(call: Call) -> Row:
    """`f32[2,8,4] -> i64[2,4]     a b c -> a c`: Partial if b is split, but not linear."""
    return reduction_row(call, dims_of(call, len(call.tensors[0].shape)), splits=True)


@rule(aten.mean.default, aten.mean.dim)
def mean(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a b c -> a c`: a rank's mean would divide by its own count."""
    ndim = len(call.tensors[0].shape)
    dims, keep = dims_of(call, ndim), bool(call.args.get("keepdim", False))

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        return averaged(ctx, call, aten.sum.dim_IntList(x, dims, keep, dtype=sum_dtype(call)), x, dims)

    replacements = {name: local for d, name in enumerate(letters(ndim)) if d in dims}
    return reduction_row(call, dims, splits=True, linear=[{0}], local=replacements, any_size="*")


def averaged(ctx: Local, call: Call, total: Traced, x: Traced, dims: Sequence[int]) -> Traced:
    """Returns a rank's partial sum of a mean, computed from its sum.

    Args:
        x: the first operand on this rank.
        dims: the dims of the mean.
    """
    shape, layout = call.tensors[0].shape, ctx.choice.operands[0]
    count = math.prod(shape[d] for d in dims if isinstance(shape[d], int))
    for d in dims:
        if not isinstance(shape[d], int):
            ranks = ctx.world if isinstance(layout, Shard) and layout.dim == d and layout.is_equal else 1
            count = aten.sym_size.int(x, d) * (count * ranks)
    dtype = call.results[0].dtype
    return cast(aten.div.Tensor(total, count), acc_dtype(dtype), dtype)


@rule(
    aten.max.dim, aten.min.dim, aten.aminmax.default,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim,
    aten.mode.default, aten.kthvalue.default,
)  # fmt: skip
def unsplittable_reduction(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a !b c -> a c`."""
    return reduction_row(call, dims_of(call, len(call.tensors[0].shape)), splits=False)


@rule(aten.quantile.scalar, aten.quantile.default, aten.nanquantile.scalar, aten.nanquantile.default)
def quantile(call: Call) -> Row:
    """`f32[2,8], f64[3] -> f32[3,2]     a !b, q -> q a`."""
    names = letters(len(call.tensors[0].shape), used="q")
    dims, quantiles = dims_of(call, len(names)), [["q"] * len(t.shape) for t in call.tensors[1:]]
    right = [*itertools.chain(*quantiles), *_reduced(call, dims, names)]
    left = spaced(unsplittable(names, dims), *quantiles)
    return call.row(f"{left} -> {spaced(right)}", **anywhere(call))


@rule(
    aten.cumsum.default, aten.cumprod.default, aten.sort.default, aten.sort.stable, aten.argsort.default,
    aten.argsort.stable, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default,
    aten._safe_softmax.default,
)  # fmt: skip
def scan(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,8,4]     a !b c -> a !b c`."""
    ndim = len(call.tensors[0].shape)
    names = unsplittable(letters(ndim), [positive(call["dim"], ndim)] if ndim else [])
    return call.row(f"{spaced(names)} -> {spaced(*([names] * len(call.results)))}")


@rule(aten.topk.default)
def topk(call: Call) -> Row:
    """`f32[2,8] -> f32[2,3], i64[2,3]     a !b -> a !k, a !k`."""
    ndim = len(call.tensors[0].shape)
    names, dim = letters(ndim, used="k"), positive(call["dim"], ndim)
    right = ["!k" if i == dim else n for i, n in enumerate(names)]
    return call.row(f"{spaced(unsplittable(names, [dim]))} -> {spaced(right, right)}")
