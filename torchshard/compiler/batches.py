"""Calls whose batch the ranks divide: the graph is that of the whole batch, each rank runs it on its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchshard.capture import Leaves, flatten_call
from torchshard.core.errors import InputError
from torchshard.core.layouts import Layout, Shard
from torchshard.planner.styles import BATCH


def whole_batch(inputs: Leaves, ranks: int) -> tuple[Leaves, dict[str, Layout]]:
    """A call's tensors with those of the whole batch, without memory, in place of a rank's part; and their layouts.

    Raises:
        InputError: no tensor has a dim, or the part is a single element.
    """
    layouts = batch_layouts(inputs, 2)
    tensors = tuple(_times(t, ranks) if name in layouts else t for name, t in inputs.named_tensors)
    return replace(inputs, tensors=tensors), layouts


def batch_layouts(inputs: Leaves, least: int) -> dict[str, Layout]:
    """The layouts of the tensors that the ranks divide.

    The batch is the first dim of the first tensor, and of all others whose first dim has that size.

    Args:
        least: the smallest batch.

    Raises:
        InputError: no tensor has a dim, or the batch is smaller.
    """
    first = next((tensor for tensor in inputs.tensors if tensor.ndim), None)
    if first is None:
        raise InputError(
            "the call has no batch",
            where="the arguments",
            why="the ranks divide the first dim of the first tensor, and no tensor among the arguments has a dim",
            attempt="the batch as a tensor: model(ids)",
        )
    batch = first.shape[BATCH]
    if batch < least:
        raise InputError(
            f"a rank's part of the batch is {batch}",
            where="the arguments",
            why="the first dim of the first tensor is the batch; what holds for one element does not hold for others",
            attempt="two or more for each rank",
        )
    return {name: Shard(BATCH) for name, t in inputs.named_tensors if t.ndim and t.shape[BATCH] == batch}


def divided_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, ranks: int
) -> dict[str, Layout]:
    """The layouts of the tensors of a call with the whole batch.

    Raises:
        InputError: there is no batch, or the ranks do not divide it.
    """
    inputs = flatten_call(model, args, kwargs or {})
    layouts = batch_layouts(inputs, 2 * ranks)
    batch = next(tensor.shape[BATCH] for name, tensor in inputs.named_tensors if name in layouts)
    if batch % ranks:
        raise InputError(
            f"a batch of {batch} can't be divided among {ranks} ranks",
            where=f"argument {next(iter(layouts))!r}",
            why="each rank takes as many: the first dim is the batch of all ranks",
            attempt=f"a batch of {ranks * max(batch // ranks, 1)}",
        )
    return layouts


def _times(tensor: Tensor, ranks: int) -> Tensor:
    shape = [size * (ranks if dim == BATCH else 1) for dim, size in enumerate(tensor.shape)]
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
