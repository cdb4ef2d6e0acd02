"""Losses. A mean is a sum over the global count; cross entropy over a split vocabulary never gathers the logits.

The split cross entropy is Megatron's `vocab_parallel_cross_entropy` in exact arithmetic: per row the largest logit,
then in one all-reduce the sum of exponentials, the target's logit and what label smoothing and class weights need.
Unlike Megatron's it has class weights, `ignore_index` and every reduction.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchshard.core.notation import Inside, Local, Row
from torchshard.rules.indexing import nonempty, own_index
from torchshard.rules.normalization import row_max
from torchshard.rules.reductions import averaged
from torchshard.rules.registry import Call, broadcast, cast, letters, rule, spaced, wide

aten = torch.ops.aten
ops = torch.ops.torchshard
NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's numbers for reductions."""


@rule(
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default, aten.soft_margin_loss.default,
)  # fmt: skip
def elementwise_loss(call: Call) -> Row | None:
    """`f32[2,8], f32[2,8], f32[8] -> f32[]     a b, a b, b -> `; weights are broadcast to what they weigh."""
    shape, reduction = call.tensors[0].shape, call["reduction"]
    names, dtype = letters(len(shape)), call.results[0].dtype
    weights = [t.shape for t in call.tensors[2:]]
    if call.tensors[1].shape != shape or any(len(weight) > len(shape) for weight in weights):
        return None

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        bound = call.bound((x, *args), kwargs)
        halves = wide(dtype) != dtype
        total = _summed(call, bound) if halves else call.target(**bound | {"reduction": SUM})
        return averaged(call, total, x, range(len(shape)))

    left = [names, names, *(broadcast(names, weight, shape) for weight in weights)]
    right = names if reduction == NONE else []
    return call.row(
        f"{spaced(*left)} -> {spaced(right)}", local=dict.fromkeys(names, local) if reduction == MEAN else {}
    )


@rule(aten.cross_entropy_loss.default)
def cross_entropy(call: Call) -> Row | None:
    """`f32[16,97], i64[16] -> f32[]     n v, n -> `; splitting v all-reduces a few numbers per row, splitting n one."""
    if call["target"].dtype.is_floating_point:
        return _with_probabilities(call)
    local, comm = _over_batch(call)
    rows = tuple(_batch_axes(call))
    return call.row(
        _class_row(call, "v"),
        local={"v": functools.partial(_split_cross_entropy, dtype=call.results[0].dtype)} | local,
        reduced="v",
        comm={"v": (Inside("all_reduce_max", rows), Inside("reduce", rows, _columns(call)))} | comm,
    )


@rule(aten.nll_loss_nd.default)
def nll_loss(call: Call) -> Row:
    """`f32[16,97], i64[16] -> f32[]     n !v, n -> `."""
    local, comm = _over_batch(call)
    return call.row(_class_row(call, "!v"), local=local, comm=comm)


def _batch_axes(call: Call) -> list[str]:
    ndim = len(call["self"].shape)
    return [*(["n"] if ndim > 1 else []), *(f"s{i}" for i in range(ndim - 2))]


def _class_row(call: Call, classes: str) -> str:
    """Of scores, a target for each place of a batch, and weights of the classes."""
    batch, weight = _batch_axes(call), call["weight"]
    operands = [[*batch[:1], classes, *batch[1:]], batch, *([[classes]] if weight is not None else [])]
    return f"{spaced(*operands)} -> {spaced(batch if call['reduction'] == NONE else [])}"


def _over_batch(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replacements and their collectives where the batch is split: a mean divides by what all ranks count."""
    if call["reduction"] != MEAN:
        return {}, {}

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        bound = call.bound(args, kwargs)
        counted = scale = aten.ne.Scalar(bound["target"], call["ignore_index"])
        if bound.get("weight") is not None:
            held = aten.index.Tensor(bound["weight"], [aten.mul.Tensor(bound["target"], counted)])
            scale = aten.mul.Tensor(aten.detach.default(held), counted)
        total = _summed(call, bound)
        count = aten.sum.dim_IntList(scale, None, dtype=wide(call.results[0].dtype))
        made = aten.div.Tensor(total, ops.reduce.default(count, ctx.group))
        return aten.to.dtype(made, call.results[0].dtype)

    axes = _batch_axes(call)
    return dict.fromkeys(axes, local), dict.fromkeys(axes, (Inside("reduce"),))


def _summed(call: Call, bound: dict[str, Any]) -> Any:
    losses = call.target(**bound | {"reduction": NONE})
    return aten.sum.dim_IntList(losses, None, dtype=wide(call.results[0].dtype))


def _with_probabilities(call: Call) -> Row:
    """`f32[16,97], f32[16,97] -> f32[]     n !v, n !v -> `: a mean is over the places of the whole batch."""
    batch, weight = _batch_axes(call), call["weight"]
    scores = [*batch[:1], "!v", *batch[1:]]

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        total = _summed(call, call.bound((x, *args), kwargs))
        return averaged(call, total, x, [d for d, name in enumerate(scores) if name in batch])

    operands = [scores, scores, *([["!v"]] if weight is not None else [])]
    right = batch if call["reduction"] == NONE else []
    replaced = dict.fromkeys(batch, local) if call["reduction"] == MEAN else {}
    return call.row(f"{spaced(*operands)} -> {spaced(right)}", local=replaced)


def _columns(call: Call) -> int:
    """How many numbers per row are summed over the ranks."""
    return (2 + bool(call["label_smoothing"])) + (call["weight"] is not None) * (1 + bool(call["label_smoothing"]))


def _split_cross_entropy(
    ctx: Local,
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    dtype: torch.dtype,
) -> Any:
    ndim, classes = len(ctx.row.operands[0]), ctx.row.sizes["v"]
    dim = 1 if ndim > 1 else 0
    shifted = aten.sub.Tensor(logits, row_max(ctx, logits, dim, "v"))
    ignored = aten.unsqueeze.default(aten.eq.Scalar(target, ignore_index), dim)
    index, outside = own_index(ctx, "v", aten.unsqueeze.default(target, dim), ignored)

    def at_target(table: Any) -> Any:
        found = aten.gather.default(nonempty(ctx, "v", table, dim, ndim), dim, index)
        return cast(aten.masked_fill.Scalar(found, outside, 0.0), dtype, wide(dtype))

    def summed(x: Any) -> Any:
        return aten.sum.dim_IntList(x, [dim], True, dtype=wide(dtype))

    spread = None if weight is None else aten.reshape.default(weight, [-1] + [1] * (ndim - 1 - dim))
    columns = [summed(aten.exp.default(shifted)), at_target(shifted)]
    if weight is not None:
        columns.append(at_target(aten.expand_as.default(spread, logits)))
    if label_smoothing:
        columns.append(summed(shifted if weight is None else shifted * spread))
        if weight is not None:
            columns.append(summed(aten.expand_as.default(spread, logits)))
    whole = ops.reduce.default(aten.cat.default(columns, dim), ctx.group)
    column = [aten.slice.Tensor(whole, dim, i, i + 1) for i in range(len(columns))]
    norm = aten.log.default(column[0])
    scale = column[2] if weight is not None else aten.ones_like.default(norm)
    scale = aten.masked_fill.Scalar(scale, ignored, 0.0)
    loss = (norm - column[1]) * scale
    if label_smoothing:
        smooth = norm * (classes if weight is None else column[4]) - column[-1 if weight is None else 3]
        smooth = aten.masked_fill.Scalar(smooth, ignored, 0.0)
        loss = loss * (1 - label_smoothing) + smooth * (label_smoothing / classes)
    loss = aten.squeeze.dims(aten.masked_fill.Scalar(loss, ignored, 0.0), [dim])
    if reduction == SUM:
        loss = aten.sum.default(loss)
    elif reduction == MEAN:
        loss = aten.div.Tensor(aten.sum.default(loss), aten.sum.default(scale))
    return cast(loss, wide(dtype), dtype)
