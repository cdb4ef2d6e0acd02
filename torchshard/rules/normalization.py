"""Softmax and norms: the axis whose statistics are taken is whole, the others split freely.

Softmax over a split axis has a replacement: two all-reduces of one number per row, of the largest and of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from torchshard.core.notation import Inside, Local, Row
from torchshard.rules.empty import emptied, filled
from torchshard.rules.registry import Call, block, cast, dims_of, letters, positive, rule, spaced, wide

aten = torch.ops.aten
ops = torch.ops.torchshard


def _split_softmax(call: Call, ndim: int) -> Any:
    dim, log, result = positive(call["dim"], ndim), "log_softmax" in str(call.target), call.results[0].dtype

    def local(ctx: Local, x: Any, _dim: int, dtype: Any = None) -> Any:
        x = aten.to.dtype(x, dtype) if dtype not in (None, False, True) else x
        largest = row_max(ctx, x, dim, ctx.choice.axes[0][0])
        shifted = aten.sub.Tensor(x, largest)
        raised = aten.exp.default(shifted)
        total = aten.sum.dim_IntList(raised, [dim], True, dtype=wide(result))
        total = ops.all_reduce.default(total, ctx.group)
        made = aten.sub.Tensor(shifted, aten.log.default(total)) if log else aten.div.Tensor(raised, total)
        return cast(made, wide(result), result)

    return local


def row_max(ctx: Local, x: Any, dim: int, axis: str) -> Any:
    """The largest value along a split dim, over all ranks, kept as a dim of size one; no gradient."""
    held = aten.detach.default(x)
    if ctx.size(axis) == 0:
        held = aten.constant_pad_nd.default(held, [0, 0] * (len(ctx.row.operands[0]) - 1 - dim) + [0, 1], -math.inf)
    return ops.all_reduce_max.default(aten.amax.default(held, [dim], True), ctx.group)


@rule(aten.softmax.int, aten.log_softmax.int)
def softmax(call: Call) -> Row:
    """`f32[2,8,16] -> f32[2,8,16]     a b c -> a b c`; splitting c all-reduces each row's largest value and sum."""
    ndim = len(call.tensors[0].shape)
    names = letters(ndim)
    if not ndim:
        return call.row(" -> ")
    axis = names[positive(call["dim"], ndim)]
    rows = tuple(name for name in names if name != axis)
    comm = {axis: (Inside("all_reduce_max", rows), Inside("all_reduce", rows))}
    return call.row(f"{spaced(names)} -> {spaced(names)}", local={axis: _split_softmax(call, ndim)}, comm=comm)


@rule(aten.logsumexp.default)
def logsumexp(call: Call) -> Row:
    """`f32[2,8,16] -> f32[2,8]     a b c -> a b`; splitting c all-reduces each row's largest value and sum."""
    ndim, dtype = len(call.tensors[0].shape), call.results[0].dtype
    dims, keep = dims_of(call, "dim", ndim), bool(call["keepdim"])
    names = letters(ndim) if len(dims) == 1 else block(letters(ndim), dims)
    kept = [("1" if keep else "") if d in dims else name for d, name in enumerate(names)]
    row = f"{spaced(names)} -> {spaced([name for name in kept if name])}"
    if len(dims) != 1:
        return call.row(row)
    dim, axis = dims[0], names[dims[0]]

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        largest = row_max(ctx, x, dim, axis)
        largest = aten.masked_fill.Scalar(largest, aten.isinf.default(largest), 0.0)
        raised = aten.exp.default(aten.sub.Tensor(x, largest))
        total = ops.reduce.default(aten.sum.dim_IntList(raised, [dim], True, dtype=wide(dtype)), ctx.group)
        made = cast(aten.add.Tensor(aten.log.default(total), largest), wide(dtype), dtype)
        return made if keep else aten.squeeze.dim(made, dim)

    rows = tuple(name for name in names if name != axis)
    comm = {axis: (Inside("all_reduce_max", rows), Inside("reduce", rows))}
    return call.row(row, local={axis: local}, reduced=axis, comm=comm)


@rule(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(call: Call) -> Row:
    """`f32[2,8,16], f32[16], f32[16] -> f32[2,8,16]     a b c, c, c -> a b c`; splitting c all-reduces its sums."""
    ndim, normed = len(call.tensors[0].shape), len(call["normalized_shape"])
    names = letters(ndim)
    rows, own = names[: ndim - normed], names[ndim - normed :]
    unknown = call["eps"] is None and call.results[0].dtype not in (torch.float32, torch.float64)
    normal = block(own, range(normed)) if unknown else own
    operands = [[*rows, *normal], *([normal] * (len(call.tensors) - 1))]
    sums = 1 if call.target is aten.rms_norm.default else 2
    return call.row(
        f"{spaced(*operands)} -> {spaced([*rows, *normal])}",
        local=dict.fromkeys(own, _split_norm(call)),
        comm=dict.fromkeys(own, (Inside("all_reduce", tuple(rows)),) * sums),
    )


def _split_norm(call: Call) -> Any:
    """A norm by the mean and the variance of all ranks' elements; of halves in float32, as PyTorch does."""
    dtype, shape = call.results[0].dtype, call["normalized_shape"]
    dims, count = [d - len(shape) for d in range(len(shape))], math.prod(shape)

    def mean(ctx: Local, x: Any) -> Any:
        return aten.div.Tensor(ops.all_reduce.default(aten.sum.dim_IntList(x, dims, True), ctx.group), count)

    def local(ctx: Local, x: Any, *args: Any, **named: Any) -> Any:
        bound = call.bound((x, *args), named)
        weight, bias, eps = bound.get("weight"), bound.get("bias"), call["eps"]
        x = aten.to.dtype(x, wide(dtype))
        if call.target is aten.layer_norm.default:
            x = aten.sub.Tensor(x, mean(ctx, x))
        eps = torch.finfo(wide(dtype)).eps if eps is None else eps
        x = aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Scalar(mean(ctx, aten.mul.Tensor(x, x)), eps)))
        x = x if weight is None else aten.mul.Tensor(x, weight)
        return aten.to.dtype(x if bias is None else aten.add.Tensor(x, bias), dtype)

    return local


@rule(aten.group_norm.default)
def group_norm(call: Call) -> Row:
    """`f32[2,8,5], f32[8], f32[8] -> f32[2,8,5]     n (g !c) !s, (g !c), (g !c) -> n (g !c) !s     g=4 c=2`."""
    shape, groups = call.tensors[0].shape, call["num_groups"]
    channels = "(g !c)"
    space = [f"!s{i}" for i in range(len(shape) - 2)]

    def local(ctx: Local, x: Any, num_groups: int, weight: Any = None, bias: Any = None, *rest: Any) -> Any:
        mine, width = ctx.size("g"), ctx.row.sizes["c"]
        if mine:
            return aten.group_norm.default(x, mine, weight, bias, *rest)
        held = filled(x, 1, len(shape), width)
        return emptied(aten.group_norm.default(held, 1, *(filled(t, 0, 1, width) for t in (weight, bias)), *rest), 1)

    operands = [["n", channels, *space], *([[channels]] * (len(call.tensors) - 1))]
    right = spaced(["n", channels, *space])
    return call.row(f"{spaced(*operands)} -> {right}", sizes={"g": groups, "c": shape[1] // groups}, local={"*": local})


_TRAINING = {
    aten.batch_norm.default: "training",
    aten.native_batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
}
"""Norms that update running statistics, and the argument that says whether they do; their schemas don't."""


def writes_statistics(target: Any, args: Mapping[str, Any]) -> bool:
    """Whether an op with these arguments updates running statistics, so that it counts though nobody uses its result.

    torch.fx and torch.export go by the schema, which calls these ops pure.
    """
    return target in _TRAINING and bool(args[_TRAINING[target]]) and args.get("running_mean") is not None


@rule(*_TRAINING)
def batch_norm(call: Call) -> Row | None:
    """`f32[2,8,5], f32[8] x 4 -> f32[2,8,5]     !n c !s, c, c, c, c -> !n c !s`; in training it writes its buffers.

    An instance norm's statistics are a sample's own; what it writes is not.
    """
    shape = call.tensors[0].shape
    if len(shape) < 2:
        return None
    instance = call.target is aten.instance_norm.default
    training = bool(call[_TRAINING[call.target]])
    present = [n for n in ("weight", "bias", "running_mean", "running_var") if call.args.get(n) is not None]
    written = [1 + i for i, n in enumerate(present) if n.startswith("running") and training]
    space = [f"!s{i}" if training else f"s{i}" for i in range(len(shape) - 2)]
    names = ["!n" if written or (training and not instance) else "n", "c", *space]
    if len(call.results) > 1:  # a native one
        return _with_statistics(call, len(present), written) if written else None

    def local(ctx: Local, x: Any, *args: Any) -> Any:
        if ctx.size("c"):
            return call.target(x, *args)
        per_channel = (filled(t, 0, 1) for t in args[:4])
        return emptied(call.target(filled(x, 1, len(shape)), *per_channel, *args[4:]), 1)

    operands = [names, *([["c"]] * len(present))]
    return call.row(f"{spaced(*operands)} -> {spaced(names)}", mutates=written, local={"*": local})


@rule(aten.native_layer_norm.default)
def native_layer_norm(call: Call) -> Row:
    """`f32[2,8,16], f32[16] -> f32[2,8,16], f32[2,8,1], f32[2,8,1]     a b !c, !c -> a b !c, a b 1, a b 1`."""
    shape, inner = call.tensors[0].shape, len(call["normalized_shape"])
    names = block(letters(len(shape)), range(len(shape) - inner, len(shape)))
    lead, own = names[: len(shape) - inner], names[len(shape) - inner :]
    statistics = [*lead, *["1"] * inner]
    return call.row(f"{spaced(names, *[own] * (len(call.tensors) - 1))} -> {spaced(names, statistics, statistics)}")


def _with_statistics(call: Call, present: int, written: list[int]) -> Row:
    """Of a batch norm that gives its statistics too: all whole."""
    closed = [[f"!{name}" for name in letters(len(call.tensors[0].shape))], *([["!x"]] * present)]
    saved = [[f"!e{i}{j}" for j in range(len(r.shape))] for i, r in enumerate(call.results[1:])]
    return call.row(f"{spaced(*closed)} -> {spaced(closed[0], *saved)}", mutates=written)
