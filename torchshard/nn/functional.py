"""Linear, embedding and cross entropy on slices of weights or inputs, using the rules of graphs.

    y = parallel_linear(x, weight, bias, dim=1)        # column: weight[out / n, in], the result stays split
    z = parallel_linear(y, weight, bias, dim=0, input_is_parallel=True)          # row: weight[out, in / n]
    e = parallel_embedding(ids, weight, dim=0)         # vocabulary: weight[num / n, dim]
    l = parallel_cross_entropy(logits, labels, dim=-1) # classes: logits[batch, classes / n]

Gradients equal the unsharded functions' gradients; the gradient of a slice is a slice. Arguments,
not tensors, specify the sharding, because the next op would drop a mark on a tensor. Without
`size=`, each call exchanges a small message to compute the global size of the split dim. In a group
of one rank, these call PyTorch's own functions.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.layouts import I, Shard
from torchshard.distributed.eager import own_dim
from torchshard.distributed.group import Group, own_group
from torchshard.nn.call_checks import check_class_weights, check_dim, check_features, global_size, tensor_fact
from torchshard.nn.one_op import Piece, convert, run

aten = torch.ops.aten
Reduction = Literal["none", "mean", "sum"]
REDUCTIONS: dict[Reduction, int] = {"none": 0, "mean": 1, "sum": 2}
"""The numbers of the reductions in `aten.cross_entropy_loss`."""


# --- linear ----------------------------------------------------------------------------------------------------------


class LinearOptions(NamedTuple):
    """The way a linear is split."""

    dim: int | None
    input_is_parallel: bool
    gather_output: bool

    def check(self) -> None:
        """Raises InputError if an option does not fit the split."""
        check_dim(self.dim, "linear")
        by_columns = self.dim in (1, -1)
        if (self.input_is_parallel and self.dim != 0) or (self.gather_output and not by_columns):
            raise InputError(
                "a linear that is split so has no such option",
                where="input_is_parallel=" if self.input_is_parallel and self.dim != 0 else "gather_output=",
                why="a split by rows takes a split input, a split by columns gives a split result",
                attempt="input_is_parallel by rows, gather_output by columns",
            )

    def check_input(self, input: Tensor, weight: Tensor) -> None:
        """Raises InputError if an option, or the input to this rank's weight, does not fit."""
        self.check()
        if self.input_is_parallel or self.dim != 0:
            check_features(input, weight.shape[1], "the whole input, or input_is_parallel as the input is")


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
    """Computes `torch.nn.functional.linear` with this rank's slice of the weight.

    Args:
        input: `[..., in]`, replicated; `[..., in / n]` with `input_is_parallel`.
        weight: `[out, in]` for `dim=None`, `[out / n, in]` for 1 or -1, `[out, in / n]` for 0.
        bias: `[out]`, for 1 or -1 `[out / n]`.
        dim: None: not split; 1 or -1: by columns; 0: by rows. The numbers are dims of the
            transposed weight, `[in, out]`.
        size: the global size of the split dim (`out` by columns, `in` by rows).
        input_is_parallel: the input is already split along its last dim, as a split by columns
            returns it.
        gather_output: gathers the result of a split by columns.

    Returns:
        `[..., out]`, by columns `[..., out / n]`.

    Raises:
        InputError: the sizes don't fit, or an option does not fit the split.
        DistributedError: the ranks' calls differ.

    Source: Megatron's `ColumnParallelLinear` and `RowParallelLinear`.
    """
    group, options = own_group(), LinearOptions(dim, input_is_parallel, gather_output)
    if dim is None or group.size == 1:
        options.check_input(input, weight)
        return F.linear(input, weight, bias)
    split = _linear_by_rows if dim == 0 else _linear_by_columns
    return split(group, input, weight, bias, size, options)


def _linear_by_columns(
    group: Group, input: Tensor, weight: Tensor, bias: Tensor | None, size: int | None, options: LinearOptions
) -> Tensor:
    out_features = _linear_size(group, input, weight, bias, size, options)
    options.check_input(input, weight)  # `_linear_size` skips this check if the call's signature was verified before
    x = Piece(input, I, tuple(input.shape))
    w = Piece(weight, Shard(0), (out_features, weight.shape[1]))
    b = None if bias is None else Piece(bias, Shard(0), (out_features,))
    result = run(aten.linear.default, "n", group, x, w, b)
    return convert(result, I, group) if options.gather_output else result.tensor


def _linear_by_rows(
    group: Group, input: Tensor, weight: Tensor, bias: Tensor | None, size: int | None, options: LinearOptions
) -> Tensor:
    in_features = _linear_size(group, input, weight, bias, size, options)
    if options.input_is_parallel:
        options.check_input(input, weight)
    else:
        check_features(input, in_features, "the whole input, or input_is_parallel=True for this rank's slice of it")
    layout = Shard(input.ndim - 1) if options.input_is_parallel else I
    x = Piece(input, layout, (*input.shape[:-1], in_features))
    w = Piece(weight, Shard(1), (weight.shape[0], in_features))
    product = convert(run(aten.linear.default, "k", group, x, w, None), I, group)
    # After the sum over the ranks: the bias is replicated, and must be added once.
    return product if bias is None else product + bias.to(product.dtype)


def _linear_size(
    group: Group, input: Tensor, weight: Tensor, bias: Tensor | None, size: int | None, options: LinearOptions
) -> int:
    """Returns the global size of the weight's split dim, after the ranks have verified the call."""
    facts = {
        "input": tensor_fact(input, input.shape[:-1]), "input_is_parallel": options.input_is_parallel,
        "bias": tensor_fact(bias, ()),
    }  # fmt: skip
    check = partial(options.check_input, input, weight)
    return global_size(group, "parallel_linear", weight, 1 if options.dim == 0 else 0, size, check, facts)


# --- embedding -------------------------------------------------------------------------------------------------------


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
    """Computes `torch.nn.functional.embedding` with this rank's slice; the result is replicated.

    Args:
        input: indices into the full table, of any shape, the same on every rank.
        weight: `[num, width]` for `dim=None`, `[num / n, width]` for 0, `[num, width / n]` for 1 or -1.
        padding_idx: a row of the full table, which gets no gradient; negative counts from the end.
        scale_grad_by_freq: with `dim=0`, gathers the table: a row's gradient needs all indices.
        dim: None: not split; 0: by rows (the vocabulary); 1 or -1: by columns.
        size: the global size of the split dim (`num` by rows, `width` by columns).

    Raises:
        InputError: `max_norm` or `sparse` is set for a split table, or an option does not fit.
        DistributedError: the ranks' calls differ.

    Source: Megatron's `VocabParallelEmbedding`.
    """
    group, check = own_group(), partial(check_embedding, dim, max_norm, sparse)
    if dim is None or group.size == 1:
        check()
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    facts = {"padding_idx": padding_idx, "scale": scale_grad_by_freq, "max_norm": max_norm, "sparse": sparse}
    split = 0 if dim == 0 else 1
    whole = global_size(group, "parallel_embedding", weight, split, size, check, facts, same=input)
    return _split_embedding(group, input, weight, padding_idx, scale_grad_by_freq, split, whole)


def _split_embedding(
    group: Group, input: Tensor, weight: Tensor, padding_idx: int | None, scale: bool, split: int, whole: int
) -> Tensor:
    shape = (whole, weight.shape[1]) if split == 0 else (weight.shape[0], whole)
    table, indices = Piece(weight, Shard(split), shape), Piece(input, I, tuple(input.shape))
    padding_row = _padding_row(padding_idx, shape[0])
    axis = "v" if split == 0 else "e"
    return convert(run(aten.embedding.default, axis, group, table, indices, padding_row, scale, False), I, group)


def check_embedding(dim: int | None, max_norm: float | None, sparse: bool) -> None:
    """Raises InputError if the options exclude a split."""
    check_dim(dim, "embedding")
    for is_set, where, why in (
        (max_norm is not None, "max_norm=", "it changes rows of the table while they are looked up"),
        (sparse, "sparse=True", "the gradient of a slice is dense"),
    ):
        if is_set and dim is not None:
            raise InputError("a split embedding can't do this", where=where, why=why, attempt="a whole one")


def _padding_row(padding_idx: int | None, rows: int) -> int:
    """Returns the row as `aten.embedding` numbers it: not negative, or -1 without one."""
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


# --- cross entropy ---------------------------------------------------------------------------------------------------


class _LossOptions(NamedTuple):
    reduction: Reduction
    ignore_index: int
    label_smoothing: float

    def check(self) -> None:
        if not isinstance(self.reduction, str) or self.reduction not in REDUCTIONS:
            expected = " or ".join(map(repr, REDUCTIONS))
            raise InputError(f"invalid reduction {self.reduction!r}", where="reduction=", attempt=expected)


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    dim: int | None,
    size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Computes `torch.nn.functional.cross_entropy` of split logits; the result is replicated.

    Logits that are split by classes are never gathered.

    Args:
        input: this rank's slice of the logits: `[classes]`, `[batch, classes]` or
            `[batch, classes, ...]`.
        target: unsharded class indices or probabilities, the same on every rank.
        weight: `[classes]`, unsharded.
        dim: the split dim of the logits; None: they are not split.
        size: the global size of that dim.

    Raises:
        InputError: `dim` or `reduction` is invalid.
        DistributedError: the ranks' calls differ.

    Source: Megatron's `vocab_parallel_cross_entropy`, without `weight` and `ignore_index`.
    """
    group, options = own_group(), _LossOptions(reduction, ignore_index, label_smoothing)
    if dim is None or group.size == 1:
        options.check()
        return F.cross_entropy(input, target, weight, **options._asdict())
    facts = {"weight": weight is not None, **options._asdict()}
    whole = global_size(group, "parallel_cross_entropy", input, dim, size, options.check, facts, same=target)
    return _split_cross_entropy(group, input, target, weight, own_dim(input, dim), whole, options)


def _split_cross_entropy(
    group: Group, input: Tensor, target: Tensor, weight: Tensor | None, split: int, whole: int, options: _LossOptions
) -> Tensor:
    class_dim = min(1, input.ndim - 1)
    shape = (*input.shape[:split], whole, *input.shape[split + 1 :])
    check_class_weights(weight, shape[class_dim])
    # PyTorch's function casts the labels and, in autocast, the logits; the op itself does neither.
    target = target if target.is_floating_point() else target.long()
    input = input.float() if torch.is_autocast_enabled(input.device.type) else input
    labels = Piece(target, I, tuple(target.shape))
    class_weights = None if weight is None else Piece(weight, I, tuple(weight.shape))
    settings = REDUCTIONS[options.reduction], options.ignore_index, options.label_smoothing
    axis = "v" if split == class_dim else "no axis: the rows are gathered"
    logits = Piece(input, Shard(split), shape)
    loss = run(aten.cross_entropy_loss.default, axis, group, logits, labels, class_weights, *settings)
    return convert(loss, I, group)
