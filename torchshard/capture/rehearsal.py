"""What a forward leaves behind beside buffers: a cache may be left, state is refused.

A graph computes one call. What that call assigns to a plain attribute (`self.cos = ...`, `self.step += 1`), to one of a
class or to a variable of a closure is no part of it, so a later call of the graph could not read it. That changes
nothing where it is a cache, or is never read; elsewhere the later call's numbers would be wrong. A rehearsal tells: on
fake tensors, a second call that finds what the first has left must compute the same and leave nothing new. The second
call may be of another kind: an encoder's call may leave what a decoder's call reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchshard.capture.signature import Leaves
from torchshard.capture.visible import Kept, Place, attributes, changed, shown
from torchshard.core.errors import CaptureError


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
    visit = Visit(call, ())
    refuse_between(model, visit, visit, places)


@dataclass(frozen=True)
class Visit:
    """One call of a model."""

    call: Leaves
    modes: tuple[bool, ...]
    """Train or eval, of every module; (): as they are."""


def refuse_between(model: nn.Module, first: Visit, second: Visit, places: Sequence[Place]) -> None:
    """Rehearses a call after another one, perhaps of another kind, which assigns these attributes.

    Raises:
        CaptureError: what the first leaves behind changes what the second computes.
    """
    try:
        with _on_fakes(model) as mode:
            before = _Rehearsed(model, first, mode)
            why = _rehearse(model, before, before if second is first else _Rehearsed(model, second, mode))
    except Exception as error:
        why = f"whether a second call reads it can't be told: {error}".splitlines()[0]
    if why:
        raise CaptureError(
            f"{type(model).__name__}'s forward keeps state in plain attributes, which a graph can't hold",
            where=", ".join(map(shown, places)),
            why=why,
            attempt="register_buffer for a tensor that one call leaves for the next; else pass it in and return it",
        )


def run_on_fakes(model: nn.Module, call: Leaves) -> None:
    """Runs forward once on fake tensors; the model is left as it was, random numbers are as forward leaves them."""
    with _on_fakes(model, keep_seed=False) as mode:
        _Rehearsed(model, Visit(call, ()), mode).run()


@contextlib.contextmanager
def _on_fakes(model: nn.Module, *, keep_seed: bool = True) -> Iterator[FakeTensorMode]:
    """While it is open, the model's parameters, buffers and plain tensors are fake."""
    kept, modes, seed = Kept(model), [m.training for m in model.modules()], torch.get_rng_state()
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    state: dict[str, Tensor] = {n: mode.from_tensor(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    try:
        _make_fake(model, mode)
        with mode, _reparametrize_module(model, state):
            yield mode
    finally:
        kept.put_back()
        _set_modes(model, modes)
        if keep_seed:
            torch.set_rng_state(seed)


def _set_modes(model: nn.Module, modes: Sequence[bool]) -> None:
    for module, training in zip(model.modules(), modes, strict=False):
        module.training = training


class _Rehearsed:
    """A call on fake tensors."""

    def __init__(self, model: nn.Module, visit: Visit, mode: FakeTensorMode) -> None:
        self._model, self._modes = model, visit.modes
        self.inputs = [mode.from_tensor(tensor) for tensor in visit.call.tensors]
        self._args, self._kwargs = visit.call.rebuild(self.inputs)

    def run(self) -> None:
        _set_modes(self._model, self._modes)
        self._model.forward(*self._args, **self._kwargs)


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    for module in model.modules():
        plain = {name: value for name, value in module.__dict__.items() if isinstance(value, Tensor)}
        module.__dict__.update({name: mode.from_tensor(tensor) for name, tensor in plain.items()})


def _rehearse(model: nn.Module, first: _Rehearsed, second: _Rehearsed) -> str:
    """Why the second call computes something else after the first than alone; '' where it does not."""
    before = attributes(model)
    plain = [value for value in before.values() if isinstance(value, Tensor)]
    sources = [*first.inputs, *second.inputs, *model.parameters(), *_written_buffers(model, first), *plain]
    alone = Kept(model)
    with _Reads(sources) as expected:
        second.run()
    alone.put_back()
    with _Reads(sources) as reads:
        first.run()
    middle = attributes(model)
    left = [middle[place] for place in changed(before, middle) if isinstance(middle.get(place), Tensor)]
    of_call = [tensor for tensor in left if _storage(tensor) in reads.derived]
    with _Reads([*sources, *of_call], of_call) as found:
        second.run()
    after = attributes(model)
    again = [place for place in changed(middle, after) if not isinstance(after.get(place), Tensor)]
    if again and first is second:
        return f"a second call with the same inputs changes {shown(again[0])} again"
    if found.read:
        return "a later call reads what an earlier one has left there"
    if found.record != expected.record:
        return "a second call, after the first has left that there, computes something else"
    return ""


def _written_buffers(model: nn.Module, call: _Rehearsed) -> list[Tensor]:
    """What a forward writes to; what it only reads is a constant to it."""
    kept, buffers = Kept(model), dict(model.named_buffers())
    versions = {name: tensor._version for name, tensor in buffers.items()}
    call.run()
    now = dict(model.named_buffers())
    kept.put_back()
    return [t for name, t in buffers.items() if now.get(name) is not t or t._version != versions[name]]
