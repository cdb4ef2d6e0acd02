"""Softmax and norms.

Dims without statistics split freely. Softmax, layer norm and RMS norm may also split the dims of
their statistics: the replacements all-reduce one or two numbers per row. Group, batch and instance
norm may not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from torchshard.core.rows import Local, LocalFn, Row
from torchshard.custom_ops.fx_types import Argument, Target, Traced
from torchshard.rules.empty import append_zeros, cut_to_empty
from torchshard.rules.registry import Call, acc_dtype, cast, dims_of, letters, positive, rule, spaced, unsplittable

aten = torch.ops.aten
ops = torch.ops.torchshard


def _split_softmax(call: Call, ndim: int) -> LocalFn:
    """Returns a replacement of softmax over a split dim, which all-reduces largest values and sums."""
    dim, is_log, result = positive(call["dim"], ndim), "log_softmax" in str(call.target), call.results[0].dtype

    def local(ctx: Local, x: Traced, _dim: int, dtype: torch.dtype | bool | None = None) -> Traced:
        # `_softmax` has a flag, half_to_float, instead of the dtype
        x = aten.to.dtype(x, dtype) if isinstance(dtype, torch.dtype) else x
        largest = row_max(ctx, x, dim, ctx.choice.factors[0][0])
        shifted = aten.sub.Tensor(x, largest)
        raised = aten.exp.default(shifted)
        total = aten.sum.dim_IntList(raised, [dim], True, dtype=acc_dtype(result))
        total = ops.all_reduce.default(total, ctx.group)
        if is_log:
            return cast(aten.sub.Tensor(shifted, aten.log.default(total)), acc_dtype(result), result)
        return cast(aten.div.Tensor(raised, total), acc_dtype(result), result)

    return local


def row_max(ctx: Local, x: Traced, dim: int, factor: str) -> Traced:
    """Returns the largest value over all ranks along a split dim, with the dim kept and no gradient.

    Softmax and logsumexp subtract it only for numerical range: it cancels, so its gradient is zero.
    """
    x = aten.detach.default(x)
    if ctx.size(factor) == 0:  # amax rejects empty dims
        x = aten.constant_pad_nd.default(x, [0, 0] * (len(ctx.row.operands[0]) - 1 - dim) + [0, 1], -math.inf)
    return ops.all_reduce_max.default(aten.amax.default(x, [dim], True), ctx.group)


@rule(aten.softmax.int, aten.log_softmax.int)
def softmax(call: Call) -> Row:
    """`f32[2,8,16] -> f32[2,8,16]     a b c -> a b c`; splitting c all-reduces each row's largest value and sum."""
    ndim = len(call.tensors[0].shape)
    names = letters(ndim)
    if not ndim:
        return call.row(" -> ")
    factor = names[positive(call["dim"], ndim)]
    return call.row(f"{spaced(names)} -> {spaced(names)}", local={factor: _split_softmax(call, ndim)})


@rule(aten.logsumexp.default)
def logsumexp(call: Call) -> Row:
    """`f32[2,8,16] -> f32[2,8]     a b c -> a b`; splitting c all-reduces each row's largest value and sum."""
    ndim, dtype = len(call.tensors[0].shape), call.results[0].dtype
    dims, keep = dims_of(call, ndim), bool(call["keepdim"])
    names = letters(ndim) if len(dims) == 1 else unsplittable(letters(ndim), dims)
    if keep:
        right = ["1" if d in dims else name for d, name in enumerate(names)]
    else:
        right = [name for d, name in enumerate(names) if d not in dims]
    row = f"{spaced(names)} -> {spaced(right)}"
    if len(dims) != 1:
        return call.row(row)
    dim, factor = dims[0], names[dims[0]]

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        largest = row_max(ctx, x, dim, factor)
        # inf - inf is nan, but a row of only -inf (a fully masked one) must give -inf
        largest = aten.masked_fill.Scalar(largest, aten.isinf.default(largest), 0.0)
        raised = aten.exp.default(aten.sub.Tensor(x, largest))
        total = ops.reduce.default(aten.sum.dim_IntList(raised, [dim], True, dtype=acc_dtype(dtype)), ctx.group)
        result = cast(aten.add.Tensor(aten.log.default(total), largest), acc_dtype(dtype), dtype)
        return result if keep else aten.squeeze.dim(result, dim)

    return call.row(row, local={factor: local}, reduced={factor})


@rule(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(call: Call) -> Row:
    """`f32[2,8,16], f32[16], f32[16] -> f32[2,8,16]     a b c, c, c -> a b c`; splitting c all-reduces its sums."""
    ndim, normed = len(call.tensors[0].shape), len(call["normalized_shape"])
    names = letters(ndim)
    rows, own = names[: ndim - normed], names[ndim - normed :]
    # for half precision without an eps, PyTorch's kernels differ in the dtype that gives the
    # default eps
    unknown_eps = call["eps"] is None and call.results[0].dtype not in (torch.float32, torch.float64)
    normal = unsplittable(own, range(normed)) if unknown_eps else own
    operands = [[*rows, *normal], *([normal] * (len(call.tensors) - 1))]
    return call.row(f"{spaced(*operands)} -> {spaced([*rows, *normal])}", local=dict.fromkeys(own, _split_norm(call)))


def _split_norm(call: Call) -> LocalFn:
    """Returns a replacement with all ranks' mean and variance, in float32 for half precision."""
    dtype, shape = call.results[0].dtype, call["normalized_shape"]
    dims, count = [d - len(shape) for d in range(len(shape))], math.prod(shape)

    def mean(ctx: Local, x: Traced) -> Traced:
        return aten.div.Tensor(ops.all_reduce.default(aten.sum.dim_IntList(x, dims, True), ctx.group), count)

    def local(ctx: Local, x: Traced, *args: Argument, **named: Argument) -> Traced:
        bound = call.bound((x, *args), named)
        weight, bias, eps = bound.get("weight"), bound.get("bias"), call["eps"]
        x = aten.to.dtype(x, acc_dtype(dtype))
        if call.target is aten.layer_norm.default:
            x = aten.sub.Tensor(x, mean(ctx, x))
        eps = torch.finfo(acc_dtype(dtype)).eps if eps is None else eps
        x = aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Scalar(mean(ctx, aten.mul.Tensor(x, x)), eps)))
        x = aten.mul.Tensor(x, weight) if weight is not None else x
        x = aten.add.Tensor(x, bias) if bias is not None else x
        return aten.to.dtype(x, dtype)

    return local


@rule(aten.group_norm.default)
def group_norm(call: Call) -> Row:
    """`f32[2,8,5], f32[8], f32[8] -> f32[2,8,5]     n (g !c) !s, (g !c), (g !c) -> n (g !c) !s     g=4 c=2`."""
    shape, groups = call.tensors[0].shape, call["num_groups"]
    channels = "(g !c)"
    space = [f"!s{i}" for i in range(len(shape) - 2)]

    def local(
        ctx: Local,
        x: Traced,
        num_groups: int,
        weight: Traced | None = None,
        bias: Traced | None = None,
        *rest: Argument,
    ) -> Traced:
        own_groups, width = ctx.size("g"), shape[1] // groups
        if own_groups:
            return aten.group_norm.default(x, own_groups, weight, bias, *rest)
        padded = append_zeros(x, 1, len(shape), width)
        result = aten.group_norm.default(padded, 1, *_padded_channels((weight, bias), width), *rest)
        return cut_to_empty(result, 1)

    operands = [["n", channels, *space], *([[channels]] * (len(call.tensors) - 1))]
    right = spaced(["n", channels, *space])
    return call.row(f"{spaced(*operands)} -> {right}", sizes={"g": groups, "c": shape[1] // groups}, local={"*": local})


def _padded_channels(tensors: Sequence[Traced | None], width: int = 1) -> list[Traced | None]:
    """Appends zeros to tensors that have one number per channel."""
    return [None if t is None else append_zeros(t, 0, 1, width) for t in tensors]


_TRAINING: Mapping[Target, Literal["training", "use_input_stats"]] = {
    aten.batch_norm.default: "training",
    aten.native_batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
}
"""Norm -> its argument for updating the running statistics, a write that the schemas do not declare."""


def writes_statistics(target: Target | str, args: Mapping[str, Argument]) -> bool:
    """Returns whether an op updates running statistics, so it must run even if its result is unused.

    torch.fx and torch.export rely on the schema, which declares these ops pure.
    """
    if isinstance(target, str) or target not in _TRAINING:
        return False
    return bool(args[_TRAINING[target]]) and args.get("running_mean") is not None


@rule(*_TRAINING)
def batch_norm(call: Call) -> Row | None:
    """`f32[2,8,5], f32[8] x 4 -> f32[2,8,5]     !n c !s, c, c, c, c -> !n c !s`; in training it writes to its buffers.

    An instance norm normalizes each sample by itself, so n is splittable, unless it writes running
    statistics, which span all samples.
    """
    shape = call.tensors[0].shape
    if len(shape) < 2:
        return None
    instance = call.target is aten.instance_norm.default
    training = bool(call[_TRAINING[call.target]])
    present = [n for n in ("weight", "bias", "running_mean", "running_var") if call.args.get(n) is not None]
    written = [1 + i for i, n in enumerate(present) if n.startswith("running") and training]
    # in training the statistics span samples and space; in eval mode they are constants
    space = [f"!s{i}" if training else f"s{i}" for i in range(len(shape) - 2)]
    names = ["!n" if written or (training and not instance) else "n", "c", *space]
    if len(call.results) > 1:  # native_batch_norm
        return _with_statistics(call, len(present), written) if written else None

    def local(ctx: Local, x: Traced, *args: Argument) -> Traced:
        if ctx.size("c"):
            return call.target(x, *args)
        padded = append_zeros(x, 1, len(shape))
        return cut_to_empty(call.target(padded, *_padded_channels(args[:4]), *args[4:]), 1)

    operands = [names, *([["c"]] * len(present))]
    return call.row(f"{spaced(*operands)} -> {spaced(names)}", mutates=written, local={"*": local}, any_size="*")


@rule(aten.native_layer_norm.default)
def native_layer_norm(call: Call) -> Row:
    """`f32[2,8,16], f32[16] -> f32[2,8,16], f32[2,8,1], f32[2,8,1]     a b !c, !c -> a b !c, a b 1, a b 1`."""
    shape, inner = call.tensors[0].shape, len(call["normalized_shape"])
    names = unsplittable(letters(len(shape)), range(len(shape) - inner, len(shape)))
    lead, own = names[: len(shape) - inner], names[len(shape) - inner :]
    statistics = [*lead, *["1"] * inner]
    return call.row(f"{spaced(names, *[own] * (len(call.tensors) - 1))} -> {spaced(names, statistics, statistics)}")


def _with_statistics(call: Call, present: int, written: list[int]) -> Row:
    """Returns the row of a batch norm that also returns its statistics: it can't be split."""
    operands = [[f"!{name}" for name in letters(len(call.tensors[0].shape))], *([["!x"]] * present)]
    saved = [[f"!e{i}{j}" for j in range(len(r.shape))] for i, r in enumerate(call.results[1:])]
    return call.row(f"{spaced(*operands)} -> {spaced(operands[0], *saved)}", mutates=written)
