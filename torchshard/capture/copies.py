"""Copies models with and without storage, with the classes, attributes and shared memory of their tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchshard.capture.attributes import settings
from torchshard.capture.looks import look_like, own_attributes, own_class
from torchshard.capture.shared_memory import note_memories, tensors_sharing
from torchshard.capture.visible import visible_to
from torchshard.core.errors import InputError, in_short
from torchshard.weights.lazy import LazyTensor, values_of


def model_without_storage(model: nn.Module) -> nn.Module:
    """Copies a model for later captures; its parameters and buffers have a device but no memory.

    Configurations and other settings are shared, not copied, so that later captures see the user's
    changes to them.
    """
    own: dict[int, object] = {id(t): without_storage(t) for t in (*model.parameters(), *model.buffers())}
    held = [tensor for _, tensor in visible_to(model, code=False).values() if isinstance(tensor, LazyTensor)]
    values = values_of([tensor for tensor in held if id(tensor) not in own])
    return copy_model(model, {id(value): value for value in settings(model)} | values | own)


def copy_with_values(model: nn.Module) -> nn.Module:
    """Copies a model; computes its lazy tensors."""
    held = (tensor for _, tensor in visible_to(model, code=False).values())
    lazies = [t for t in (*model.parameters(), *model.buffers(), *held) if isinstance(t, LazyTensor)]
    values = values_of(lazies)
    for tensor in lazies:
        if isinstance(tensor, nn.Parameter):
            values[id(tensor)] = nn.Parameter(values[id(tensor)], tensor.requires_grad)
    return copy_model(model, values)


def copy_model(model: nn.Module, memo: Mapping[int, object] | None = None) -> nn.Module:
    """Copies a model.

    Args:
        memo: id of a tensor or object -> its replacement in the copy.

    Raises:
        InputError: the model contains an object that can't be copied.
    """
    held = [t for _, t in visible_to(model, code=False).values() if isinstance(t, Tensor)]
    # `copy.deepcopy` refuses a tensor that has a grad_fn.
    computed = {id(t): t.detach() for t in held if not t.is_leaf}
    own = {id(t): _copy_of_own(t) for t in (*model.parameters(), *model.buffers(), *held) if t.is_leaf and _has_look(t)}
    sharing = tensors_sharing(model)
    replaced: dict[int, Any] = computed | own | _views(sharing) | dict(memo or {})
    try:
        copied = copy.deepcopy(model, dict(replaced))
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} can't be copied",
            where="copy.deepcopy(model)",
            why=in_short(error),
            attempt="keep locks, files and process groups out of the module, or give their holder a __deepcopy__",
        ) from error
    note_memories(copied, model, [(name, replaced[id(tensor)]) for name, tensor in sharing])
    return copied


def views_kept(model: nn.Module) -> dict[int, Tensor]:
    """id -> view, for each other tensor that shares memory with a parameter or buffer of a model.

    Copies of the model contain the views: a capture finds shared tensors by their memory.
    """
    return _views(tensors_sharing(model))


def _views(sharing: Sequence[tuple[str, Tensor]]) -> dict[int, Tensor]:
    return {id(tensor): _view(tensor) for _, tensor in sharing}


def _view(tensor: Tensor) -> Tensor:
    view = tensor.detach()
    if isinstance(tensor, LazyTensor):
        return view
    return _like(tensor, view.as_subclass(Tensor).requires_grad_(tensor.requires_grad and tensor.is_leaf))


def _has_look(tensor: Tensor) -> bool:
    """Whether `copy.deepcopy` fails (a user's class) or loses attributes (of a parameter)."""
    return own_class(tensor) is not None or bool(isinstance(tensor, nn.Parameter) and own_attributes(tensor))


def _copy_of_own(tensor: Tensor) -> Tensor:
    return _like(tensor, copy.deepcopy(tensor.detach().as_subclass(Tensor)))


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """A tensor (or Parameter) with this data and the class and attributes of another one."""
    is_parameter = isinstance(tensor, nn.Parameter)
    return look_like(tensor, nn.Parameter(data, tensor.requires_grad) if is_parameter else data)


def without_storage(tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """A tensor (or Parameter) of the same shape and strides, without memory."""
    result = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device or tensor.device
    )
    # Unlike a meta tensor, it keeps the device.
    result.untyped_storage().resize_(0)
    made = nn.Parameter(result, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else result
    return look_like(tensor, made)
