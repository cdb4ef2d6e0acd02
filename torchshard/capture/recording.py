"""The record of one capture in its thread, and the temporary op for calls that are kept whole.

Each function that a capture intercepts asks `current_recording()` first. It is None in threads that
do not capture, and there the function calls PyTorch's original.

    torch.export records    torchshard.whole(tensors, sizes, number)
    `flat` replaces it with   recording.calls[number], called on the same operands
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx

from torchshard.capture.attributes import Snapshot
from torchshard.capture.conditions import Condition, Number
from torchshard.capture.signature import Leaves, flatten
from torchshard.capture.user_code import calling_line
from torchshard.core.autocast import autocasting, current_autocast
from torchshard.core.errors import CaptureError
from torchshard.core.modules import storage_id
from torchshard.core.rng_states import RngStates
from torchshard.custom_ops.whole import WholeCall, state_of

Size = int | torch.SymInt


@dataclass
class Recording:
    """The Python calls of one capture that a graph of ATen ops would lose."""

    calls: list[WholeCall] = field(default_factory=list)
    """The calls that are kept whole; the index is the number in their temporary op."""
    results: dict[int, Leaves] = field(default_factory=dict)
    """Number of a call -> its result on fake tensors."""
    checkpoints: dict[object, int] = field(default_factory=dict)
    """Activation checkpoint (identified by an object of its own) -> its number."""
    checkpoint: int | None = None
    """The number of the reentrant checkpoint that is running."""
    inside_call: bool = False
    """Whether a call that is kept whole is running; the calls inside it are not recorded."""
    asked_for_seed: bool = False
    """Whether the running call that is kept whole has called `torch.seed()`."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """The model's parameters and buffers, by all their names."""
    placeholders: dict[fx.Node, str] = field(default_factory=dict)
    """The nodes that export has made for parameters and buffers -> their names."""
    conditions: list[tuple[Condition, Number]] = field(default_factory=list)
    """The numbers known before the call that forward has asked for, in order."""
    rng_states: RngStates = field(default_factory=dict)
    """The generators' states before the capture, which seeds them."""
    rehearsed: Iterator[Number] | None = None
    """The numbers of `conditions`, during a rehearsal."""

    def run_checkpoint(self, function: Callable[..., object], args: Sequence[object]) -> object:
        """Runs the function of a reentrant checkpoint; inner checkpoints count as the outer one."""
        outer = self.checkpoint
        if outer is None:
            self.checkpoint = self.checkpoints.setdefault(object(), len(self.checkpoints))
        try:
            return function(*args)
        finally:
            self.checkpoint = outer


_local = threading.local()


def current_recording() -> Recording | None:
    """The recording of this thread's capture; None if this thread does not capture."""
    recording: Recording | None = getattr(_local, "recording", None)
    return recording


@contextlib.contextmanager
def use_recording(recording: Recording | None) -> Iterator[None]:
    """Makes a recording current in this thread. None suspends the capture's interception."""
    previous = current_recording()
    _local.recording = recording
    try:
        yield
    finally:
        _local.recording = previous


def in_captures(function: Callable[..., object]) -> Callable[[object], object]:
    """Builds a `Patch.replace`: when capturing, it calls `function(original, *args)`."""

    def replace(original: object) -> object:
        called = cast(Callable[..., object], original)

        @functools.wraps(called)
        def replacement(*args: object, **kwargs: object) -> object:
            return called(*args, **kwargs) if current_recording() is None else function(called, *args, **kwargs)

        return replacement

    return replace


# --- the temporary op ------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "torchshard::whole", mutates_args=(), schema="(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]"
)
def whole(tensors: Sequence[Tensor], sizes: Sequence[int], number: int) -> list[Tensor]:
    """The temporary op for a call that is kept whole, in a graph that is being captured."""
    raise NotImplementedError("torchshard::whole exists only in graphs that are being captured")


@whole.register_fake
def _(tensors: Sequence[Tensor], sizes: Sequence[int], number: int) -> list[Tensor]:
    recording = current_recording()
    assert recording is not None
    return _run_on_fakes(recording, number, tensors, sizes)


whole.register_autograd(lambda ctx, *grads: (None, None, None), setup_context=lambda ctx, inputs, output: None)
WHOLE: torch._ops.OpOverload = torch.ops.torchshard.whole.default
# The temporary op of a gradient hook has no users, and export must not remove it as dead code.
torch.fx.node.has_side_effect(WHOLE)


def record_call(
    recording: Recording, call: WholeCall, tensors: Sequence[Tensor], sizes: Sequence[Size]
) -> list[Tensor]:
    """Records a call and adds its temporary op to the graph; returns that op's fake results."""
    call.autocast = current_autocast()
    recording.calls.append(call)
    results: list[Tensor] = WHOLE(tensors, sizes, len(recording.calls) - 1)
    return results


def _run_on_fakes(recording: Recording, number: int, tensors: Sequence[Tensor], sizes: Sequence[Size]) -> list[Tensor]:
    """Runs a call on fake tensors, and refuses one that a graph could not repeat."""
    call = recording.calls[number]
    modules = call.modules.values()
    slots, snapshots = state_of(modules), [Snapshot(module) for module in modules]
    count = call.operands - len(sizes)
    recording.inside_call, recording.asked_for_seed = True, False
    try:
        with torch.no_grad(), autocasting(call.autocast), _Effects(tensors) as effects:
            for (tensor_dict, name, _), tensor in zip(slots, tensors[count:], strict=True):
                tensor_dict[name] = tensor
            args, kwargs = call.rebuild([*tensors[:count], *sizes])
            before = flatten((args, kwargs)).structure[0]
            result = flatten(call.run(args, kwargs))
    finally:
        recording.inside_call = False
        # Each later call runs on its own modules and assigns the same attributes there.
        for snapshot in snapshots:
            snapshot.restore()
    if effects.writes or flatten((args, kwargs)).structure[0] != before:
        raise cannot_keep_whole(call.function, "it writes to a tensor, list or dict among its arguments")
    call.uses_rng, call.seeds = call.uses_rng or effects.uses_rng or recording.asked_for_seed, recording.asked_for_seed
    call.single = len(result.tensors) == 1
    recording.results[number] = result
    # A result may be an operand itself, which a custom op must not return.
    return [tensor.clone() for tensor in result.tensors]


class _Effects(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes whether an op draws random numbers, or writes to one of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.uses_rng = self.writes = False
        self._storages = {storage_id(tensor) for tensor in tensors}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.uses_rng = self.uses_rng or torch.Tag.nondeterministic_seeded in func.tags
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                self.writes = self.writes or storage_id(value) in self._storages
        return func(*args, **(kwargs or {}))


def cannot_keep_whole(function: object, why: str) -> CaptureError:
    """Builds the error for a custom Function or hook that can't be one op of a graph."""
    return CaptureError(
        f"{getattr(function, '__name__', function)} can't be kept whole in a graph",
        where=calling_line() or str(function),
        why=why,
        attempt="an autograd.Function that takes all that it uses as arguments and returns all that it computes",
    )
