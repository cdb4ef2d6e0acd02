"""Checks the arguments of a call on slices, and verifies between ranks that all make the same call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.layouts import type_text
from torchshard.distributed.eager import needs_gradient, verify_tensor_call, whole_size
from torchshard.distributed.group import CheckLevel, Group, own_group
from torchshard.runtime.digests import is_here, values_digest


def check_dim(dim: int | None, what: str) -> None:
    """Raises InputError if the weight of a linear or embedding can't be split by this dim."""
    if dim not in (None, 0, 1, -1):
        raise InputError(
            f"the weight of a {what} can't be split by dim {dim}",
            where="dim=",
            why="it has two dims",
            attempt="0, 1 or -1",
        )


def check_features(input: Tensor, expected: int, attempt: str) -> None:
    """Raises InputError if the last dim of a linear's input does not have the expected size."""
    if not input.ndim or input.shape[-1] != expected:
        raise InputError(
            "the input's last dim does not fit the weight",
            where="parallel_linear, input",
            why=f"its shape is {tuple(input.shape)}, this rank takes {expected} features",
            attempt=attempt,
        )


def check_class_weights(weight: Tensor | None, classes: int) -> None:
    """Raises InputError if the classes' weights are not one number per class."""
    if weight is not None and weight.shape != (classes,):
        raise InputError(
            "the classes' weights do not fit the logits",
            where="parallel_cross_entropy, weight",
            why=f"their shape is {tuple(weight.shape)}, there are {classes} classes",
            attempt="the weights of all classes, on every rank",
        )


def tensor_fact(x: Tensor | None, shape: Sequence[int]) -> str | None:
    """Returns the facts about a tensor that must match on all ranks.

    They include whether it needs a gradient, because its backward communicates.
    """
    if x is None:
        return None
    gradient = " with a gradient" if needs_gradient(x) else ""
    return f"{type_text(x.dtype, shape)}{gradient}"


def _values_fact(x: Tensor) -> str:
    """Returns the facts about indices or labels that must match, with a checksum of values."""
    text = f"{tensor_fact(x, x.shape)}"
    if is_here(x) and not x.is_floating_point() and own_group().level is not CheckLevel.OFF:
        return f"{text}, checksum {values_digest(x):x}"
    return text


def global_size(
    group: Group,
    name: str,
    x: Tensor,
    dim: int,
    size: int | None,
    check: Callable[[], None],
    facts: Mapping[str, Hashable],
    same: Tensor | None = None,
) -> int:
    """Returns the global size of a split dim. The ranks verify the call in the same message.

    Args:
        check: raises if this rank can't make the call; the other ranks then raise too.
        facts: must match on all ranks.
        same: a tensor that must have the same values on all ranks.
    """
    if torch.compiler.is_compiling():  # a compiled graph can't contain a verification's messages
        return whole_size(name, x, dim, size, None, group)
    values = {} if same is None else {"values": _values_fact(same)}
    sizes = verify_tensor_call(group, name, x, dim, check, size=size, **values, **facts)
    return whole_size(name, x, dim, size, sizes, group)
