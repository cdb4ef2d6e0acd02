"""What a forward leaves behind in its modules, beside buffers: a cache may be left, state is refused.

A graph computes one call. What that call assigns to a plain attribute (`self.cos = ...`, `self.step += 1`) is no part
of it, so a later call of the graph could not read it. That changes nothing where the attribute is a cache, or is never
read; elsewhere the later call's numbers would be wrong. Which it is, a rehearsal shows: on fake tensors, a second call
that finds what the first has left must compute the same and leave nothing new.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchshard.capture.signature import Leaves
from torchshard.errors import CaptureError

_OWN = frozenset(nn.Module().__dict__) | {"training"}
"""What every module has: parameters, buffers, submodules, hooks, the mode."""

_COMPARED = (int, float, str, bool, bytes, frozenset, tuple, list, dict, torch.Size, torch.dtype, torch.device)
Place = tuple[str, ...]
"""Module path, attribute, and keys within lists and dicts."""
Attributes = dict[Place, Any]


def attributes(model: nn.Module) -> Attributes:
    """The plain attributes of all modules, taken apart; functions left out."""
    found: Attributes = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in _OWN:
                _take_apart(found, (path, name), value, seen)
    return found


def _take_apart(found: Attributes, place: Place, value: Any, seen: set[int]) -> None:
    parts = _parts(value)
    if not parts:
        if not callable(value):
            found[place] = _settled(value)
    elif id(value) not in seen:
        seen.add(id(value))
        for key, item in parts.items():
            _take_apart(found, (*place, key), item, seen)


def _parts(value: Any) -> dict[str, Any] | None:
    """What a container or a plain object holds, by how one gets at it; None for what is no holder."""
    if isinstance(value, (Tensor, nn.Module, type, ModuleType)):
        return None
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size):
        return {f"[{i}]": item for i, item in enumerate(value)}
    if callable(value) or not hasattr(value, "__dict__"):
        return None
    return {f".{name}": item for name, item in value.__dict__.items()}


def _settled(value: Any) -> Any:
    """What tells later whether a value was changed in place: a copy of what may be."""
    if isinstance(value, set):
        return frozenset(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return value.tobytes()
    return value


def changed(before: Attributes, after: Attributes) -> list[Place]:
    """The places whose value is another."""
    places = dict.fromkeys([*before, *after])
    return [p for p in places if not (p in before and p in after and _same(before[p], after[p]))]


def _same(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, nn.Parameter):  # a tracer puts tensors of its own in the place of parameters
        return True
    if type(a) is not type(b) or type(a) not in _COMPARED:
        return False
    dynamic = isinstance(a, torch.Size) and any(isinstance(size, torch.SymInt) for size in (*a, *b))
    return not dynamic and bool(a == b)


def shown(place: Place) -> str:
    """'attn.cache', 'seen[3]'."""
    path, name, *keys = place
    return ".".join(filter(None, (path, name))) + "".join(keys)


class Kept:
    """The attributes of all modules, and what their containers and objects hold, as they are now, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._holders: dict[int, tuple[Any, Any]] = {}
        for module in model.modules():
            self._keep(module.__dict__)
            for value in list(module.__dict__.values()):
                self._keep_within(value)

    def _keep(self, holder: Any) -> None:
        self._holders[id(holder)] = (holder, copy.copy(holder))

    def _keep_within(self, value: Any) -> None:
        held = getattr(value, "__dict__", None)
        parts = _parts(value)
        if id(value) in self._holders or (parts is None and not isinstance(value, (set, dict, list, deque))):
            return
        if isinstance(value, (dict, list, set, deque)):
            self._keep(value)
        elif isinstance(held, dict):
            self._keep(held)
        self._holders.setdefault(id(value), (None, None))
        for item in (parts or {}).values():
            self._keep_within(item)

    def put_back(self) -> None:
        """Undoes what was assigned, added or deleted since."""
        for now, was in self._holders.values():
            if isinstance(now, dict):
                for name in [n for n in now if n not in was]:
                    del now[name]
                now.update(was)
            elif now is not None:
                now.clear()
                now.extend(was) if isinstance(now, (list, deque)) else now.update(was)


class _Reads(TorchFunctionMode):
    """Follows what is computed from some tensors: which ops with which numbers, and which storages hold the results."""

    def __init__(self, sources: Sequence[Tensor], watched: Sequence[Tensor] = ()) -> None:
        self.derived = {_storage(t): t for t in sources}
        self.watched = {_storage(t) for t in watched}
        self.read = False
        self.record: list[tuple[str, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        made += tensors[:1] if name in ("__setitem__", "__set__") else []
        if made and any(_storage(t) in self.derived for t in tensors):
            self.read = self.read or any(_storage(t) in self.watched for t in tensors)
            self.record.append((name, repr([x for x in leaves if not isinstance(x, Tensor)])))
            self.derived |= {_storage(t): t for t in made}
        return result


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def refuse_state(model: nn.Module, call: Leaves, places: Sequence[Place]) -> None:
    """Rehearses two calls of a model whose forward was seen to assign attributes; it is left as it was.

    Raises:
        CaptureError: what the first leaves behind changes what the second computes.
    """
    kept = Kept(model)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor) for tensor in call.tensors]
    state: dict[str, Tensor] = {n: mode.from_tensor(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    try:
        _make_fake(model, mode)
        with mode, _reparametrize_module(model, state):
            args, kwargs = call.rebuild(fakes)
            why = _rehearse(model, args, kwargs, fakes)
    except Exception as error:
        why = f"whether a second call reads it can't be told: {error}".splitlines()[0]
    finally:
        kept.put_back()
    if why:
        raise CaptureError(
            f"{type(model).__name__}'s forward keeps state in plain attributes, which a graph can't hold",
            where=", ".join(map(shown, places)),
            why=why,
            attempt="register_buffer for a tensor that one call leaves for the next; else pass it in and return it",
        )


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    for module in model.modules():
        plain = {name: value for name, value in module.__dict__.items() if isinstance(value, Tensor)}
        module.__dict__.update({name: mode.from_tensor(tensor) for name, tensor in plain.items()})


def _rehearse(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> str:
    """Why a second call is not the same as the first; '' where it is."""
    before = attributes(model)
    plain = [value for value in before.values() if isinstance(value, Tensor)]
    sources = [*inputs, *model.parameters(), *_written_buffers(model, args, kwargs), *plain]
    with _Reads(sources) as first:
        model.forward(*args, **kwargs)
    middle = attributes(model)
    left = [middle[place] for place in changed(before, middle) if isinstance(middle.get(place), Tensor)]
    of_call = [tensor for tensor in left if _storage(tensor) in first.derived]
    with _Reads([*sources, *of_call], of_call) as second:
        model.forward(*args, **kwargs)
    after = attributes(model)
    again = [place for place in changed(middle, after) if not isinstance(after.get(place), Tensor)]
    if again:
        return f"a second call with the same inputs changes {shown(again[0])} again"
    if second.read:
        return "a second call with the same inputs reads what the first has left there"
    if first.record != second.record:
        return "a second call with the same inputs, after the first has left that there, computes something else"
    return ""


def _written_buffers(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """What a forward writes to; what it only reads is a constant to it."""
    kept, buffers = Kept(model), dict(model.named_buffers())
    versions = {name: tensor._version for name, tensor in buffers.items()}
    model.forward(*args, **kwargs)
    now = dict(model.named_buffers())
    kept.put_back()
    return [t for name, t in buffers.items() if now.get(name) is not t or t._version != versions[name]]
