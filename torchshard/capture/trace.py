"""Runs a model once under `torch.export`, on fake tensors; refuses results that don't fit a graph.

The result is an ExportedProgram of ATen ops, from which `flat` makes the graph for all passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.export import Dim, ExportedProgram

# `_DimHint` is the type of `Dim.AUTO` and `Dim.DYNAMIC` (PyTorch 2.13.0).
from torch.export.dynamic_shapes import _DimHint
from torch.utils import _pytree as pytree

from torchshard.capture.attributes import Snapshot, attributes, changed
from torchshard.capture.call_arguments import is_unchanged
from torchshard.capture.carried import Arguments, Changes
from torchshard.capture.conditions import Condition, Number
from torchshard.capture.entry_points import as_plain_module, replace_forward
from torchshard.capture.equal_layers import calls_recur, equal_layers
from torchshard.capture.equal_sizes import equal_sizes, fixed_sizes
from torchshard.capture.export_errors import capture_error
from torchshard.capture.function_mode import CaptureMode, Slots, slots_of
from torchshard.capture.generators import changed_generators, check_generators
from torchshard.capture.known_numbers import note_placeholders
from torchshard.capture.layer_calls import DifferentLayers
from torchshard.capture.looks import look_like, types_of_originals
from torchshard.capture.modes import note_modes
from torchshard.capture.namespaces import Place
from torchshard.capture.quiet import quiet
from torchshard.capture.recording import Recording, current_recording, use_recording
from torchshard.capture.rehearsal import refuse_state, run_on_fakes
from torchshard.capture.repeated import Repeats
from torchshard.capture.replacements import replaced_functions
from torchshard.capture.signature import Leaves, check_results
from torchshard.capture.state_before import StateBefore, without_exports_own
from torchshard.capture.tools import without_tools
from torchshard.capture.whole_calls import INTERCEPTED_FUNCTIONS
from torchshard.core.errors import CaptureError, InputError, in_short
from torchshard.core.fakes import modes_without_cache
from torchshard.core.modules import named_tensors
from torchshard.core.rng_states import rng_states
from torchshard.core.user_files import warn
from torchshard.custom_ops.whole import WholeCall


@dataclass(frozen=True)
class Traced:
    """One call of a model."""

    exported: ExportedProgram
    result: Leaves
    """Forward's result, and the values that it left in its arguments."""
    changes: Changes
    """Where the arguments store the values that forward left in them."""
    assigned: tuple[Place, ...]
    """The attributes that forward assigned."""
    left: tuple[Place, ...]
    """Assigned attributes with tensors that depend on forward's inputs or parameters."""
    repeats: Repeats | None
    """The equal layers that were repeated; None if every layer was traced."""
    whole: tuple[WholeCall, ...] = ()
    """The calls that are kept whole; the index is the number in their temporary op."""
    conditions: tuple[tuple[Condition, Number], ...] = ()
    """The numbers known before the call that it depends on, and their values in this call."""


def trace(model: nn.Module, call: Leaves, dynamic: Sequence[frozenset[int]], *, repeating: bool) -> Traced:
    """Exports one call; leaves the model as it was.

    Args:
        dynamic: the dims of each tensor that may vary between calls, if the model allows it.
        repeating: whether only the first and the last of equal layers are traced.

    Raises:
        DifferentLayers: layers that were taken to be equal are not.
        CaptureError: the model can't be captured; the error names the line and an alternative.
        InputError: the model does not accept an argument.
    """
    state = named_tensors(model)
    recording = Recording(state=state, rng_states=rng_states(state.values()))
    forward = _FlatForward(model, call, repeating=repeating)
    try:
        with (
            changed_generators() as generators,
            use_recording(recording),
            INTERCEPTED_FUNCTIONS,
            replaced_functions(),
            quiet(),
            # The cache of fake results saves time only if calls recur.
            nullcontext() if forward.calls_recur else modes_without_cache(),
            without_tools(),
            saved_tensors_hooks(lambda t: t, lambda t: t),  # hides the capture from a checkpoint around the call
        ):
            exported = _export(as_plain_module(model), call, dynamic)
    finally:
        forward.snapshot.restore()
    numbers = [number for _, number in recording.conditions]
    check_generators(model, generators, lambda: run_on_fakes(model, call, numbers))
    left = refuse_state(model, call, forward.assigned, numbers) if forward.assigned else ()
    assert forward.result is not None
    whole, conditions = tuple(recording.calls), tuple(recording.conditions)
    return Traced(exported, forward.result, forward.changes, forward.assigned, left, forward.repeats, whole, conditions)


class _FlatForward:
    """The forward that export runs: the call's tensors -> the tensors of the model's result."""

    def __init__(self, model: nn.Module, call: Leaves, *, repeating: bool) -> None:
        self._model, self._call = model, call
        self._layers = equal_layers(model) if repeating else []
        self.calls_recur = calls_recur(model, self._layers)
        self.repeats: Repeats | None = None
        self.snapshot = Snapshot(model)
        self._before, self._slots = attributes(model), slots_of(model)
        self.result: Leaves | None = None
        self.changes = Changes()
        self.assigned: tuple[Place, ...] = ()
        self._own_entry_points = replace_forward(model, self._run)

    def _run(self, *tensors: Tensor) -> list[Tensor]:
        count = len(self._call.tensors)
        call = dataclasses.replace(self._call, tensors=tensors[:count])
        args, kwargs = call.rebuild(tensors[:count], numbers=tensors[count:])
        arguments = Arguments(args, kwargs)
        recording = current_recording()
        assert recording is not None
        recording.checkpoints.clear()  # a model may be exported twice
        self.repeats = Repeats(self._layers) if self._layers else None
        state = StateBefore(self._model)
        note_placeholders(recording, {name: _stored(self._slots, tensor) for name, tensor in recording.state.items()})
        for tensor in recording.state.values():
            look_like(tensor, _stored(self._slots, tensor))
        for tensor, stand_in in zip(self._call.tensors, tensors, strict=False):
            look_like(tensor, stand_in)
        with self._own_entry_points(), without_exports_own():
            repeated = nullcontext() if self.repeats is None else self.repeats.installed()
            try:
                types = types_of_originals(self._model, self.snapshot.visible)
                with CaptureMode(recording, self._slots), note_modes(), repeated, types:
                    value = _called(self._model, args, kwargs)
                    self.result, self.changes = arguments.with_changes(value, self._call.positional)
                    results = state.write_assigned(self.result.tensors)
                places = [*state.modes_changed(), *changed(self._before, attributes(self._model))]
            finally:
                state.restore()
            # Export would warn of tensors that are left in attributes.
            self.snapshot.restore_attributes()
        self.assigned = tuple(dict.fromkeys([*self.assigned, *places]))
        _check_results(self._model, self.result)
        if not self.changes.holders and not is_unchanged(call, args, kwargs):
            raise _written_arguments(self._model)
        return results


class _RaisedError(Exception):
    """Carries forward's error through export, which prints the graph for some RuntimeErrors."""


def _called(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    try:
        # `_call_impl` runs hooks and forward, but unlike `__call__` no compiled or overridden call (PyTorch 2.13.0).
        return nn.Module._call_impl(model, *args, **kwargs)
    except RuntimeError as error:
        raise _RaisedError from error


def _stored(slots: Slots, tensor: Tensor) -> Tensor:
    """The tensor that now replaces a parameter or buffer of the model."""
    holder, name = slots[id(tensor)]
    return cast(Tensor, holder[name])


def _check_results(model: nn.Module, results: Leaves) -> None:
    try:
        check_results(results)
    except InputError as error:
        cls = str(error).splitlines()[0].rpartition(" ")[2]
        raise CaptureError(
            f"forward returns a {cls}, which can't be taken apart",
            where=f"{type(model).__name__}.forward",
            why="a graph gives tensors, and puts them into containers that PyTorch's pytree knows or plain objects",
            attempt="a dict, list, tuple or dataclass; or torch.utils._pytree.register_pytree_node for the class",
        ) from None


def _written_arguments(model: nn.Module) -> CaptureError:
    return CaptureError(
        "forward writes to its arguments",
        where=f"{type(model).__name__}.forward",
        why="a list, dict or object among them has other content afterwards; a graph only returns results",
        attempt="return the new values; with Hugging Face models use_cache=False",
    )


# --- export ----------------------------------------------------------------------------------------------------------


Shapes = list[dict[int, "Dim | _DimHint"]]
"""For each input: dim -> whether and how its size may vary."""


def _export(model: nn.Module, call: Leaves, dynamic: Sequence[frozenset[int]]) -> ExportedProgram:
    """Exports with dynamic sizes; if that fails (a dict keyed by a size), with this call's."""
    failure: Exception | None = None
    for sizes in (Dim.AUTO, Dim.STATIC) if any(dynamic) else (Dim.STATIC,):
        shapes: Shapes = [dict.fromkeys(dims, sizes) for dims in dynamic]
        try:
            exported = _export_with(model, call, shapes)
            if failure is not None:
                _warn_of_fixed_sizes(model, failure)
            return _with_equal_sizes(model, call, shapes, exported)
        except (CaptureError, InputError, DifferentLayers):
            raise
        except Exception as error:
            failure = error
    assert failure is not None
    raise capture_error(model, failure) from failure


def _export_with(model: nn.Module, call: Leaves, shapes: Shapes) -> ExportedProgram:
    inputs = (*(_example(t, model) for t in call.tensors), *call.numbers)
    named = {"tensors": (*shapes, *(Dim.AUTO for _ in call.numbers))} if inputs else None
    try:
        exported = torch.export.export(model, inputs, strict=False, dynamic_shapes=named)
    except _RaisedError as raised:
        own = raised.__cause__
    else:
        _refuse_transforms(exported)
        return exported
    assert own is not None
    raise own  # not in the block, so that its context stays forward's


def _with_equal_sizes(model: nn.Module, call: Leaves, shapes: Shapes, exported: ExportedProgram) -> ExportedProgram:
    """Exports again if inputs' sizes must be equal for the model to run, or are fixed.

    An example is two batches, one viewed by the other's size. Export leaves equality open: its
    graph has sizes such as `8 * b // a`, which can't be split. It also does not deduce which sizes
    are fixed because their product is.
    """
    groups, fixed = equal_sizes(exported), fixed_sizes(exported)
    if not groups and not fixed:
        return exported
    shared = [dict(shape) for shape in shapes]
    for number, dims in enumerate(groups):
        for index, dim in dims:
            shared[index][dim] = Dim(f"size{number}")
    for index, dim in fixed:
        shared[index][dim] = Dim.STATIC
    try:
        return _export_with(model, call, shared)
    except Exception:  # the sizes need not be equal
        return exported


def _warn_of_fixed_sizes(model: nn.Module, failure: Exception) -> None:
    warn(
        f"{type(model).__name__} can't be captured for varying batch and sequence sizes: it is captured again for "
        f"each pair of sizes, which takes seconds ({in_short(failure)[:200]})"
    )


def _refuse_transforms(exported: ExportedProgram) -> None:
    """Refuses remains of a torch.func transform: wrapped tensors, constants without values."""
    found = {node.name: node.meta.get("val") for node in exported.graph.nodes} | exported.constants
    left = [name for name, value in found.items() if any(map(_is_wrapped, pytree.tree_leaves(value)))]
    if not any(map(_is_on_meta, exported.state_dict.values())):
        left += [name for name, value in exported.constants.items() if _is_on_meta(value)]
    if left:
        # A plain exception: `capture_error` turns it into an error, as it does with export's own.
        raise RuntimeError(f"a functorch transform inside the model, at {left[0]}")


def _is_wrapped(value: object) -> bool:
    # `is_functorch_wrapped_tensor`: no public question for a tensor of a transform (PyTorch 2.13.0).
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _is_on_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _example(tensor: Tensor, model: nn.Module) -> Tensor:
    """A new tensor for export, on the model's device: two arguments may be one tensor."""
    device = next((p.device for p in model.parameters()), tensor.device)
    example = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return example.requires_grad_(tensor.requires_grad)
