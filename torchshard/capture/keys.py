"""Keys of values other than tensors: equal for equal content, so that one graph serves equal structures.

Functions and classes, including the classes of objects, are compared by their code and the values
that it reads.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchshard.capture.looks import own_attributes, own_class
from torchshard.capture.namespaces import array_content, is_array
from torchshard.capture.visible import Visible, visible_from
from torchshard.core.errors import InputError
from torchshard.core.modules import version_of


@dataclass(frozen=True)
class ReferenceTo:
    """Refers to an object among a call's arguments, within the call's result."""

    keys: tuple[Hashable, ...]
    """The names and indices that lead to it from the positional arguments and the keywords."""


@dataclass(frozen=True)
class VaryingInt:
    """Replaces, in a structure, an integer that varies between calls."""


KEYED_BY_VALUE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, ReferenceTo, VaryingInt,
)  # fmt: skip
KEYED_BY_IDENTITY = (
    type, nn.Module, torch.Generator, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip


class _Identity:
    """A leaf that equals only itself; the reference keeps its id from being reused."""

    def __init__(self, leaf: object) -> None:
        self.leaf = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.leaf is other.leaf

    def __hash__(self) -> int:
        return id(self.leaf)

    def __repr__(self) -> str:
        # Without the address, which differs between ranks.
        name = getattr(self.leaf, "__qualname__", getattr(self.leaf, "co_qualname", type(self.leaf).__qualname__))
        return f"the object {name}"


def key_of(leaf: object) -> Hashable:
    """The key of a leaf other than a tensor: equal for equal leaves of one type.

    Raises:
        InputError: leaves of this type can't be compared.
    """
    # A slice is not hashable before Python 3.12.
    if isinstance(leaf, slice):
        return (slice, leaf.start, leaf.stop, leaf.step)
    if isinstance(leaf, float | complex):
        return (type(leaf), repr(leaf))  # nan equals nan, and 0.0 does not equal -0.0
    if isinstance(leaf, KEYED_BY_VALUE):
        return (type(leaf), leaf)
    if isinstance(leaf, set | frozenset):
        return (type(leaf), tuple(sorted((key_of(item) for item in leaf), key=repr)))
    if isinstance(leaf, types.FunctionType | types.MethodType | functools.partial | type | nn.Module):
        return code_key(leaf)
    if isinstance(leaf, KEYED_BY_IDENTITY):
        return _Identity(leaf)
    raise InputError(
        f"an argument holds a {type(leaf).__qualname__}",
        where=type(leaf).__module__,
        why="its content would become part of the graph, and two of these objects can't be compared",
        attempt="a tensor (torch.as_tensor of an array), numbers and strings, or a dict, list or dataclass of them",
    )


def code_key(value: object) -> Hashable:
    """The key of a function, class or other callable: equal for equal code that reads equal values.

    Identity would not do, because each call that passes a lambda makes a new function. Code alone
    would not do either, because it may read globals.
    """
    visible = visible_from(value)
    held = ((place, _key_of_held(one, visible)) for place, one in visible.values())
    return (_key_of_held(value, visible), *held)


def _key_of_held(value: object, visible: Visible) -> Hashable:
    if id(value) in visible.places:
        return (_Identity(type(value)), visible.places[id(value)])
    if isinstance(value, Tensor):
        return (_Identity(value), version_of(value))
    if is_array(value):
        return (type(value).__name__, array_content(value))
    if isinstance(value, types.FunctionType | types.MethodType | type | nn.Module):
        return _Identity(value)
    try:
        return key_of(value)
    except InputError:
        return _Identity(value)


def look_key(tensor: Tensor) -> Hashable:
    """The key of a tensor's class and attributes, as Python code sees them; None if plain."""
    cls, attributes = own_class(tensor), own_attributes(tensor)
    if cls is None and not attributes:
        return None
    visible = visible_from(attributes)
    return (cls, *((name, _key_of_held(value, visible)) for name, value in sorted(attributes.items())))


def memory_order(tensor: Tensor) -> Hashable:
    """The order of dims in memory, regardless of sizes; it decides whether a reshape is a view."""
    if tensor.is_contiguous():
        return None
    strides, shape = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    joined = tuple(strides[i] == strides[i + 1] * shape[i + 1] for i in range(tensor.ndim - 1))
    return order, joined, tuple(stride == 0 for stride in strides)
