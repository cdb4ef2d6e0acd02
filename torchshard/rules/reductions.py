"""Ops that sum, compare or scan along dims. A sum over a split dim is Partial; a mean divides by the global count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchshard.conversions import step_args
from torchshard.layouts import I, Shard
from torchshard.notation import Inside, Local, Row
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


@rule(
    aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar, aten.norm.ScalarOpt_dim_dtype,
    aten.norm.ScalarOpt_dtype,
)  # fmt: skip
def vector_norm(call: Call) -> Row:
    """`f32[2,8] -> f32[2]     a b -> a`; splitting b gathers the norms of the slices, whose norm is that of all."""
    shape, order = call.tensors[0].shape, call.args.get("ord", call.args.get("p"))
    dims, order = dims_of(call, "dim", len(shape)), 2 if order is None else order
    if not 0 < order < math.inf or not all(isinstance(shape[d], int) for d in dims):
        return reduction_row(call, dims, closed=True)

    keep, result = bool(call.args.get("keepdim", False)), call.results[0].dtype

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        own = aten.linalg_vector_norm.default(x, order, dims, keep, dtype=sum_dtype(call))
        own = aten.unsqueeze.default(own, 0)
        each = ops.gather.default(own, *step_args("gather", Shard(0), I, [ctx.world]), ctx.group)
        return cast(aten.linalg_vector_norm.default(each, order, [0]), wide(result), result)

    names = letters(len(shape))
    replaced = dict.fromkeys((names[d] for d in dims), local)
    gathered = (Inside("gather", tuple(name for name in names if name not in replaced)),)
    return reduction_row(
        call, dims, closed=False, local=replaced, reduced=replaced, comm=dict.fromkeys(replaced, gathered)
    )


@rule(
    aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
    aten.any.dim, aten.all.dim, aten.any.default, aten.all.default, aten.max.default, aten.min.default,
    aten.any.dims, aten.all.dims, aten.prod.dim_int, aten.prod.default,
    aten.var.correction, aten.std.correction, aten.var.dim, aten.std.dim, aten.var_mean.correction,
    aten.logsumexp.default, aten.nansum.default, aten.aminmax.default, aten.std_mean.correction,
    aten.count_nonzero.dim_IntList, aten.count_nonzero.default,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim, aten.mode.default,
    aten.kthvalue.default,
)  # fmt: skip
def closed_reduction(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,4]     a !b c -> a c`; some of these ops take no dims as all, and some as none."""
    shape = call.tensors[0].shape
    none = call.args.get("dim") == [] and call.results[0].shape == shape
    return reduction_row(call, [] if none else dims_of(call, "dim", len(shape)), closed=True)


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
