"""Reductions that gather a few numbers from each rank's slice and combine them on every rank.

Norms, products, extremes, variances and places of extremes: their results over slices can't be added.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence

import torch

from torchshard.core.conversions import step_args
from torchshard.core.layouts import I, Shard
from torchshard.core.rows import Local, LocalFn, Row
from torchshard.custom_ops.fx_types import Argument, Target, Traced
from torchshard.custom_ops.with_value import WITH_VALUE
from torchshard.rules.reductions import reduction_row
from torchshard.rules.registry import Call, acc_dtype, cast, dims_of, letters, rule, sum_dtype

aten = torch.ops.aten
ops = torch.ops.torchshard


@rule(
    aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar, aten.norm.ScalarOpt_dim_dtype,
    aten.norm.ScalarOpt_dtype,
)  # fmt: skip
def vector_norm(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers the norms of the slices.

    The norm of those norms is the norm of the full tensor. An order of 0 or less would need another
    combination.
    """
    order = call.args.get("ord", call.args.get("p"))
    dims, order = dims_of(call, len(call.tensors[0].shape)), 2 if order is None else order
    keep, result = bool(call.args.get("keepdim", False)), call.results[0].dtype
    if abs(order) == math.inf:
        extreme_op = aten.amax.default if order > 0 else aten.amin.default
        return _extreme(call, extreme_op, lambda x: cast(aten.abs.default(x), call.tensors[0].dtype, result))
    if order <= 0:
        return reduction_row(call, dims, splits=False)

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        own = aten.linalg_vector_norm.default(x, order, dims, keep, dtype=sum_dtype(call))
        return cast(aten.linalg_vector_norm.default(_gathered(ctx, own), order, [0]), acc_dtype(result), result)

    return _of_slices(call, dims, local)


def _gathered(ctx: Local, own: Traced) -> Traced:
    """Returns the values of all ranks, stacked along a new first dim."""
    own = aten.unsqueeze.default(own, 0)
    return ops.gather.default(own, *step_args(Shard(0), I, [ctx.world]), ctx.group)


def _of_slices(call: Call, dims: Sequence[int], local: LocalFn) -> Row:
    """Returns the row of a reduction with a replacement that gathers the results of the slices."""
    names = letters(len(call.tensors[0].shape))
    replacements = dict.fromkeys((names[d] for d in dims), local)
    return reduction_row(call, dims, splits=True, local=replacements, reduced=replacements)


_COMBINE: Mapping[Target, Callable[[Traced], Traced]] = {
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), lambda each: aten.any.dim(each, 0)),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), lambda each: aten.all.dim(each, 0)),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), lambda each: aten.prod.dim_int(each, 0)),
}
"""Op -> the function that combines the slices' results, which are along the first dim."""


@rule(*_COMBINE)
def product(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers the products of the slices."""

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        return _COMBINE[call.target](_gathered(ctx, call.target(x, *args, **kwargs)))

    shape = call.tensors[0].shape
    # some of these ops reduce all dims for an empty list, others none; the result's
    # shape distinguishes them
    reduces_none = call.args.get("dim") == [] and call.results[0].shape == shape
    return _of_slices(call, [] if reduces_none else dims_of(call, len(shape)), local)


_EXTREMES: Mapping[Target, Target] = {
    aten.amax.default: aten.amax.default, aten.max.default: aten.amax.default,
    aten.amin.default: aten.amin.default, aten.min.default: aten.amin.default,
}  # fmt: skip


@rule(*_EXTREMES)
def extreme(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers the largest element of each slice."""
    return _extreme(call, _EXTREMES[call.target], lambda x: x)


def _extreme(call: Call, extreme_op: Target, prepare: Callable[[Traced], Traced]) -> Row:
    """Returns the row of an op that takes the largest or smallest element.

    All elements equal to the result share its gradient, as in PyTorch's amax, and they may be on
    several ranks. So the replacement computes the gradient's shares itself, and attaches them by
    `with_value`.

    Args:
        extreme_op: amax or amin, applied to each slice and then to the slices' results.
        prepare: a function of the operand; its result is compared instead.
    """
    dims, keep = dims_of(call, len(call.tensors[0].shape)), bool(call.args.get("keepdim", False))
    dtype = call.results[0].dtype

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        factor, x = ctx.choice.factors[0][0], prepare(x)
        constant = aten.detach.default(x)
        if ctx.size(factor):
            own = extreme_op(constant, dims, True)
        else:  # a placeholder of the right shape: amax rejects empty dims, and the gather needs all ranks
            own = aten.sum.dim_IntList(constant, dims, True, dtype=dtype)
        value = extreme_op(_of_nonempty(ctx, factor, _gathered(ctx, own)), [0])
        result = value if keep else aten.squeeze.dims(value, dims)
        if not dtype.is_floating_point:
            return result
        equal = aten.eq.Tensor(constant, value)
        count = ops.reduce.default(aten.sum.dim_IntList(equal, dims, True, dtype=acc_dtype(dtype)), ctx.group)
        share = cast(aten.div.Tensor(equal, count), acc_dtype(dtype), dtype)
        return WITH_VALUE(aten.sum.dim_IntList(aten.mul.Tensor(x, share), dims, keep), result)

    return _of_slices(call, dims, local)


def _of_nonempty(ctx: Local, factor: str, each: Traced) -> Traced:
    """Selects, from the gathered values, those from ranks with a nonempty slice of a factor."""
    sizes = ctx.sizes(factor)
    if all(sizes):
        return each
    return aten.stack.default([aten.select.int(each, 0, rank) for rank, size in enumerate(sizes) if size])


@rule(
    aten.var.correction, aten.std.correction, aten.var.dim, aten.std.dim, aten.var_mean.correction,
    aten.std_mean.correction,
)  # fmt: skip
def variance(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers the mean and variance of each slice.

    They are combined pairwise, by the method of Chan, Golub and LeVeque (1983). Unlike the
    difference of sums of squares, it gives equal elements a variance of exactly zero.
    """
    shape, result = call.tensors[0].shape, call.results[0].dtype
    dims, keep = dims_of(call, len(shape)), bool(call.args.get("keepdim", False))
    if call.tensors[0].dtype.is_complex or not all(isinstance(shape[d], int) for d in dims):
        return reduction_row(call, dims, splits=False)
    correction = call.args.get("correction", call.args.get("unbiased"))
    correction, count = 1 if correction is None else correction, math.prod(shape[d] for d in dims)

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced | list[Traced]:
        x = cast(x, result, acc_dtype(result))
        both = aten.var_mean.correction(x, dims, correction=0, keepdim=True)
        own = aten.stack.default([operator.getitem(both, 0), operator.getitem(both, 1)])
        squares, mean = _combined(ctx, _gathered(ctx, own), count)
        variance = aten.div.Scalar(squares, max(0.0, count - correction))
        results = [_root(variance) if "std" in str(call.target) else variance, mean][: len(call.results)]
        results = [cast(r if keep else aten.squeeze.dims(r, dims), acc_dtype(result), result) for r in results]
        return results if len(results) > 1 else results[0]

    return _of_slices(call, dims, local)


def _combined(ctx: Local, each: Traced, total: int) -> tuple[Traced, Traced]:
    """Returns the sum of squared deviations and the mean of all elements.

    Args:
        each: the variance and the mean of each rank's elements.
        total: the number of elements on all ranks.
    """
    factor = ctx.choice.factors[0][0]
    others = total // ctx.row.sizes[factor]

    def moments(rank: int, size: int) -> tuple[int, Traced, Traced]:
        variance, mean = (aten.select.int(aten.select.int(each, 0, rank), 0, i) for i in range(2))
        return size * others, aten.mul.Scalar(variance, size * others), mean

    slices = (moments(rank, size) for rank, size in enumerate(ctx.sizes(factor)) if size)
    count, deviations, mean = next(slices)
    for own_count, squares, own_mean in slices:
        delta = aten.sub.Tensor(own_mean, mean)
        between = aten.mul.Scalar(aten.mul.Tensor(delta, delta), count * own_count / (count + own_count))
        deviations = aten.add.Tensor(aten.add.Tensor(deviations, squares), between)
        mean = aten.add.Tensor(mean, aten.mul.Scalar(delta, own_count / (count + own_count)))
        count += own_count
    return deviations, mean


def _root(x: Traced) -> Traced:
    """Returns a square root with gradient zero, not infinity, at zero, like PyTorch's std."""
    is_zero = aten.eq.Scalar(x, 0)
    return aten.masked_fill.Scalar(aten.sqrt.default(aten.masked_fill.Scalar(x, is_zero, 1.0)), is_zero, 0.0)


@rule(aten.argmax.default, aten.argmin.default)
def place_of_extreme(call: Call) -> Row:
    """`f32[2,8] -> i64[2]     a b -> a`; splitting b gathers the extreme of each slice and its place, two numbers.

    Of equal elements the first counts, as in PyTorch, and so does the first NaN: the ranks' slices
    are in order.
    """
    ndim, dtype = len(call.tensors[0].shape), call.tensors[0].dtype
    dims, keep = dims_of(call, ndim), bool(call.args.get("keepdim", False))
    # the numbers are sent as float64, which is exact for every place and every value except large
    # integers
    if call.args.get("dim") is None or not ndim or dtype is torch.int64:
        return reduction_row(call, dims, splits=False)

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        factor, x = ctx.choice.factors[0][0], aten.detach.default(x)
        if ctx.size(factor):
            place = call.target(x, dims[0], True)
            value = aten.gather.default(x, dims[0], place)
            place = aten.add.Tensor(place, ctx.start(factor))
        else:  # a placeholder of the right shape: argmax rejects empty dims, and the gather needs all ranks
            value = place = aten.sum.dim_IntList(x, dims, True)
        own = aten.stack.default([aten.to.dtype(number, torch.float64) for number in (value, place)])
        each = _of_nonempty(ctx, factor, _gathered(ctx, own))
        values, places = (aten.select.int(each, 1, i) for i in range(2))
        found = aten.gather.default(places, 0, call.target(values, 0, True))
        return aten.to.dtype(aten.squeeze.dims(found, [0] if keep else [0, dims[0] + 1]), torch.int64)

    return _of_slices(call, dims, local)
