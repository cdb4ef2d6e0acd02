"""Linear, embedding and cross entropy on slices of their weights or inputs, by the rules that graphs are split by.

    y = parallel_linear(x, weight, bias, dim=1)        # column: weight[out / n, in], the result stays split
    z = parallel_linear(y, weight, bias, dim=0, input_is_parallel=True)          # row: weight[out, in / n]
    e = parallel_embedding(ids, weight, dim=0)         # vocabulary: weight[num / n, dim]
    l = parallel_cross_entropy(logits, labels, dim=-1) # classes: logits[batch, classes / n]

Gradients are those of the unsharded functions, of slices the slices. What is split is said by arguments, never guessed
from a tensor; unlike the first torchshard, no tensor carries a mark. The global size of a split dim is asked of the
ranks, in a small message per call, where `size=` does not give it. In a group of one all are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.layouts import I, Shard, type_text
from torchshard.distributed.eager import needs_gradient, own_dim, verify_tensor_call, whole_size
from torchshard.distributed.group import CheckLevel, Group, own_group
from torchshard.nn.one_op import Piece, convert, run
from torchshard.runtime.digests import is_here, values_digest

aten = torch.ops.aten
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dim: int | None = None,
    *,
    size: int | None = None,
    input_is_parallel: bool = False,
    gather_output: bool = False,
) -> Tensor:
    """`torch.nn.functional.linear` with this rank's slice of the weight.

    Args:
        input: `[..., in]`, the whole on every rank; `[..., in / n]` with `input_is_parallel`.
        weight: `[out, in]` for `dim=None`, `[out / n, in]` for 1 or -1, `[out, in / n]` for 0.
        bias: `[out]`, for 1 or -1 `[out / n]`.
        dim: None: not split; 1 or -1: by columns; 0: by rows. As in the first torchshard the numbers are of the
            transposed weight, `[in, out]`.
        size: the global size of what is split (`out` by columns, `in` by rows).
        input_is_parallel: the input is split along its last dim already, as the result of a split by columns is.
        gather_output: joins the result of a split by columns.

    Returns:
        `[..., out]`, by columns `[..., out / n]`.

    Raises:
        InputError: the sizes don't fit, or an option is of the other split.
        DistributedError: the ranks' calls differ.

    Source: Megatron's `ColumnParallelLinear` and `RowParallelLinear`.
    """
    group, by_rows, last = own_group(), dim == 0, input.shape[-1] if input.ndim else 0
    asked: dict[str, Any] = {
        "input": _text(input, input.shape[:-1]), "input_is_parallel": input_is_parallel, "bias": _text(bias, ()),
    }  # fmt: skip

    def valid() -> None:
        check_linear(dim, input_is_parallel=input_is_parallel, gather_output=gather_output)
        if input_is_parallel or not by_rows:
            _check_features(input, weight.shape[1], "the whole input, or input_is_parallel as the input is")

    if dim is None or group.size == 1:
        valid()
        return F.linear(input, weight, bias)
    whole = _global_size(group, "parallel_linear", weight, 1 if by_rows else 0, size, valid, **asked)
    if by_rows and not input_is_parallel:
        _check_features(input, whole, "the whole input, or input_is_parallel=True for this rank's slice of it")
    else:
        valid()
    features = (*input.shape[:-1], whole if by_rows else last)
    x: Piece = (input, Shard(input.ndim - 1) if input_is_parallel else I, features)
    if by_rows:
        w: Piece = (weight, Shard(1), (weight.shape[0], whole))
        summed = convert(run(aten.linear.default, "k", group, x, w, None), I, group)[0]
        return summed if bias is None else summed + bias.to(summed.dtype)
    w = (weight, Shard(0), (whole, weight.shape[1]))
    b = None if bias is None else (bias, Shard(0), (whole,))
    result = run(aten.linear.default, "n", group, x, w, b)
    return convert(result, I, group)[0] if gather_output else result[0]


def parallel_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    dim: int | None = None,
    *,
    size: int | None = None,
) -> Tensor:
    """`torch.nn.functional.embedding` with this rank's slice of the table; the result is whole.

    Args:
        input: indices into the whole table, of any shape, the same on every rank.
        weight: `[num, width]` for `dim=None`, `[num / n, width]` for 0, `[num, width / n]` for 1 or -1.
        padding_idx: a row of the whole table, which gets no gradient; counted from the end if negative.
        scale_grad_by_freq: with `dim=0` the table is gathered, for each row's gradient depends on all indices.
        dim: None: not split; 0: by rows (the vocabulary); 1 or -1: by columns.
        size: the global size of what is split (`num` by rows, `width` by columns).

    Raises:
        InputError: `max_norm` or `sparse` is asked of a split table, or an option does not fit.
        DistributedError: the ranks' calls differ.

    Source: Megatron's `VocabParallelEmbedding`.
    """
    group, by_rows = own_group(), dim == 0
    if dim is None or group.size == 1:
        check_embedding(dim, max_norm, sparse)
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    asked: dict[str, Any] = {
        "same": input, "padding_idx": padding_idx, "scale": scale_grad_by_freq, "max_norm": max_norm, "sparse": sparse,
    }  # fmt: skip
    split = 0 if by_rows else 1
    valid: Callable[[], None] = lambda: check_embedding(dim, max_norm, sparse)  # noqa: E731
    whole = _global_size(group, "parallel_embedding", weight, split, size, valid, **asked)
    shape = (whole, weight.shape[1]) if by_rows else (weight.shape[0], whole)
    table, indices = (weight, Shard(split), shape), (input, I, tuple(input.shape))
    options = _row(padding_idx, shape[0]), scale_grad_by_freq, False
    found = run(aten.embedding.default, "v" if by_rows else "e", group, table, indices, *options)
    return convert(found, I, group)[0]


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    dim: int | None,
    size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits that are split along a dim; the result is whole.

    Where the classes are split, the logits are never gathered.

    Args:
        input: this rank's slice of the logits: `[classes]`, `[batch, classes]` or `[batch, classes, ...]`.
        target: of the whole: class indices, or probabilities; the same on every rank.
        weight: `[classes]`, the whole.
        dim: None: the logits are not split; else the dim along which they are.
        size: the global size of that dim.

    Raises:
        InputError: the logits have no such dim, or there is no such reduction.
        DistributedError: the ranks' calls differ.

    Source: Megatron's `vocab_parallel_cross_entropy`, which has neither `weight` nor `ignore_index`.
    """
    group = own_group()
    options: dict[str, Any] = {
        "reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
    }  # fmt: skip
    if dim is None or group.size == 1:
        _check_reduction(reduction)
        return F.cross_entropy(input, target, weight, **options)
    asked = {"same": target, "weight": weight is not None, **options}
    valid: Callable[[], None] = lambda: _check_reduction(reduction)  # noqa: E731
    whole = _global_size(group, "parallel_cross_entropy", input, dim, size, valid, **asked)
    split = own_dim(input, dim)
    classes = whole if split == min(1, input.ndim - 1) else input.shape[min(1, input.ndim - 1)]
    if weight is not None and weight.shape != (classes,):
        raise InputError(
            "the classes' weights do not fit the logits",
            where="parallel_cross_entropy, weight",
            why=f"their shape is {tuple(weight.shape)}, there are {classes} classes",
            attempt="the weights of all classes, on every rank",
        )
    target = target if target.is_floating_point() else target.long()
    input = input.float() if torch.is_autocast_enabled(input.device.type) else input  # as PyTorch's own does
    logits: Piece = (input, Shard(split), (*input.shape[:split], whole, *input.shape[split + 1 :]))
    others = [None if t is None else (t, I, tuple(t.shape)) for t in (target, weight)]
    settings = REDUCTIONS[reduction], ignore_index, label_smoothing
    axis = "v" if split == min(1, input.ndim - 1) else "no axis: the rows are gathered"
    return convert(run(aten.cross_entropy_loss.default, axis, group, logits, *others, *settings), I, group)[0]


def check_linear(dim: int | None, *, input_is_parallel: bool, gather_output: bool) -> None:
    """Raises InputError where a linear can't be split so."""
    _check_dim(dim, "linear")
    if (input_is_parallel and dim != 0) or (gather_output and dim not in (1, -1)):
        raise InputError(
            f"a linear with dim={dim} has no such option",
            where="input_is_parallel=" if input_is_parallel else "gather_output=",
            why="a split by rows takes a split input, a split by columns gives a split result",
            attempt="input_is_parallel with dim=0, gather_output with dim=1",
        )


def check_embedding(dim: int | None, max_norm: float | None, sparse: bool) -> None:
    """Raises InputError where an embedding can't be split so."""
    _check_dim(dim, "embedding")
    for asked, where, why in (
        (max_norm is not None, "max_norm=", "it changes rows of the table while they are looked up"),
        (sparse, "sparse=True", "the gradient of a slice is dense"),
    ):
        if asked and dim is not None:
            raise InputError("a split embedding can't do this", where=where, why=why, attempt="dim=None")


def _check_dim(dim: int | None, what: str) -> None:
    if dim not in (None, 0, 1, -1):
        raise InputError(
            f"the weight of a {what} can't be split by dim {dim}",
            where="dim=",
            why="it has two dims",
            attempt="0, 1 or -1",
        )


def _check_features(input: Tensor, expected: int, attempt: str) -> None:
    if not input.ndim or input.shape[-1] != expected:
        raise InputError(
            "the input's last dim does not fit the weight",
            where="parallel_linear, input",
            why=f"its shape is {tuple(input.shape)}, this rank takes {expected} features",
            attempt=attempt,
        )


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise InputError(
            f"there is no reduction {reduction!r}", where="reduction=", attempt=" or ".join(map(repr, REDUCTIONS))
        )


def _row(padding_idx: int | None, rows: int) -> int:
    """The row as `aten.embedding` has it."""
    if padding_idx is None:
        return -1
    if not -rows <= padding_idx < rows:
        raise InputError(
            f"the table has no row {padding_idx}",
            where="padding_idx=",
            why=f"it has {rows} rows",
            attempt="one of them",
        )
    return padding_idx % rows


def _text(x: Tensor | None, shape: Sequence[int]) -> str | None:
    """What must be the same of a tensor on all ranks, its gradient too: the backward communicates where it has one."""
    if x is None:
        return None
    return f"{type_text(x.dtype, shape)}{' with a gradient' if needs_gradient(x) else ''}"


def _values_text(x: Tensor) -> str:
    """The same of indices or labels, with a checksum of their values, which must be the same on all ranks."""
    compared = is_here(x) and not x.is_floating_point() and own_group().level is not CheckLevel.OFF
    return f"{_text(x, x.shape)}{f', checksum {values_digest(x):x}' if compared else ''}"


def _global_size(
    group: Group,
    name: str,
    x: Tensor,
    dim: int,
    size: int | None,
    valid: Callable[[], None],
    same: Tensor | None = None,
    **asked: Any,
) -> int:
    """The size of a split dim of all slices together; the ranks' calls are compared meanwhile.

    Args:
        same: what has the same values on all ranks.
    """
    if torch.compiler.is_compiling():
        return whole_size(name, x, dim, size, None, group)
    values = {} if same is None else {"values": _values_text(same)}
    sizes = verify_tensor_call(group, name, x, dim, valid, size=size, **values, **asked)
    return whole_size(name, x, dim, size, sizes, group)
