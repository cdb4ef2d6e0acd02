"""The tensors that the modules of a sharded model store, by name, each with its counterpart in the unsharded model."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from torchshard.capture import shared_names, without_storage

Slot = tuple[dict[str, Tensor | None], str]
"""A module's dict of parameters or buffers, and a key of it."""
Types = dict[str, tuple[torch.Size, torch.dtype, torch.device]]


class ModelTensors:
    """This rank's parameters and buffers of a sharded model, under their unsharded names."""

    def __init__(self, model: nn.Module, source: nn.Module) -> None:
        """Finds where each module stores its tensors.

        Args:
            model: the sharded model, with the names of the unsharded one's modules.
            source: the unsharded model, without memory.
        """
        self.names = shared_names(source)
        """Name -> all names of the same tensor; tied parameters have several, and the first one stands for all."""
        self._slots = {name: slot(*owner(model, name)) for name in self.names}
        self._sources = {name: owner(source, name) for name in self.names}
        self.now: dict[str, Tensor] = {}
        """Name -> the tensor that the last call used."""
        self.types: Types = {}
        """The shapes, dtypes and devices that graphs were captured for."""
        self.moves = 0
        """How often dtypes, devices or shapes have changed: graphs of earlier ones do not fit."""

    def slot(self, name: str) -> Slot:
        """Returns the place that stores a tensor."""
        return self._slots[name]

    def source(self, name: str) -> Tensor:
        """Returns the unsharded model's parameter or buffer, without memory."""
        module, leaf = self._sources[name]
        tensor: Tensor = getattr(module, leaf)
        return tensor

    def source_slot(self, name: str) -> Slot:
        """Returns the place that stores a tensor of the unsharded model."""
        return slot(*self._sources[name])

    def first(self, name: str) -> str:
        """Returns the first of the names that a tensor has."""
        return self.names[name][0]

    def by_first_name(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by first name, tied ones once."""
        return {name: tensor for name, tensor in self.now.items() if self.names[name][0] == name}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by first name."""
        return {name: tensor for name, tensor in self.by_first_name().items() if isinstance(tensor, nn.Parameter)}

    def read(self) -> None:
        """Reads the tensors from the modules, and gives the unsharded model their dtypes and devices."""
        self.now = {name: cast(Tensor, entries[leaf]) for name, (entries, leaf) in self._slots.items()}
        self.types = types_of(self.now)
        for names in dict.fromkeys(self.names.values()):
            tensor, source = self.now[names[0]], self.source(names[0])
            if (tensor.dtype, tensor.device) != (source.dtype, source.device):
                moved = without_storage(source, dtype=tensor.dtype, device=tensor.device)
                for name in names:
                    entries, leaf = self.source_slot(name)
                    entries[leaf] = moved
        self.moves += 1

    def replaced(self) -> dict[str, object] | None:
        """Returns the tensors that the modules store, or None if they are those of the last call."""
        current = {name: entries.get(leaf) for name, (entries, leaf) in self._slots.items()}
        is_same = all(map(operator.is_, current.values(), self.now.values()))
        # `p.data = ...` keeps the object
        return None if is_same and types_of(self.now) == self.types else cast(dict[str, object], current)


def types_of(tensors: Mapping[str, Tensor]) -> Types:
    """Returns (shape, dtype, device) of tensors, by name."""
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}


def slot(module: nn.Module, leaf: str) -> Slot:
    """Returns the dict of a module that contains a parameter or buffer, and its key there."""
    entries = module._parameters if leaf in module._parameters else module._buffers
    return cast(dict[str, Tensor | None], entries), leaf


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that has a parameter or buffer, and the last part of the name.

    It reads the dicts of submodules, because attributes of a class may hide a submodule.
    """
    *path, leaf = name.split(".")
    for part in path:
        model = cast(nn.Module, model._modules[part])
    return model, leaf
