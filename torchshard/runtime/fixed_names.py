"""The dicts of a sharded module's parameters, buffers and submodules: names can't be added or removed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from torch import nn

from torchshard.runtime.refusals import not_changeable
from torchshard.weights.parameter import ShardedParameter

V = TypeVar("V")


class FixedNames(dict[str, V]):
    """The parameters, buffers or submodules of a module, with fixed names.

    A dict, because `nn.Module` and users write these dicts directly: `module._parameters[name] =
    ...`.
    """

    def __init__(self, entries: Mapping[str, V], where: str, *, replaceable: bool) -> None:
        super().__init__(entries)
        self._where, self._replaceable = where, replaceable

    def __setitem__(self, name: str, value: V) -> None:
        if name not in self:
            raise not_changeable(name, self._where, "added")
        current = self[name]
        if current is None and value is not None:
            raise not_changeable(name, self._where, "added")
        if not self._replaceable and value is not current:
            raise not_changeable(name, self._where, "replaced")
        if isinstance(current, ShardedParameter) and isinstance(value, nn.Parameter):
            current.adopt(value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        raise not_changeable(name, self._where, "removed")

    def pop(self, name: str, *default: Any) -> Any:
        """Raises if the name exists."""
        if name in self:
            raise not_changeable(name, self._where, "removed")
        return super().pop(name, *default)

    def update(self, *args: Any, **kwargs: V) -> None:
        """Sets each item separately, with the checks of `__setitem__`."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def clear(self) -> None:
        """Always raises."""
        raise not_changeable("everything", self._where, "removed")

    def popitem(self) -> NoReturn:
        """Always raises."""
        raise not_changeable("everything", self._where, "removed")

    def setdefault(self, name: str, default: Any = None) -> V:
        """Raises if the name is missing."""
        if name not in self:
            self[name] = default
        return self[name]

    def __deepcopy__(self, memo: dict[int, object]) -> FixedNames[V]:
        return FixedNames(copy.deepcopy(dict(self), memo), self._where, replaceable=self._replaceable)
