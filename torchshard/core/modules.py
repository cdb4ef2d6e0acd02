"""Tensors: their names in modules, their memory, and the writes to them."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn

TensorDict: TypeAlias = dict[str, Any]
"""A module's `_parameters` or `_buffers`: name -> tensor or None. No type of dict covers both."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's parameters and buffers by all their names; tied ones have several."""
    return dict((
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ))  # fmt: skip


def storage_id(tensor: Tensor) -> int:
    """Returns a number that identifies the memory of a strided tensor and its views while they live."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """Returns a number that changes with each write to a tensor; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
