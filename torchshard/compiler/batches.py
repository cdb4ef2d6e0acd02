"""Calls with a batch split across ranks: captured for the full batch, run by each rank on its part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchshard.capture import Leaves, flatten_call, look_like
from torchshard.core.errors import InputError
from torchshard.core.layouts import BATCH, Layout, Shard
from torchshard.core.user_files import warn


def whole_batch(
    inputs: Leaves, ranks: int, whole: Collection[str] = (), known: dict[str, bool] | None = None
) -> tuple[Leaves, dict[str, Layout]]:
    """A call's tensors with the batch extended to all ranks', on the meta device; and their layouts.

    Args:
        whole: the names of tensors that an earlier call has left unsplit, whatever their sizes are.
        known: argument name -> whether earlier calls with more than one element per rank split it;
            this call's are added.

    Raises:
        InputError: every tensor is a scalar, the batch is empty, or it has one element per rank and
            another argument that needs a gradient may be batched or not.
    """
    batch, layouts = _batch(inputs, whole)
    _check_part(batch, ranks)
    known = {} if known is None else known
    if batch > 1:
        known.update({name: name in layouts for name, tensor in inputs.named_tensors if tensor.ndim})
    else:
        first, *others = layouts
        layouts = {name: layouts[name] for name in (first, *others) if name == first or known.get(name, True)}
        _tell_of_guesses(inputs, [name for name in others if name not in known])
    return _with_batch(inputs, layouts, batch * ranks), layouts


def divided_batch(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object] | None, ranks: int
) -> dict[str, Layout]:
    """The layouts of the tensors of a call with the full batch.

    Raises:
        InputError: every tensor is a scalar, or the batch is empty or not divisible by the number
            of ranks.
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
            attempt=f"a batch of {ranks * max(batch // ranks, 1)}",
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
    if not size:
        raise InputError(
            "a rank's part of the batch is empty",
            where="the arguments",
            why="the first dim of the first tensor is the batch",
            attempt=f"one element or more for each rank, {ranks} in all",
        )


def _tell_of_guesses(inputs: Leaves, guessed: Collection[str]) -> None:
    """Warns of floating-point arguments that count as batched because their first dim is 1, as a rank's part is.

    Raises:
        InputError: one needs a gradient: if it is batched, its own rank's; otherwise the sum over all ranks.
    """
    found = {name: t for name, t in inputs.named_tensors if name in guessed and t.is_floating_point()}
    names, why = ", ".join(map(repr, found)), "the first dim of each is 1, as is this rank's part of the batch"
    if any(tensor.requires_grad for tensor in found.values()):
        raise InputError(
            f"whether {names} are parts of the batch is not clear",
            where="the arguments",
            why=f"{why}; the gradient of one that is not batched is the sum over all ranks",
            attempt="example_inputs= with two elements for each rank, which decide it; or inputs='global'",
        )
    if found:
        warn(f"{names} count as parts of the batch: {why}. example_inputs= with two elements for each rank decide it")


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
