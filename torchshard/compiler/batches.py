"""Calls with a batch split across ranks: captured for the full batch, run by each rank on its part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchshard.capture import Leaves, flatten_call, look_like
from torchshard.core.errors import InputError
from torchshard.core.layouts import Layout, Shard
from torchshard.planner.styles import BATCH


def whole_batch(inputs: Leaves, ranks: int, whole: Collection[str] = ()) -> tuple[Leaves, dict[str, Layout]]:
    """A call's tensors with the batch extended to all ranks', on the meta device; and their layouts.

    Args:
        whole: the names of tensors that an earlier call has left unsplit, whatever their sizes are.

    Raises:
        InputError: every tensor is a scalar, or the part is a single element.
    """
    batch, layouts = _batch(inputs, whole)
    _check_part(batch, ranks)
    return _with_batch(inputs, layouts, batch * ranks), layouts


def divided_batch(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object] | None, ranks: int
) -> dict[str, Layout]:
    """The layouts of the tensors of a call with the full batch.

    Raises:
        InputError: every tensor is a scalar, the batch is not divisible by the number of ranks, or
            a part is a single element.
    """
    return layouts_of_parts(flatten_call(model, args, kwargs or {}), ranks)


def layouts_of_parts(inputs: Leaves, ranks: int) -> dict[str, Layout]:
    """The layouts of the batched ones among a call's tensors.

    Raises:
        InputError: see `divided_batch`.
    """
    batch, layouts = _batch(inputs)
    if batch % ranks:
        raise InputError(
            f"a batch of {batch} can't be divided among {ranks} ranks",
            where=f"argument {next(iter(layouts))!r}",
            why="each rank takes as many: the first dim is the batch of all ranks",
            attempt=f"a batch of {ranks * max(batch // ranks, 2)}",
        )
    _check_part(batch // ranks, ranks)
    return layouts


def _batch(inputs: Leaves, whole: Collection[str] = ()) -> tuple[int, dict[str, Layout]]:
    """The size of the batch, and the layouts of the batched tensors.

    The first dim of the first tensor is the batch; all other tensors with a first dim of that size
    are batched too.

    Raises:
        InputError: every tensor is a scalar.
    """
    divided = [(name, tensor) for name, tensor in inputs.named_tensors if tensor.ndim and name not in whole]
    first = next((tensor for _, tensor in divided), None)
    if first is None:
        raise InputError(
            "the call has no batch",
            where="the arguments",
            why="the ranks divide the first dim of the first tensor, and no tensor among the arguments has a dim",
            attempt="the batch as a tensor: model(ids)",
        )
    batch = first.shape[BATCH]
    return batch, {name: Shard(BATCH) for name, tensor in divided if tensor.shape[BATCH] == batch}


def _check_part(size: int, ranks: int) -> None:
    if size < 2:
        raise InputError(
            f"a rank's part of the batch is {size}",
            where="the arguments",
            why="the first dim of the first tensor is the batch; what holds for one element does not hold for others",
            attempt=f"two or more for each rank, {2 * ranks} in all",
        )


def _with_batch(inputs: Leaves, layouts: Mapping[str, Layout], batch: int) -> Leaves:
    """The call's tensors, with batched tensors resized to `batch` on the meta device."""

    def resized(tensor: Tensor) -> Tensor:
        shape = [batch if dim == BATCH else size for dim, size in enumerate(tensor.shape)]
        order = list(range(tensor.ndim))
        if not tensor.is_contiguous():  # forward may read the strides of its inputs
            order.sort(key=tensor.stride, reverse=True)
        made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device="meta")
        return look_like(tensor, made).requires_grad_(tensor.requires_grad)

    tensors = tuple(resized(tensor) if name in layouts else tensor for name, tensor in inputs.named_tensors)
    return replace(inputs, tensors=tensors)
