"""A call's arguments and results as flat lists of tensors and back; what makes two calls the same to a graph.

Everything that is no tensor (None, numbers, flags) is part of the call's structure: a graph is captured for it. It is
compared by value. Objects that PyTorch's pytree does not know are taken apart by their attributes; functions are
compared by their code and what they hold, classes and modules by identity.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchshard.capture.own_code import cells_of
from torchshard.core.errors import InputError


@dataclass(frozen=True)
class Leaves:
    """Flat tensors and the way back."""

    tensors: tuple[Any, ...]
    """The tensors (and dynamic numbers), in order."""
    names: tuple[str, ...]
    """Where each stood: 'ids', 'batch.mask', 'past[0][1]'."""
    structure: Any
    """Everything else. A call's is hashable, and its text is the same on all ranks; equal structures flatten alike."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Tensors -> the object."""


_MOVING = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
)  # fmt: skip
_SAME = (type, nn.Module, torch.Generator, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class _Identity:
    """A leaf that equals itself alone; it is kept, so that no other can take its address."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        name = getattr(self.held, "__qualname__", getattr(self.held, "co_qualname", type(self.held).__qualname__))
        return f"the object {name}"


def _key(leaf: Any) -> Any:
    """What stands for a leaf that is no tensor: equal for equal leaves, of one type.

    Raises:
        InputError: nothing tells whether two such leaves are equal.
    """
    if isinstance(leaf, slice):
        return (slice, leaf.start, leaf.stop, leaf.step)
    if isinstance(leaf, _PLAIN):
        return (type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf)  # nan equals nan, 0.0 not -0.0
    if isinstance(leaf, set | frozenset):
        return (type(leaf), tuple(sorted((_key(item) for item in leaf), key=repr)))
    if isinstance(leaf, types.FunctionType):
        return _function_key(leaf)
    if isinstance(leaf, _SAME):
        return _Identity(leaf)
    raise InputError(
        f"an argument holds a {type(leaf).__qualname__}",
        where=type(leaf).__module__,
        why="its content would become part of the graph, and nothing tells when it is another",
        attempt="a tensor (torch.as_tensor of an array), numbers and strings, or a dict, list or dataclass of them",
    )


def _function_key(function: types.FunctionType) -> Any:
    """Functions of one code that hold equal values are equal: each call that passes a lambda makes a new one."""
    held = {**cells_of(function), "defaults": function.__defaults__, **(function.__kwdefaults__ or {})}
    try:
        values = tuple(map(_key, flatten(list(held.values())).structure[1]))
        tensors = tuple(map(_Identity, flatten(list(held.values())).tensors))
    except InputError:
        return _Identity(function)
    return (_Identity(function.__code__), tuple(held), values, tensors)


def _is_unknown_object(value: Any) -> bool:
    """An object of a Python class with attributes, none of pytree's own nor compared as it is."""
    known = (*_MOVING, *_PLAIN, *_SAME, set, frozenset, dict, list, tuple)
    made_plainly = getattr(type(value), "__new__", None) is object.__new__
    if isinstance(value, known) or type(value) in pytree.SUPPORTED_NODES or not made_plainly:
        return False
    return hasattr(value, "__dict__") or bool(_slots(value))


def _slots(value: Any) -> list[str]:
    names = [name for cls in type(value).__mro__ for name in cls.__dict__.get("__slots__", ())]
    return [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)]


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _slots(value)} | dict(getattr(value, "__dict__", {}))


def _open(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Unknown objects as dicts of their attributes, all the way down.

    Raises:
        InputError: an object holds itself.
    """

    def one(leaf: Any) -> Any:
        if not _is_unknown_object(leaf):
            return leaf
        if id(leaf) in within:
            raise InputError(
                f"an argument of type {type(leaf).__qualname__} holds itself",
                where=type(leaf).__module__,
                why="arguments are taken apart to find their tensors",
                attempt="pass the tensors themselves, or a dict of them",
            )
        return _Opened(type(leaf), _open(_fields(leaf), (*within, id(leaf))))

    return pytree.tree_map(one, value, is_leaf=_is_unknown_object)


class _Opened:
    """An object whose attributes lie open to pytree."""

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
    """Any nest of containers and objects as its tensors and the way back."""
    leaves, spec = _with_paths(value)
    opened = any(_is_unknown_object(leaf) for _, leaf in leaves)
    if opened:
        leaves, spec = _with_paths(_open(value))
    moving = [isinstance(leaf, _MOVING) for _, leaf in leaves]
    fixed = [None if moves else leaf for moves, (_, leaf) in zip(moving, leaves, strict=True)]
    names = [pytree.keystr(path) for moves, (path, _) in zip(moving, leaves, strict=True) if moves]

    def rebuild(tensors: Sequence[Any]) -> Any:
        rest = iter(tensors)
        full = [next(rest) if moves else leaf for moves, leaf in zip(moving, fixed, strict=True)]
        made = pytree.tree_unflatten(full, spec)
        return _close(made) if opened else made

    tensors = tuple(leaf for moves, (_, leaf) in zip(moving, leaves, strict=True) if moves)
    return Leaves(tensors, tuple(names), (repr(spec), fixed), rebuild)


def _with_paths(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """pytree's leaves with their paths; with numbers, where a registered class has no names for its parts."""
    try:
        return pytree.tree_flatten_with_path(value)
    except ValueError:
        leaves, spec = pytree.tree_flatten(value)
        return [((pytree.SequenceKey(i),), leaf) for i, leaf in enumerate(leaves)], spec


def _keyed(flat: Leaves) -> Leaves:
    spec, fixed = flat.structure
    return dataclasses.replace(flat, structure=(spec, tuple(map(_key, fixed))))


def check_results(results: Leaves) -> None:
    """What is no tensor in a result stays the same for every call of a graph.

    Raises:
        InputError: it may hold tensors, or be another at each call.
    """
    _keyed(results)


def unchanged(before: Leaves, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's arguments still hold what they held: forward has appended, assigned or taken out nothing."""
    try:
        after = _keyed(flatten((tuple(args), dict(kwargs))))
    except InputError:
        return False
    same = len(after.tensors) == len(before.tensors) and all(map(operator.is_, after.tensors, before.tensors))
    return same and after.structure == before.structure


def memory_order(tensor: Tensor) -> Any:
    """How a tensor lies in memory, apart from its sizes: on it depends whether a reshape is a view or a copy."""
    if tensor.is_contiguous():
        return None
    strides, shape = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    joined = tuple(strides[i] == strides[i + 1] * shape[i + 1] for i in range(tensor.ndim - 1))
    return order, joined, tuple(stride == 0 for stride in strides)


def flatten_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
    """A call's arguments, by the parameters of `model.forward`; `rebuild` gives (args, kwargs).

    Raises:
        InputError: `forward` does not take these arguments, or one holds what can't be compared.
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
    flat = _keyed(flatten((bound.args, bound.kwargs)))
    ordered = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [n for n, p in signature.parameters.items() if n in bound.arguments and p.kind in ordered]
    return dataclasses.replace(flat, names=tuple(_argument_name(name, positional) for name in flat.names))


def _argument_name(path: str, positional: Sequence[str]) -> str:
    """'[0][2]' of the pair (args, kwargs) is the third parameter's name, "[1]['mask']" is mask."""
    kind, rest = path[:3], path[3:]
    if not rest:
        return f"tensor {path[1:-1]} of the arguments"
    head, _, tail = rest[1:].partition("]")
    if kind == "[1]":
        return head.strip("'\"") + tail
    index = int(head)
    return (positional[index] if index < len(positional) else f"args[{index - len(positional)}]") + tail
