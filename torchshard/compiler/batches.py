"""Calls with a batch or sequence split across ranks: captured for all of it, run by each rank on its part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from torchshard.capture import Leaves, flatten_call, look_like
from torchshard.core.errors import InputError
from torchshard.core.layouts import BATCH, INPUT_DIMS, SEQUENCE, Layout, Shard
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.core.user_files import warn

SplitDims: TypeAlias = Mapping[str, tuple[int, ...]]
"""Name of a call's tensor -> its dims that the ranks split: the batch, the sequence, or both."""
Known: TypeAlias = dict[int, dict[str, bool]]
"""Dim -> argument name -> whether calls split it."""


def whole_batch(
    inputs: Leaves, mesh: Mesh, whole: Collection[str] = (), known: Known | None = None
) -> tuple[Leaves, SplitDims]:
    """A call's tensors with the sizes of all ranks' batch and sequence, on the meta device; and their split dims.

    Args:
        whole: the names of tensors that an earlier call has left unsplit, whatever their sizes are.
        known: the dims that earlier calls split, with more than one element per rank; this call's are added.

    Raises:
        InputError: no tensor has the dims, a part is empty or has one token, or the batch has one element per rank
            and another argument that needs a gradient may be batched or not.
    """
    found, sizes = dict[str, tuple[int, ...]](), dict[int, int]()
    known = {} if known is None else known
    for dim, ranks in mesh.parts_of_dims.items():
        size, having = _along(inputs, dim, whole)
        _check_part(dim, size, ranks)
        chosen = _known_batches if dim == BATCH else _known_sequences
        names = chosen(inputs, size, having, known.setdefault(dim, {}))
        found |= {name: (*found.get(name, ()), dim) for name in names}
        sizes[dim] = size * ranks
    return _with_sizes(inputs, found, sizes), found


def _known_batches(inputs: Leaves, batch: int, names: Sequence[str], known: dict[str, bool]) -> Sequence[str]:
    """Returns the batched ones of tensors with a first dim of the batch's size."""
    if batch > 1:
        known.update({name: name in names for name, tensor in inputs.named_tensors if tensor.ndim})
        return names
    first, *others = names
    _tell_of_guesses(inputs, [name for name in others if name not in known])
    return [first, *(name for name in others if known.get(name, True))]


def _known_sequences(inputs: Leaves, length: int, names: Sequence[str], known: dict[str, bool]) -> Sequence[str]:
    """Returns the tensors of a part's length, without those that were whole before: theirs is a coincidence.

    The ranks compare whole tensors, so a part that is taken for one raises.
    """
    first, *others = names
    found = [first, *(name for name in others if known.get(name, True))]
    known.update({name: name in found for name, tensor in inputs.named_tensors if tensor.ndim > SEQUENCE})
    return found


def divided_batch(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object] | None, mesh: Mesh
) -> SplitDims:
    """The dims that ranks split of the tensors of a call with the full batch.

    Raises:
        InputError: no tensor has the dims, or a size is empty or not divisible by the number of ranks.
    """
    return dims_of_parts(flatten_call(model, args, kwargs or {}), mesh)


def dims_of_parts(inputs: Leaves, mesh: Mesh) -> SplitDims:
    """The dims that ranks split of a call's tensors.

    Raises:
        InputError: see `divided_batch`.
    """
    found = dict[str, tuple[int, ...]]()
    for dim, ranks in mesh.parts_of_dims.items():
        size, names = _along(inputs, dim)
        if size % ranks:
            raise InputError(
                f"a {INPUT_DIMS[dim]} of {size} can't be divided among {ranks} ranks",
                where=f"argument {names[0]!r}",
                why=f"each rank takes as many: the {_ORDINALS[dim]} dim is the {INPUT_DIMS[dim]} of all ranks",
                attempt=f"a {INPUT_DIMS[dim]} of {ranks * max(size // ranks, 1)}",
            )
        _check_part(dim, size // ranks, ranks)
        found |= {name: (*found.get(name, ()), dim) for name in names}
    return found


def over(axis: MeshAxis, dims: SplitDims) -> dict[str, Layout]:
    """The layouts over an axis of the tensors that its ranks split."""
    return {name: Shard(axis.dim) for name, split in dims.items() if axis.dim in split}


_ORDINALS: Mapping[int, str] = {BATCH: "first", SEQUENCE: "second"}


def _along(inputs: Leaves, dim: int, whole: Collection[str] = ()) -> tuple[int, list[str]]:
    """The size of the batch or sequence, and the names of the tensors that have it.

    It is the dim of the first tensor that has as many; all other tensors with a dim of that size at
    the same place have it too.

    Raises:
        InputError: no tensor has the dim.
    """
    divided = [(name, tensor) for name, tensor in inputs.named_tensors if tensor.ndim > dim and name not in whole]
    first = next((tensor for _, tensor in divided), None)
    if first is None:
        raise InputError(
            f"the call has no {INPUT_DIMS[dim]}",
            where="the arguments",
            why=f"the ranks divide the {_ORDINALS[dim]} dim of the first tensor that has one, and no tensor among the "
            "arguments has",
            attempt=f"the {INPUT_DIMS[dim]} as a tensor: model(ids)",
        )
    size = first.shape[dim]
    return size, [name for name, tensor in divided if tensor.shape[dim] == size]


def _check_part(dim: int, size: int, ranks: int) -> None:
    if not size:
        raise InputError(
            f"a rank's part of the {INPUT_DIMS[dim]} is empty",
            where="the arguments",
            why=f"the {_ORDINALS[dim]} dim of the first tensor is the {INPUT_DIMS[dim]}",
            attempt=f"one element or more for each rank, {ranks} in all",
        )
    if dim == SEQUENCE and size == 1:
        raise InputError(
            "a rank's part of the sequence is one token",
            where="the arguments",
            why="the ranks split the sequence, so a decode step has no part for each",
            attempt=f"two tokens or more for each rank, {2 * ranks} in all",
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


def _with_sizes(inputs: Leaves, dims: SplitDims, sizes: Mapping[int, int]) -> Leaves:
    """The call's tensors, with split ones resized to the sizes of all ranks, on the meta device."""

    def resized(tensor: Tensor, split: tuple[int, ...]) -> Tensor:
        shape = [sizes[dim] if dim in split else size for dim, size in enumerate(tensor.shape)]
        order = list(range(tensor.ndim))
        if not tensor.is_contiguous():  # forward may read the strides of its inputs
            order.sort(key=tensor.stride, reverse=True)
        made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device="meta")
        return look_like(tensor, made).requires_grad_(tensor.requires_grad)

    tensors = tuple(resized(t, dims[name]) if name in dims else t for name, t in inputs.named_tensors)
    return replace(inputs, tensors=tensors)
