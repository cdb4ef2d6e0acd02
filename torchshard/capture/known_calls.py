"""Flattens a call's arguments in one walk, if an earlier call was of the same kind.

A cache contains hundreds of values. `flatten_call` takes milliseconds to analyze them: as long as a
decode step. Its result is kept, keyed by all that a walk sees except tensors: types, names, and
the values of constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torchshard.capture.call_arguments import bound_call, flatten_call
from torchshard.capture.keys import code_key
from torchshard.capture.namespaces import values_of_object
from torchshard.capture.signature import Leaves, is_opened, varying

_CONSTANTS = frozenset(
    {type(None), bool, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""Types in which equal values give the same graph. Floats are not among them: 0.0 equals -0.0."""
_MAX_DEPTH = 16
"""`flatten_call` handles deeper objects, and refuses those that contain themselves."""
_MAX_KINDS = 256
"""At most this many kinds of calls are kept."""


class KnownCalls:
    """A module, and the results of `flatten_call` for its calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._varying: dict[Hashable, tuple[bool, ...]] = {}
        self._leaves: dict[Hashable, Leaves] = {}

    def flatten(self, args: Sequence[object], kwargs: Mapping[str, object], numbers: Collection[str]) -> Leaves:
        """Equals `flatten_call` of the module; `numbers` only grows from call to call."""
        walk = _Walk()
        bound = bound_call(self.model, args, kwargs)
        if not walk.see((bound.args, bound.kwargs)):
            return flatten_call(self.model, args, kwargs, numbers)
        kind = (len(numbers), *walk.seen, *map(code_key, walk.classes))
        known = self._leaves.get((kind, walk.numbers(self._varying.get(kind, ()), vary=False)))
        if known is None:
            return self._noted(kind, walk, flatten_call(self.model, args, kwargs, numbers))
        own = walk.numbers(self._varying[kind], vary=True)
        return dataclasses.replace(
            known,
            tensors=tuple(walk.tensors),
            numbers=own,
            rebuild=partial(known.rebuild, numbers=own),
            arguments=(bound.args, bound.kwargs),
            repeated=walk.repeated,
        )

    def _noted(self, kind: Hashable, walk: _Walk, leaves: Leaves) -> Leaves:
        """Keeps the result of `flatten_call`, if the walk saw the same values in the same order."""
        varies = varying(leaves)
        same = len(walk.tensors) == len(leaves.tensors) and all(map(lambda a, b: a is b, walk.tensors, leaves.tensors))
        if same and len(varies) == len(walk.integers):
            if len(self._leaves) >= _MAX_KINDS:
                # `flatten` looks a call up in both, so they are cleared together.
                self._leaves.clear()
                self._varying.clear()
            self._varying[kind] = varies
            fixed = walk.numbers(varies, vary=False)
            self._leaves[kind, fixed] = dataclasses.replace(leaves, tensors=(), arguments=((), {}))
        return leaves


class _Walk:
    """The contents of nested containers and objects, in the order in which `flatten` finds them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.integers: list[int] = []
        self.seen: list[Hashable] = []
        """For each value, its type and the key of its content: constants, lengths or names."""
        self.classes: dict[type, None] = {}
        """The classes of the objects."""
        self.holders: list[int] = []
        """The ids of lists, dicts and objects."""

    @property
    def repeated(self) -> frozenset[int]:
        """The ids of lists, dicts and objects that occur in more than one place."""
        once = set(self.holders)
        if len(once) == len(self.holders):
            return frozenset()
        return frozenset(number for number in once if self.holders.count(number) > 1)

    def numbers(self, varies: Sequence[bool], *, vary: bool) -> tuple[int, ...]:
        """The integers that vary between calls, or the others: all of them if `varies` is empty."""
        if not varies:
            return () if vary else tuple(self.integers)
        return tuple(number for number, own in zip(self.integers, varies, strict=True) if own is vary)

    def see(self, value: object, depth: int = 0) -> bool:
        """Adds a value and its contents; returns False if only `flatten_call` can handle it."""
        cls = type(value)
        if isinstance(value, Tensor):
            self.seen.append(Tensor)
            self.tensors.append(value)
        elif cls is int:
            self.seen.append(int)
            self.integers.append(value)  # type: ignore[arg-type]
        elif cls in _CONSTANTS:
            self.seen.append((cls, value))
        elif cls is float:
            self.seen.append((cls, repr(value)))
        else:
            return depth < _MAX_DEPTH and self._see_inside(cls, value, depth + 1)
        return True

    def _see_inside(self, cls: type, value: object, depth: int) -> bool:
        if cls is not tuple:
            self.holders.append(id(value))
        if cls is list or cls is tuple:
            self.seen.append((cls, len(value)))  # type: ignore[arg-type]
            return all(self.see(item, depth) for item in value)  # type: ignore[attr-defined]
        if cls is dict:
            names: Mapping[Hashable, object] = value  # type: ignore[assignment]
        elif is_opened(value):
            names = values_of_object(value)
            self.classes[cls] = None
        else:
            return False
        self.seen.append((cls, tuple(names)))
        return all(self.see(item, depth) for item in names.values())
