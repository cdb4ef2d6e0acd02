"""The containers of `torch.nn` in a sharded model: access to their items, as in the unsharded ones."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from torch import nn


class Container(nn.Module):
    """The items of a Sequential, ModuleList, ModuleDict, ParameterList or ParameterDict."""

    @property
    def source(self) -> nn.Module:
        """The unsharded module."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(_entries(self))

    def __bool__(self) -> bool:
        return True  # because of `__len__`, modules without items would be false

    def __iter__(self) -> Iterator[Any]:
        return iter(_entries(self) if _is_dict(self) else _entries(self).values())

    def __contains__(self, item: object) -> bool:
        if _is_dict(self):
            return item in _entries(self)
        return any(item is entry for entry in _entries(self).values())  # `in` would compare tensors' elements

    def __getitem__(self, index: int | str | slice) -> Any:
        if isinstance(index, str):
            return _entries(self)[index]
        return list(_entries(self).values())[index]

    def keys(self) -> KeysView[str]:
        """Returns the names of a dict's items."""
        return _entries(self).keys()

    def values(self) -> ValuesView[Any]:
        """Returns a dict's items."""
        return _entries(self).values()

    def items(self) -> ItemsView[str, Any]:
        """Returns (name, item) pairs of a dict."""
        return _entries(self).items()


def _entries(module: Container) -> Mapping[str, Any]:
    return module._modules or module._parameters


def _is_dict(module: Container) -> bool:
    return isinstance(module.source, (nn.ModuleDict, nn.ParameterDict))
