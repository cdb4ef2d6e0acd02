"""A call's arguments and results as flat lists of tensors and back; what makes two calls the same to a graph.

Everything that is no tensor (None, numbers, flags) is part of the call's structure: a graph is captured for it.
Dataclasses that PyTorch's pytree does not know are taken apart by their fields.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchshard.errors import InputError


@dataclass(frozen=True)
class Leaves:
    """Flat tensors and the way back."""

    tensors: tuple[Any, ...]
    """The tensors (and dynamic numbers), in order."""
    names: tuple[str, ...]
    """Where each stood: 'ids', 'batch.mask', 'past[0][1]'."""
    structure: Any
    """Everything else, hashable by its repr; equal structures flatten alike."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Tensors -> the object."""


@dataclass(frozen=True)
class _Fields:
    """A dataclass instance that pytree does not know, as its fields."""

    kind: type
    spec: Any


def _is_unknown_dataclass(value: Any) -> bool:
    known = pytree.SUPPORTED_NODES
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value) not in known


def _open(value: Any) -> Any:
    """Unknown dataclasses as dicts of their fields, all the way down."""

    def one(leaf: Any) -> Any:
        if not _is_unknown_dataclass(leaf):
            return leaf
        fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        return _Opened(type(leaf), _open(fields))

    return pytree.tree_map(one, value, is_leaf=_is_unknown_dataclass)


class _Opened:
    """A dataclass whose fields lie open to pytree."""

    def __init__(self, kind: type, fields: Mapping[str, Any]) -> None:
        self.kind, self.fields = kind, fields

    def close(self) -> Any:
        made: Any = object.__new__(self.kind)
        for name, value in self.fields.items():
            object.__setattr__(made, name, _close(value))
        return made


pytree.register_pytree_node(
    _Opened,
    lambda o: (list(o.fields.values()), (o.kind, tuple(o.fields))),
    lambda values, context: _Opened(context[0], dict(zip(context[1], values, strict=True))),
    flatten_with_keys_fn=lambda o: (
        [(pytree.GetAttrKey(k), v) for k, v in o.fields.items()],
        (o.kind, tuple(o.fields)),
    ),
)


def _close(value: Any) -> Any:
    is_opened = lambda v: isinstance(v, _Opened)  # noqa: E731
    return pytree.tree_map(lambda v: v.close() if is_opened(v) else v, value, is_leaf=is_opened)


def flatten(value: Any) -> Leaves:
    """Any nest of containers and dataclasses as its tensors and the way back."""
    leaves, spec = pytree.tree_flatten_with_path(value)
    opened = any(_is_unknown_dataclass(leaf) for _, leaf in leaves)
    if opened:
        leaves, spec = pytree.tree_flatten_with_path(_open(value))
    moving = [isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) for _, leaf in leaves]
    fixed = [None if moves else leaf for moves, (_, leaf) in zip(moving, leaves, strict=True)]
    names = [pytree.keystr(path) for moves, (path, _) in zip(moving, leaves, strict=True) if moves]

    def rebuild(tensors: Sequence[Any]) -> Any:
        rest = iter(tensors)
        full = [next(rest) if moves else leaf for moves, leaf in zip(moving, fixed, strict=True)]
        made = pytree.tree_unflatten(full, spec)
        return _close(made) if opened else made

    tensors = tuple(leaf for moves, (_, leaf) in zip(moving, leaves, strict=True) if moves)
    return Leaves(tensors, tuple(names), (repr(spec), tuple(map(repr, fixed))), rebuild)


def flatten_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
    """A call's arguments, by the parameters of `model.forward`; `rebuild` gives (args, kwargs).

    Raises:
        InputError: `forward` does not take these arguments.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the model's forward does not take these arguments: {error}",
            where=f"{type(model).__name__}.forward{signature}",
            why=f"{len(args)} positional and the keywords {sorted(kwargs)} were given",
            attempt="the same arguments as the unsharded model's",
        ) from None
    flat = flatten((bound.args, bound.kwargs))
    ordered = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [n for n, p in signature.parameters.items() if n in bound.arguments and p.kind in ordered]
    return dataclasses.replace(flat, names=tuple(_argument_name(name, positional) for name in flat.names))


def _argument_name(path: str, positional: Sequence[str]) -> str:
    """'[0][2]' of the pair (args, kwargs) is the third parameter's name, "[1]['mask']" is mask."""
    kind, rest = path[:3], path[3:]
    head, _, tail = rest[1:].partition("]")
    if kind == "[1]":
        return head.strip("'\"") + tail
    index = int(head)
    return (positional[index] if index < len(positional) else f"args[{index - len(positional)}]") + tail
