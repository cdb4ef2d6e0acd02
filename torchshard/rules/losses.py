"""Losses. A mean divides the ranks' sums by the global count.

Cross entropy over a split vocabulary never gathers the logits. Like Megatron's
`vocab_parallel_cross_entropy`, it all-reduces the largest logit of each row, then in one all-reduce
the sum of exponentials, the target's logit, and the sums for label smoothing and class weights.
Unlike Megatron's it supports class weights, `ignore_index` and every reduction.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from torchshard.core.layouts import Size
from torchshard.core.rows import Local, LocalFn, Row
from torchshard.custom_ops.ctc import CTC_LOSSES, CTC_LOSSES_BACKWARD
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.rules.indexing import nonempty, own_index
from torchshard.rules.normalization import row_max
from torchshard.rules.reductions import averaged
from torchshard.rules.registry import Call, acc_dtype, broadcast, cast, letters, rule, spaced

aten = torch.ops.aten
ops = torch.ops.torchshard
NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's numbers for the reductions of losses."""


@rule(
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default, aten.soft_margin_loss.default,
)  # fmt: skip
def elementwise_loss(call: Call) -> Row | None:
    """`f32[2,8], f32[2,8], f32[8] -> f32[]     a b, a b, b -> `; weights are broadcast to the input."""
    shape, reduction = call.tensors[0].shape, call["reduction"]
    names, dtype = letters(len(shape)), call.results[0].dtype
    weights = [t.shape for t in call.tensors[2:]]
    if call.tensors[1].shape != shape or any(len(weight) > len(shape) for weight in weights):
        return None

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        bound = call.bound((x, *args), kwargs)
        # the op would return its sum in half precision, which may overflow before the division
        is_half = acc_dtype(dtype) != dtype
        total = _summed(call, bound) if is_half else call.target(**bound | {"reduction": SUM})
        return averaged(ctx, call, total, x, range(len(shape)))

    left = [names, names, *(broadcast(names, weight, shape) for weight in weights)]
    right = names if reduction == NONE else []
    replacements = dict.fromkeys(names, local) if reduction == MEAN else {}
    return call.row(f"{spaced(*left)} -> {spaced(right)}", local=replacements, any_size="*")


@rule(aten.cross_entropy_loss.default)
def cross_entropy(call: Call) -> Row | None:
    """`f32[16,97], i64[16] -> f32[]     n v, n -> `; splitting v all-reduces a few numbers per row, splitting n one."""
    if call["target"].dtype.is_floating_point:
        return _with_probabilities(call)
    local = _over_batch(call)
    # the replacement itself sums over the classes (`reduced`), so the loss is Invariant
    return call.row(
        _class_row(call, "v"),
        local={"v": functools.partial(_split_cross_entropy, dtype=call.results[0].dtype)} | local,
        reduced={"v"},
        any_size=local,
    )


@rule(aten.nll_loss_nd.default)
def nll_loss(call: Call) -> Row:
    """`f32[16,97], i64[16] -> f32[]     n !v, n -> `."""
    return call.row(_class_row(call, "!v"), local=_over_batch(call), any_size="*")


@rule(CTC_LOSSES, CTC_LOSSES_BACKWARD)
def ctc(call: Call) -> Row | None:
    """`f32[50,16,20], i64[16,30], i64[16], i64[16] -> f32[16]     !t n !v, n !s, n, n -> n`.

    Targets that are joined in one dim can't be split: the start of a sequence's targets depends on
    the earlier lengths.
    """
    if len(call["targets"].shape) != 2:
        return None
    row = "!t n !v, n !s, n, n"
    return call.row(f"n, {row} -> !t n !v" if call.target is CTC_LOSSES_BACKWARD else f"{row} -> n")


def _batch_axes(call: Call) -> list[str]:
    ndim = len(call["self"].shape)
    return [*(["n"] if ndim > 1 else []), *(f"s{i}" for i in range(ndim - 2))]


def _class_row(call: Call, classes: str) -> str:
    """Returns the text of a row with scores, targets, and weights of the classes if given."""
    batch, weight = _batch_axes(call), call["weight"]
    operands = [[*batch[:1], classes, *batch[1:]], batch, *([[classes]] if weight is not None else [])]
    # on the meta device, PyTorch's losses of dynamic sizes are scalars whatever the reduction
    return f"{spaced(*operands)} -> {spaced(batch if call.results[0].shape else [])}"


def _over_batch(call: Call) -> dict[str, LocalFn]:
    """Returns the replacements for a split batch: a mean divides by the count over all ranks."""
    if call["reduction"] != MEAN:
        return {}

    def local(ctx: Local, *args: Argument, **kwargs: Argument) -> Traced:
        bound = call.bound(args, kwargs)
        counted = scale = aten.ne.Scalar(bound["target"], call["ignore_index"])
        if bound.get("weight") is not None:
            # an ignored target may not be the index of a class, so it looks up class 0, which is
            # not counted
            weights = aten.index.Tensor(bound["weight"], [aten.mul.Tensor(bound["target"], counted)])
            scale = aten.mul.Tensor(aten.detach.default(weights), counted)
        total = _summed(call, bound)
        count = aten.sum.dim_IntList(scale, None, dtype=acc_dtype(call.results[0].dtype))
        mean = aten.div.Tensor(total, ops.reduce.default(count, ctx.group))
        return aten.to.dtype(mean, call.results[0].dtype)

    return dict.fromkeys(_batch_axes(call), local)


def _summed(call: Call, bound: Mapping[str, Argument]) -> Traced:
    """Returns the sum of the op's losses on this rank, in the dtype of accumulation."""
    named = {**bound, "reduction": NONE}
    losses = call.target(named.pop("self"), named.pop("target"), **named)
    return aten.sum.dim_IntList(losses, None, dtype=acc_dtype(call.results[0].dtype))


def _with_probabilities(call: Call) -> Row:
    """`f32[16,97], f32[16,97] -> f32[]     n !v, n !v -> `: a mean divides by the size of the whole batch."""
    batch, weight = _batch_axes(call), call["weight"]
    scores = [*batch[:1], "!v", *batch[1:]]

    def local(ctx: Local, x: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        total = _summed(call, call.bound((x, *args), kwargs))
        return averaged(ctx, call, total, x, [d for d, name in enumerate(scores) if name in batch])

    operands = [scores, scores, *([["!v"]] if weight is not None else [])]
    right = batch if call["reduction"] == NONE else []
    replacements = dict.fromkeys(batch, local) if call["reduction"] == MEAN else {}
    return call.row(f"{spaced(*operands)} -> {spaced(right)}", local=replacements, any_size="*")


def _split_cross_entropy(
    ctx: Local,
    logits: Traced,
    target: Traced,
    weight: Traced | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    dtype: torch.dtype,
) -> Traced:
    """The replacement of a cross entropy over split classes, with the op's parameters."""
    ndim = len(ctx.row.operands[0])
    dim = 1 if ndim > 1 else 0
    highest = row_max(ctx, logits, dim, "v")
    shifted = aten.sub.Tensor(logits, highest)
    ignored = aten.unsqueeze.default(aten.eq.Scalar(target, ignore_index), dim)
    index, outside = own_index(ctx, "v", aten.unsqueeze.default(target, dim), ignored)
    index = aten.expand_as.default(index, highest)  # dynamic sizes are known to be equal only through ops

    def at_target(table: Traced) -> Traced:
        values = aten.gather.default(nonempty(ctx, "v", table, dim, ndim), dim, index)
        return cast(aten.masked_fill.Scalar(values, outside, 0.0), dtype, acc_dtype(dtype))

    def summed(x: Traced) -> Traced:
        return aten.sum.dim_IntList(x, [dim], True, dtype=acc_dtype(dtype))

    # all numbers that are summed over the ranks are columns of one tensor, so one all-reduce
    # suffices
    spread = None if weight is None else aten.reshape.default(weight, [-1] + [1] * (ndim - 1 - dim))
    columns = [summed(aten.exp.default(shifted)), at_target(shifted)]
    if weight is not None:
        columns.append(at_target(aten.expand_as.default(spread, logits)))
    if label_smoothing:
        columns.append(summed(shifted if weight is None else aten.mul.Tensor(shifted, spread)))
        if weight is not None:
            columns.append(summed(aten.expand_as.default(spread, logits)))
    whole = ops.reduce.default(aten.cat.default(columns, dim), ctx.group)
    sums = [aten.slice.Tensor(whole, dim, i, i + 1) for i in range(len(columns))]
    loss, scale = _row_losses(sums, ignored, label_smoothing, ctx.row.sizes["v"], weighted=weight is not None)
    loss = aten.squeeze.dims(aten.masked_fill.Scalar(loss, ignored, 0.0), [dim])
    return cast(_reduced(loss, scale, reduction), acc_dtype(dtype), dtype)


def _row_losses(
    sums: Sequence[Traced], ignored: Traced, label_smoothing: float, classes: Size, *, weighted: bool
) -> tuple[Traced, Traced]:
    """Returns the loss and the weight of each row from the sums over all classes.

    Args:
        sums: the sums of the exponentials and of the logit at the target; if weighted, of the
            weight at the target; if smoothed, of the (weighted) logits; and if both, of the
            weights.
    """
    norm = aten.log.default(sums[0])
    scale = sums[2] if weighted else aten.ones_like.default(norm)
    scale = aten.masked_fill.Scalar(scale, ignored, 0.0)
    loss = aten.mul.Tensor(aten.sub.Tensor(norm, sums[1]), scale)
    if label_smoothing:
        smooth = aten.mul.Tensor(norm, sums[4]) if weighted else aten.mul.Scalar(norm, classes)
        smooth = aten.sub.Tensor(smooth, sums[3 if weighted else 2])
        smooth = aten.masked_fill.Scalar(smooth, ignored, 0.0)
        loss = aten.mul.Scalar(loss, 1 - label_smoothing)
        loss = aten.add.Tensor(loss, aten.mul.Scalar(smooth, label_smoothing / classes))
    return loss, scale


def _reduced(loss: Traced, scale: Traced, reduction: int) -> Traced:
    """Returns the op's result from the loss and the weight of each row."""
    if reduction == SUM:
        return aten.sum.default(loss)
    if reduction == MEAN:
        return aten.div.Tensor(aten.sum.default(loss), aten.sum.default(scale))
    return loss
