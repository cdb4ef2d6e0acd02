"""The methods of PyTorch's containers for their sharded counterparts, which only these classes have.

A method such as `values` on every submodule would hide a layer of that name: `self.values = nn.Linear(...)`.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView

from torch import nn

_DICTS = (nn.ModuleDict, nn.ParameterDict)
_LISTS = (nn.Sequential, nn.ModuleList, nn.ParameterList)


def container_methods(source: type) -> Mapping[str, object]:
    """Returns the methods for the sharded counterparts of a container's class; none for other classes."""
    if issubclass(source, _DICTS):
        return _OF_DICTS
    return _OF_LISTS if issubclass(source, _LISTS) else {}


def _entries(module: nn.Module) -> Mapping[str, object]:
    return module._modules or module._parameters


def _length(module: nn.Module) -> int:
    return len(_entries(module))


def _names(module: nn.Module) -> Iterator[str]:
    return iter(_entries(module))


def _items(module: nn.Module) -> Iterator[object]:
    return iter(_entries(module).values())


def _has_name(module: nn.Module, name: object) -> bool:
    return name in _entries(module)


def _has_item(module: nn.Module, item: object) -> bool:
    return any(item is entry for entry in _entries(module).values())  # `in` would compare tensors' elements


def _item(module: nn.Module, index: int | str | slice) -> object:
    entries = _entries(module)
    return entries[index] if isinstance(index, str) else list(entries.values())[index]


def keys(self: nn.Module) -> KeysView[str]:
    """Returns the names of a dict's items."""
    return _entries(self).keys()


def values(self: nn.Module) -> ValuesView[object]:
    """Returns a dict's items."""
    return _entries(self).values()


def items(self: nn.Module) -> ItemsView[str, object]:
    """Returns (name, item) pairs of a dict."""
    return _entries(self).items()


_OF_LISTS: Mapping[str, object] = {
    "__len__": _length,
    "__iter__": _items,
    "__contains__": _has_item,
    "__getitem__": _item,
}
_OF_DICTS: Mapping[str, object] = {
    "__len__": _length, "__iter__": _names, "__contains__": _has_name, "__getitem__": _item,
    "keys": keys, "values": values, "items": items,
}  # fmt: skip
