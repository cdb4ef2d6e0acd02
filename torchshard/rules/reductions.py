"""Ops that sum, compare or scan along dims. A sum over a split dim is Partial; a mean divides by the global count."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchshard.core.conversions import step_args
from torchshard.core.layouts import I, Shard
from torchshard.core.notation import Inside, Local, LocalFn, Row
from torchshard.custom_ops.with_value import WITH_VALUE
from torchshard.rules.empty import where_not_empty
from torchshard.rules.registry import Call, block, cast, dims_of, letters, positive, rule, spaced, sum_dtype, wide

aten = torch.ops.aten
ops = torch.ops.torchshard


def _reduced(call: Call, dims: list[int], names: list[str]) -> list[str]:
    keep = bool(call.args.get("keepdim", False))
    return [("1" if keep else "") if i in dims else n.lstrip("!") for i, n in enumerate(names)]


def reduction_row(call: Call, dims: list[int], *, closed: bool, **options: Any) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a b c -> a c` over dim 1; `closed` where parts can't be put together by a sum."""
    names = letters(len(call.tensors[0].shape))
    left = block(names, dims) if closed else names
    right = [n for n in _reduced(call, dims, names) if n]
    return call.row(f"{spaced(left)} -> {spaced(*([right] * len(call.results)))}", **options)


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a b c -> a c`."""
    return reduction_row(call, dims_of(call, "dim", len(call.tensors[0].shape)), closed=False, linear=[{0}])


@rule(aten.nansum.default, aten.count_nonzero.dim_IntList, aten.count_nonzero.default)
def counted(call: Call) -> Row:
    """`f32[2,8,4] -> i64[2,4]     a b c -> a c`: sums, but not of addends."""
    return reduction_row(call, dims_of(call, "dim", len(call.tensors[0].shape)), closed=False)


@rule(aten.mean.default, aten.mean.dim)
def mean(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a b c -> a c`: a rank's mean would divide by its own count."""
    ndim = len(call.tensors[0].shape)
    dims, keep = dims_of(call, "dim", ndim), bool(call.args.get("keepdim", False))

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        return averaged(call, aten.sum.dim_IntList(x, dims, keep, dtype=sum_dtype(call)), x, dims)

    replaced = {name: local for d, name in enumerate(letters(ndim)) if d in dims}
    return reduction_row(call, dims, closed=False, linear=[{0}], local=replaced)


def averaged(call: Call, total: Any, x: Any, dims: Sequence[int]) -> Any:
    """A rank's part of a mean, from its sum.

    Args:
        x: the first operand on this rank, whose dynamic dims are whole.
        dims: those of it that the mean is over.
    """
    shape = call.tensors[0].shape
    count: Any = math.prod(shape[d] for d in dims if isinstance(shape[d], int))
    for d in dims:
        count = count if isinstance(shape[d], int) else aten.sym_size.int(x, d) * count
    dtype = call.results[0].dtype
    return cast(aten.div.Tensor(total, count), wide(dtype), dtype)


# --- of what each slice gives, the same again ------------------------------------------------------------------------


@rule(
    aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar, aten.norm.ScalarOpt_dim_dtype,
    aten.norm.ScalarOpt_dtype,
)  # fmt: skip
def vector_norm(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers the norms of the slices, whose norm is that of all."""
    order = call.args.get("ord", call.args.get("p"))
    dims, order = dims_of(call, "dim", len(call.tensors[0].shape)), 2 if order is None else order
    keep, result = bool(call.args.get("keepdim", False)), call.results[0].dtype
    if abs(order) == math.inf:
        again = aten.amax.default if order > 0 else aten.amin.default
        return _extreme(call, again, lambda x: cast(aten.abs.default(x), call.tensors[0].dtype, result))
    if order <= 0:
        return reduction_row(call, dims, closed=True)

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        own = aten.linalg_vector_norm.default(x, order, dims, keep, dtype=sum_dtype(call))
        return cast(aten.linalg_vector_norm.default(_gathered(ctx, own), order, [0]), wide(result), result)

    return _of_slices(call, dims, local)


def _gathered(ctx: Local, own: Any) -> Any:
    """What each rank gives, along a dim of ranks in front."""
    own = aten.unsqueeze.default(own, 0)
    return ops.gather.default(own, *step_args("gather", Shard(0), I, [ctx.world]), ctx.group)


def _of_slices(call: Call, dims: Sequence[int], local: LocalFn, *others: str, numbers: int = 1) -> Row:
    """The row of a reduction whose replacement gathers what the slices give.

    Args:
        others: the collectives of the replacement beside the gather.
        numbers: how many numbers a slice gives for each of the result.
    """
    names = letters(len(call.tensors[0].shape))
    replaced = dict.fromkeys((names[d] for d in dims), local)
    rows = tuple(name for name in names if name not in replaced)
    comm = (Inside("gather", rows, numbers), *(Inside(name, rows) for name in others))
    return reduction_row(
        call, list(dims), closed=False, local=replaced, reduced=replaced, comm=dict.fromkeys(replaced, comm)
    )


_AGAIN: Mapping[Any, Callable[[Any], Any]] = {
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), lambda each: aten.any.dim(each, 0)),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), lambda each: aten.all.dim(each, 0)),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), lambda each: aten.prod.dim_int(each, 0)),
}
"""Op -> the same of what the slices gave."""


@rule(*_AGAIN)
def product(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers the products of the slices."""

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        return _AGAIN[call.target](_gathered(ctx, call.target(x, *args, **kwargs)))

    shape = call.tensors[0].shape
    none = call.args.get("dim") == [] and call.results[0].shape == shape
    return _of_slices(call, [] if none else dims_of(call, "dim", len(shape)), local)


_EXTREMES = {
    aten.amax.default: aten.amax.default, aten.max.default: aten.amax.default,
    aten.amin.default: aten.amin.default, aten.min.default: aten.amin.default,
}  # fmt: skip


@rule(*_EXTREMES)
def extreme(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers the largest of the slices."""
    return _extreme(call, _EXTREMES[call.target], lambda x: x)


def _extreme(call: Call, again: Any, prepared: Callable[[Any], Any]) -> Row:
    """The largest or smallest of all; those that are equal to it share the gradient, whatever rank they are on.

    Args:
        again: what finds it, in a slice and among the slices'.
        prepared: what is compared in place of the operand.
    """
    dims, keep = dims_of(call, "dim", len(call.tensors[0].shape)), bool(call.args.get("keepdim", False))
    dtype = call.results[0].dtype

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        axis, x = ctx.choice.axes[0][0], prepared(x)
        held = aten.detach.default(x)
        own = again(held, dims, True) if ctx.size(axis) else aten.sum.dim_IntList(held, dims, True, dtype=dtype)
        value = again(_of_present(ctx, axis, _gathered(ctx, own)), [0])
        found = value if keep else aten.squeeze.dims(value, dims)
        if not dtype.is_floating_point:
            return found
        equal = aten.eq.Tensor(held, value)
        count = ops.reduce.default(aten.sum.dim_IntList(equal, dims, True, dtype=wide(dtype)), ctx.group)
        share = cast(aten.div.Tensor(equal, count), wide(dtype), dtype)
        return WITH_VALUE(aten.sum.dim_IntList(aten.mul.Tensor(x, share), dims, keep), found)

    return _of_slices(call, dims, local, *(["reduce"] if dtype.is_floating_point else []))


def _of_present(ctx: Local, axis: str, each: Any) -> Any:
    """What the ranks gave that hold some of an axis."""
    sizes = ctx.sizes(axis)
    if all(sizes):
        return each
    return aten.stack.default([aten.select.int(each, 0, rank) for rank, size in enumerate(sizes) if size])


@rule(
    aten.var.correction, aten.std.correction, aten.var.dim, aten.std.dim, aten.var_mean.correction,
    aten.std_mean.correction,
)  # fmt: skip
def variance(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers mean and variance of the slices.

    They are put together two by two, as Chan, Golub and LeVeque do (1983), so that equal elements have none.
    """
    shape, result = call.tensors[0].shape, call.results[0].dtype
    dims, keep = dims_of(call, "dim", len(shape)), bool(call.args.get("keepdim", False))
    if call.tensors[0].dtype.is_complex or not all(isinstance(shape[d], int) for d in dims):
        return reduction_row(call, dims, closed=True)
    said = call.args.get("correction", call.args.get("unbiased"))
    correction, count = 1 if said is None else said, math.prod(shape[d] for d in dims)

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        x = cast(x, result, wide(result))
        both = aten.var_mean.correction(x, dims, correction=0, keepdim=True)
        own = aten.stack.default([operator.getitem(both, 0), operator.getitem(both, 1)])
        spread, middle = _joined(ctx, _gathered(ctx, own), count)
        spread = aten.div.Scalar(spread, max(0.0, count - correction))
        made = [_root(spread) if "std" in str(call.target) else spread, middle][: len(call.results)]
        made = [cast(m if keep else aten.squeeze.dims(m, dims), wide(result), result) for m in made]
        return made if len(made) > 1 else made[0]

    return _of_slices(call, dims, local, numbers=2)


def _joined(ctx: Local, each: Any, total: int) -> tuple[Any, Any]:
    """The sum of squares about the mean, and the mean, from the variance and the mean of each rank's elements."""
    axis = ctx.choice.axes[0][0]
    other = total // ctx.row.sizes[axis]
    count, spread, middle = 0, None, None
    for rank, size in enumerate(ctx.sizes(axis)):
        if size == 0:
            continue
        variance, mean = (aten.select.int(aten.select.int(each, 0, rank), 0, i) for i in range(2))
        squares, more = aten.mul.Scalar(variance, size * other), size * other
        if count:
            apart = aten.sub.Tensor(mean, middle)
            between = aten.mul.Scalar(aten.mul.Tensor(apart, apart), count * more / (count + more))
            squares = aten.add.Tensor(aten.add.Tensor(spread, squares), between)
            mean = aten.add.Tensor(middle, aten.mul.Scalar(apart, more / (count + more)))
        count, spread, middle = count + more, squares, mean
    return spread, middle


def _root(spread: Any) -> Any:
    """A root whose gradient at zero is zero, as that of a standard deviation."""
    none = aten.eq.Scalar(spread, 0)
    return aten.masked_fill.Scalar(aten.sqrt.default(aten.masked_fill.Scalar(spread, none, 1.0)), none, 0.0)


@rule(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.aminmax.default,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim,
    aten.mode.default, aten.kthvalue.default,
)  # fmt: skip
def closed_reduction(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a !b c -> a c`."""
    return reduction_row(call, dims_of(call, "dim", len(call.tensors[0].shape)), closed=True)


@rule(aten.quantile.scalar, aten.quantile.default, aten.nanquantile.scalar, aten.nanquantile.default)
def quantile(call: Call) -> Row:
    """`f32[2,8], f64[3] -> f32[3,2]     a !b, q -> q a`."""
    names = letters(len(call.tensors[0].shape), used="q")
    dims, asked = dims_of(call, "dim", len(names)), [["q"] * len(t.shape) for t in call.tensors[1:]]
    right = [*(axis for q in asked for axis in q), *(n for n in _reduced(call, dims, names) if n)]
    return call.row(f"{spaced(block(names, dims), *asked)} -> {spaced(right)}", local={"*": where_not_empty(call)})


@rule(
    aten.cumsum.default, aten.cumprod.default, aten.sort.default, aten.sort.stable, aten.argsort.default,
    aten.argsort.stable, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default,
    aten._safe_softmax.default,
)  # fmt: skip
def scan(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,8,4]     a !b c -> a !b c`."""
    ndim = len(call.tensors[0].shape)
    names = block(letters(ndim), [positive(call["dim"], ndim)] if ndim else [])
    return call.row(f"{spaced(names)} -> {spaced(*([names] * len(call.results)))}")


@rule(aten.topk.default)
def topk(call: Call) -> Row:
    """`f32[2,8] -> f32[2,3], i64[2,3]     a !b -> a !k, a !k`."""
    ndim = len(call.tensors[0].shape)
    names, dim = letters(ndim, used="k"), positive(call["dim"], ndim)
    right = ["!k" if i == dim else n for i, n in enumerate(names)]
    return call.row(f"{spaced(block(names, [dim]))} -> {spaced(right, right)}")
