"""Decides whether an attribute that forward assigns is harmless, or state that a later call reads.

A graph computes one call. It does not assign plain attributes (`self.cos = ...`, `self.step += 1`),
attributes of classes or variables of closures, so a later call of the graph could not read them.
That is harmless for a cache, or if no code reads them; for state, the later call's results would be
wrong. A rehearsal on fake tensors decides: after the first call, a second one must compute the same
as on its own, and assign no further values. The second call may be of another kind: an encoder's
call may assign an attribute that a decoder's call reads.

`torch.export` undoes assignments of plain attributes, with at most a warning (PyTorch 2.13). It
could replace this module if it reported a call's assignments, and which of them the next call
reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

# Sets `torch.compiler.is_exporting()`, as export does; there is no public way (PyTorch 2.13.0).
from torch._export.utils import _compiling_state_context
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# `torch.func.functional_call` can't wrap a block of several calls (PyTorch 2.13.0).
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.capture.attributes import Snapshot, Unknown, attributes, changed, describe
from torchshard.capture.conditions import Number
from torchshard.capture.looks import types_of_originals
from torchshard.capture.namespaces import Place
from torchshard.capture.recording import Recording, current_recording, use_recording
from torchshard.capture.replacements import replaced_functions
from torchshard.capture.signature import Leaves
from torchshard.capture.tools import without_tools
from torchshard.core.errors import CaptureError
from torchshard.core.fakes import new_fake_mode
from torchshard.core.modules import storage_id
from torchshard.rules import is_random


@dataclass(frozen=True)
class ModelCall:
    """One call of a model: arguments and modes."""

    call: Leaves
    modes: tuple[bool, ...]
    """Train or eval mode of every module; () for the current modes."""
    numbers: Sequence[Number] = ()
    """The numbers of the conditions that forward asks for, in order."""


def refuse_state(
    model: nn.Module, call: Leaves, places: Sequence[Place], numbers: Sequence[Number] = ()
) -> tuple[Place, ...]:
    """Rehearses two equal calls of a forward that assigns attributes.

    Returns:
        The places where forward leaves tensors that depend on its inputs or parameters: results
        that it does not return.

    Raises:
        CaptureError: the attributes that the first call assigns change the results of the second.
    """
    repeated = ModelCall(call, (), numbers)
    return refuse_state_between(model, repeated, repeated, places)


def refuse_state_between(
    model: nn.Module, first: ModelCall, second: ModelCall, places: Sequence[Place]
) -> tuple[Place, ...]:
    """Rehearses a call after another one, perhaps of another kind, which assigns these attributes.

    Returns:
        The places where the first call leaves tensors that depend on its inputs or parameters.

    Raises:
        CaptureError: the attributes that the first call assigns change the results of the second.
    """
    left: tuple[Place, ...] = ()
    try:
        with _on_fakes(model) as mode:
            before = _Rehearsed(model, first, mode)
            after = before if second is first else _Rehearsed(model, second, mode)
            why, left = _difference(model, before, after)
    except Exception as error:
        why = f"a rehearsal of a second call, which may read them, failed: {error}".splitlines()[0]
    if why:
        raise CaptureError(
            f"{type(model).__name__}'s forward keeps state in plain attributes, which a graph can't hold",
            where=", ".join(map(describe, places)),
            why=why,
            attempt="register_buffer for a tensor that one call leaves for the next; else pass it in and return it",
        )
    return left


def run_on_fakes(model: nn.Module, call: Leaves, numbers: Sequence[Number] = ()) -> None:
    """Runs forward once on fake tensors; restores attributes and modes afterwards."""
    with _on_fakes(model) as mode:
        _Rehearsed(model, ModelCall(call, (), numbers), mode).run()


@contextlib.contextmanager
def _on_fakes(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Makes the model's tensors fake inside the block, and its forward run as in a capture.

    A model may ask `torch.compiler.is_compiling()` to choose an op, as Hugging Face's mixtures of
    experts do.
    """
    snapshot, modes = Snapshot(model), [m.training for m in model.modules()]
    mode = new_fake_mode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    state: dict[str, Tensor] = {n: mode.from_tensor(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    try:
        _make_attributes_fake(model, mode)
        stateless = _reparametrize_module(model, state)
        types = types_of_originals(model, snapshot.visible)
        with _compiling_state_context(), mode, stateless, types, without_tools(), _without_seeding():
            yield mode
    finally:
        snapshot.restore()
        _set_modes(model, modes)


@contextlib.contextmanager
def _without_seeding() -> Iterator[None]:
    """Makes `torch.manual_seed` and the like do nothing in this thread.

    A custom Function may seed. Restoring the global generator afterwards would undo the draws of
    other threads.
    """
    with use_recording(Recording(inside_call=True)), replaced_functions():
        yield


def _set_modes(model: nn.Module, modes: Sequence[bool]) -> None:
    # Forward may have added or removed modules.
    for module, training in zip(model.modules(), modes, strict=False):
        module.training = training


class _Rehearsed:
    """A call on fake tensors."""

    def __init__(self, model: nn.Module, model_call: ModelCall, mode: FakeTensorMode) -> None:
        self._model, self._modes, self._numbers = model, model_call.modes, model_call.numbers
        device = next((p.device for p in model.parameters()), None)
        self.inputs = [_faked(tensor, mode, device) for tensor in model_call.call.tensors]
        self._rebuild = model_call.call.rebuild

    def run(self) -> None:
        """Calls the model with arguments that no earlier run has changed."""
        _set_modes(self._model, self._modes)
        recording = current_recording()
        assert recording is not None
        recording.rehearsed = iter(self._numbers)
        args, kwargs = self._rebuild(self.inputs)
        self._model.forward(*args, **kwargs)


def _faked(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None) -> Tensor:
    """A call's tensor as a fake one; a meta tensor gets the model's device."""
    if device is None or not tensor.is_meta:
        return mode.from_tensor(tensor)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _make_attributes_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    for module in model.modules():
        plain = {name: value for name, value in module.__dict__.items() if isinstance(value, Tensor)}
        module.__dict__.update({name: mode.from_tensor(tensor) for name, tensor in plain.items()})


class _Draws(TorchDispatchMode):
    """Adds the tensors that are drawn at random, and what ops compute from them, to those that derive from sources."""

    def __init__(self, derived: dict[int, Tensor]) -> None:
        super().__init__()
        self._derived = derived

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Runs an op."""
        result = func(*args, **(kwargs or {}))
        operands = (t for t in pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(t, Tensor))
        if is_random(func) or any(storage_id(t) in self._derived for t in operands):
            self._derived.update((storage_id(t), t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        return result


class _Trace(TorchFunctionMode):
    """Records the ops on tensors derived from some sources or drawn at random, and reads of watched tensors.

    Tensors are identified by their storage, so a view counts as its base.
    """

    def __init__(self, sources: Sequence[Tensor], watched: Sequence[Tensor] = ()) -> None:
        # These tensors stay referenced, so that no other storage can get the address of theirs.
        self.derived = {storage_id(t): t for t in sources}
        self._draws = _Draws(self.derived)
        self._watched = {storage_id(t) for t in watched}
        self.reads_watched = False
        self.ops: list[tuple[str, str]] = []
        """(name, the arguments other than tensors) of each op."""

    def __enter__(self) -> Self:
        """Begins to record."""
        self._draws.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends it."""
        super().__exit__(*raised)
        self._draws.__exit__(*raised)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        operands = [t for t in leaves if isinstance(t, Tensor)]
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        results += operands[:1] if name in ("__setitem__", "__set__") else []
        if results and any(storage_id(t) in self.derived for t in operands):
            self.reads_watched = self.reads_watched or any(storage_id(t) in self._watched for t in operands)
            self.ops.append((name, repr([x for x in leaves if not isinstance(x, Tensor)])))
            self.derived.update((storage_id(t), t) for t in results)
        return result


def _difference(model: nn.Module, first: _Rehearsed, second: _Rehearsed) -> tuple[str, tuple[Place, ...]]:
    """Compares a call on its own with the same call after another one.

    Returns:
        (why the second call differs after the first one, or ''; the places to which the first call
        assigns tensors of its own).
    """
    before = attributes(model)
    plain = [value for value in before.values() if isinstance(value, Tensor)]
    sources = [*first.inputs, *second.inputs, *model.parameters(), *_written_buffers(model, first), *plain]
    snapshot = Snapshot(model)
    with _Trace(sources) as alone:
        second.run()
    # The first call must not see the assignments of this run.
    snapshot.restore()
    with _Trace(sources) as first_trace:
        first.run()
    between = attributes(model)
    # A tensor that derives from no input, parameter or draw is equal in each call: it may be read.
    of_call = {
        place: value
        for place in changed(before, between)
        if isinstance(value := between.get(place), Tensor) and storage_id(value) in first_trace.derived
    }
    assigned = [buffer for buffer in model.buffers() if storage_id(buffer) in first_trace.derived]
    with _Trace([*sources, *assigned, *of_call.values()], list(of_call.values())) as second_trace:
        second.run()
    after = attributes(model)
    again = [place for place in changed(between, after) if not isinstance(after.get(place), (Tensor, Unknown))]
    why = ""
    if again and first is second:
        why = f"a second call with the same inputs changes {describe(again[0])} again"
    elif second_trace.reads_watched:
        why = "a later call reads what an earlier one has left there"
    elif second_trace.ops != alone.ops or (first is second and first_trace.ops != alone.ops):
        why = "a second call computes something else after the first than alone"
    return why, tuple(of_call)


def _written_buffers(model: nn.Module, call: _Rehearsed) -> list[Tensor]:
    """The buffers that a call writes to or replaces; to the call, all others are constants."""
    snapshot, buffers = Snapshot(model), dict(model.named_buffers())
    versions = {name: tensor._version for name, tensor in buffers.items()}
    call.run()
    current = dict(model.named_buffers())
    snapshot.restore()
    return [t for name, t in buffers.items() if current.get(name) is not t or t._version != versions[name]]
