"""Forms of optimizers' states: their structure, with the types of tensors that ranks have slices of.

A rank that steps a full parameter sends the form of its state to the others, which have never seen it.

A tensor that wraps others, such as torchao's 8-bit state with its codes and scales, can't be cut as a whole.
Between steps it is open, a dict of its parts, which ranks split as other tensors:

    OptimState8bit(codes=u8[256,64], scale=f32[64], signed=True)
    {"tensor class": "torchao.optim.subclass_8bit.OptimState8bit", "codes": u8[256,64], "scale": f32[64], ...}
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchshard.core.errors import InputError

T = TypeVar("T")
State = dict[str, Any]
_CLASS: Final = "tensor class"
"""The key, in an open tensor, of its class: 'torchao.optim.subclass_8bit.OptimState8bit'."""
_DTYPE: Final = "torch.dtype"
"""The key, in the context of an open tensor, of a dtype's name: `{"torch.dtype": "float32"}`."""
_FACTS: Final = ("context", "shape", "stride")
"""The keys of an open tensor's facts: of `__tensor_flatten__`, and the sizes that it shows."""


def is_split(leaf: object) -> bool:
    """Returns whether ranks have slices of a leaf of a state: numbers are the same on all."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def split_tensors(state: State | None) -> list[Tensor]:
    """Returns the tensors of a state that ranks have slices of."""
    return [leaf for leaf in pytree.tree_leaves(state) if is_split(leaf)]


class Sliced(NamedTuple):
    """A leaf of a state that is a tensor in slices."""

    whole: tuple[int, ...]
    dtype: torch.dtype


class Form(NamedTuple):
    """The structure of a parameter's state; leaves are values, or `Sliced`."""

    leaves: tuple[object, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, state: State) -> Form:
        """Returns the form of a state, with copies of its numbers, which a step may change in place."""
        leaves, spec = pytree.tree_flatten(state)
        return cls(tuple(map(cls._leaf, leaves)), spec)

    @staticmethod
    def _leaf(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return Sliced(tuple(leaf.shape), leaf.dtype) if leaf.ndim else leaf.clone()

    def data(self) -> list[object]:
        """Returns the form as data that ranks send each other."""
        sent = [[list(x.whole), str(x.dtype)] if isinstance(x, Sliced) else [x] for x in self.leaves]
        return [sent, pytree.treespec_dumps(self.spec)]

    @classmethod
    def read(cls, data: list[Any]) -> Form:
        """Returns the form that `data` describes."""
        sent, spec = data
        leaves = (Sliced(tuple(x[0]), getattr(torch, x[1][6:])) if len(x) > 1 else x[0] for x in sent)
        return cls(tuple(leaves), _spec(spec))

    @property
    def sliced(self) -> list[Sliced]:
        """The leaves that are tensors in slices."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Sliced)]

    def filled(self, slices: Iterator[Tensor]) -> State:
        """Returns a state of this form."""
        leaves = [next(slices) if isinstance(leaf, Sliced) else leaf for leaf in self.leaves]
        return cast(State, pytree.tree_unflatten(leaves, self.spec))


_spec = functools.lru_cache(pytree.treespec_loads)


def opened(state: T) -> T:
    """Returns a state, or a part of one, with dicts of their parts instead of tensors that wrap others.

    Raises:
        InputError: more is needed to make such a tensor again than its parts and plain data.
    """
    return cast(T, pytree.tree_map(lambda leaf: _open(leaf) if is_wrapper(leaf) else leaf, state))


def closed(state: T) -> T:
    """Returns a state with its tensors that wrap others: undoes `opened`."""
    return cast(T, pytree.tree_map(lambda leaf: _close(leaf) if is_open(leaf) else leaf, state, is_leaf=is_open))


def is_open(value: object) -> TypeGuard[dict[str, Any]]:
    """Returns whether a value is an open tensor."""
    return isinstance(value, dict) and _CLASS in value


def as_given(loaded: Any, given: Any) -> Any:
    """Returns a loaded state, with open tensors as they were given: PyTorch casts their codes to floats."""
    if is_open(given):
        return given
    if isinstance(given, Mapping) and isinstance(loaded, dict):
        return {key: as_given(value, given.get(key)) for key, value in loaded.items()}
    return loaded


def is_wrapper(leaf: object) -> TypeGuard[Any]:
    """Returns whether a leaf of a state is a tensor that wraps others."""
    # the protocol of `torch.compile` for tensor subclasses; the class of parameters has no such method
    return isinstance(leaf, Tensor) and hasattr(leaf, "__tensor_flatten__")


def _open(x: Any) -> dict[str, object]:
    names, context = x.__tensor_flatten__()
    parts = {name: opened(getattr(x, name)) for name in names}
    cls, context = type(x), pytree.tree_map(functools.partial(_as_data, type(x)), context)
    facts = dict(zip(_FACTS, (context, list(x.shape), list(x.stride())), strict=True))
    return {_CLASS: f"{cls.__module__}.{cls.__qualname__}", **facts, **parts}


def _as_data(cls: type, value: object) -> object:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return list(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InputError(
        f"an optimizer's state of type {cls.__name__} can't be split over the ranks",
        where=f"{cls.__module__}.{cls.__qualname__}.__tensor_flatten__",
        why=f"between steps each rank stores slices of its tensors, and plain data: it has a {type(value).__name__}",
        attempt="an optimizer whose state is plain tensors; or mesh='replicate', which splits no parameters",
    )


def _close(data: Mapping[str, Any]) -> Tensor:
    parts = {name: closed(value) for name, value in data.items() if name not in (_CLASS, *_FACTS)}
    module, _, name = data[_CLASS].rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None or not hasattr(cls, "__tensor_unflatten__"):
        raise InputError(
            f"an optimizer's state needs the tensor class {name}",
            where="optimizer.step()",
            why=f"{module} is not imported here, or has no such class",
            attempt=f"import {module}",
        )
    context, *sizes = (data[key] for key in _FACTS)
    context = pytree.tree_map(_as_dtype, context, is_leaf=_is_dtype)
    return cast(Tensor, cls.__tensor_unflatten__(parts, context, *map(torch.Size, sizes)))


def _is_dtype(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and [*value] == [_DTYPE]


def _as_dtype(value: object) -> object:
    return getattr(torch, value[_DTYPE]) if _is_dtype(value) else value
