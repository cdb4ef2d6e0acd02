"""Traces only the first and the last of a model's equal layers, and repeats the first: for plans.

    export records     enter(x) ... leave(y)    repeated(y)    repeated(...)    enter(x) ... leave(y)
                       the first layer          the second     the third        the last
    `repeat` makes     the first layer's ops, with each layer's own parameters, in place of `repeated`

Tracing the layers takes most of a capture's time. Layers are equal if their modules have the same
classes, attributes, hooks and kinds of parameters, and are called with the same kinds of arguments.
An attribute may be the layer's own index. It is removed from `__dict__` while the first and the
last layer run, so a read is noticed, and then every layer is traced. Other differences, such as a
counter among the globals, show in the last layer: if its ops differ from the first layer's, the
model is exported again, layer by layer. Code that treats only middle layers differently, by their
identity, goes unnoticed. So graphs that run are captured layer by layer.

`torch.export` runs forward as Python code, and so runs every layer. This module replaces `forward`
of the layers' classes, and `nn.Module.__getattr__` to notice reads. It only saves time: if it
fails, `flat.capture` traces every layer.

PyTorch 2.13 has `torch.compiler.nested_compile_region`: it traces a region once, but only where the
user's code marks it, and by Dynamo, which capture avoids. This module could go if `torch.export`
(non-strict) found and reused equal regions by itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from torchshard.capture.attributes import attributes, changed
from torchshard.capture.equal_layers import PLAIN, Layer
from torchshard.capture.layer_calls import (
    Arguments,
    DifferentLayers,
    MarkedTensor,
    Marks,
    Outcome,
    Run,
    TensorType,
    Traced,
    call_key,
    tensors_by_id,
)
from torchshard.capture.recording import current_recording
from torchshard.capture.state_before import StateBefore
from torchshard.core.patches import Patch, Patches

T = TypeVar("T")


class Repeats:
    """The equal layers of a model during one capture."""

    def __init__(self, layers: Sequence[list[Layer]]) -> None:
        self.runs = [Run(run) for run in layers]
        self._layers = {id(vars(layer.module)): (run, layer) for run in self.runs for layer in run.layers}
        """Keyed by the layers' `__dict__`s, which export's proxies for modules share."""
        self.types: list[TensorType] = []
        """Number of a mark -> the type of its result."""
        self._is_inside = False
        self.hidden: dict[tuple[int, str], object] = {}
        """(id of a module's `__dict__`, attribute) -> its hidden value, for the running layer."""
        self.was_read = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Routes calls of the layers through this object.

        Raises:
            DifferentLayers: the last layer's call or results differ in kind from the first layer's.
        """
        previous, _local.repeats = getattr(_local, "repeats", None), self
        classes = dict.fromkeys(type(layer.module) for run in self.runs for layer in run.layers)
        try:
            with Patches(*(Patch(cls, "forward", _intercepted) for cls in classes)):
                yield
        finally:
            _local.repeats = previous
        for run in self.runs:
            if run.repeated and not self._are_alike(run.first, run.last):
                raise DifferentLayers(f"{run.layers[-1].path} is called in another way than {run.layers[0].path}")

    def call(
        self, module: nn.Module, own: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Calls a module's own forward, traces it between marks, or repeats the first layer."""
        run, layer = self._layers.get(id(vars(module)), (None, None))
        if run is None or layer is None or self._is_inside or run.is_off or id(layer) in run.called:
            return own(*args, **kwargs)
        run.called.add(id(layer))
        if not layer.is_as_before():
            return own(*args, **kwargs)
        call, is_last = call_key(args, kwargs), layer is run.layers[-1]
        if call is not None and run.first is not None and call == run.first.call and not is_last:
            seen = changed(run.first.attributes, attributes(layer.module))
            if {place[:2] for place in seen} <= set(layer.places):
                return self._repeated(run, run.first, layer, (args, kwargs))
            return own(*args, **kwargs)
        # Until a layer is repeated, a later one may become the first.
        if call is not None and (is_last or not run.repeated):
            return self._traced(run, layer, call, own, (args, kwargs))
        return own(*args, **kwargs)

    def _traced(
        self, run: Run, layer: Layer, call: Hashable, own: Callable[..., object], arguments: Arguments
    ) -> object:
        before = attributes(layer.module)
        (args, kwargs), enter = self._marked(arguments)
        kept, state = _kept(), StateBefore(layer.module)
        with self._running(layer):
            result = own(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(result)
        known = all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves)
        numbers = {key: number for number, key in enumerate(tensors_by_id(leaves))}
        ends = tuple(MarkedTensor(numbers[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        unbacked = any(isinstance(leaf, Tensor) and free_unbacked_symbols(leaf) for leaf in leaves)
        if self.was_read or state.assigned() or _kept() != kept or unbacked or not (known and numbers and enter):
            run.is_off = True
            if run.repeated:
                raise DifferentLayers(f"what {layer.path} does can't be seen in its ops alone")
        result, leave = self._marked(result)
        traced = Traced(layer, call, before, Outcome(spec, ends), enter, leave)
        if run.repeated:
            run.last = traced
        else:
            run.first = traced
        return result

    @contextlib.contextmanager
    def _running(self, layer: Layer) -> Iterator[None]:
        """Runs a layer while its own index is hidden."""
        self._is_inside, self.was_read = True, False
        self.hidden = {(id(vars(module)), name): vars(module).pop(name) for module, name in layer.numbers}
        try:
            with _READS:
                yield
        finally:
            for module, name in layer.numbers:
                vars(module).setdefault(name, self.hidden[id(vars(module)), name])
            self._is_inside, self.hidden = False, {}

    def _marked(self, value: T) -> tuple[T, Marks]:
        """Passes each tensor of a value through a mark in the graph."""
        leaves, spec = pytree.tree_flatten(value)
        tensors = tensors_by_id(leaves)
        made, marks = self._mark([[tensor] for tensor in tensors.values()], map(TensorType.of, tensors.values()))
        marked = dict(zip(tensors, made, strict=True))
        leaves = [marked[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, spec), marks

    def _mark(self, operands: Sequence[list[Tensor]], types: Iterable[TensorType]) -> tuple[list[Tensor], Marks]:
        first, made = len(self.types), []
        for taken, known in zip(operands, types, strict=True):
            self.types.append(known)
            made.append(MARK(taken, len(self.types) - 1))
        return made, range(first, len(self.types))

    def _repeated(self, run: Run, first: Traced, layer: Layer, arguments: Arguments) -> object:
        operands = [*tensors_by_id(pytree.tree_leaves(arguments)).values(), *layer.module.parameters()]
        types = [self.types[number] for number in first.leave]
        # to autograd, a result requires a gradient if any operand does
        without = [t for t in operands if not (t.requires_grad and torch.is_grad_enabled())]
        if len(without) < len(operands) and not any(known.requires_grad for known in types):
            raise DifferentLayers(f"{layer.path} has no results with a gradient")
        made, marks = self._mark([operands if known.requires_grad else without for known in types], types)
        if [t.requires_grad for t in made] != [known.requires_grad for known in types]:
            raise DifferentLayers(f"results of {layer.path} have no gradient")
        run.repeated[marks] = layer
        leaves = [made[leaf.number] if isinstance(leaf, MarkedTensor) else leaf for leaf in first.outcome.leaves]
        return pytree.tree_unflatten(leaves, first.outcome.spec)

    def _are_alike(self, first: Traced | None, last: Traced | None) -> bool:
        """Whether two layers were called in the same way and returned the same kinds of results."""
        if first is None or last is None or first.call != last.call or first.outcome != last.outcome:
            return False
        pairs = zip(first.leave, last.leave, strict=True)
        return all(self.types[one].key() == self.types[other].key() for one, other in pairs)


def _kept() -> tuple[int, int]:
    """The numbers of calls kept whole and of checkpoints that are recorded so far."""
    recording = current_recording()
    return (0, 0) if recording is None else (len(recording.calls), len(recording.checkpoints))


_local = threading.local()


def _current() -> Repeats | None:
    repeats: Repeats | None = getattr(_local, "repeats", None)
    return repeats


def _intercepted(original: object) -> object:
    own = cast(FunctionType, original)

    @functools.wraps(own)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        repeats, bound = _current(), own.__get__(self)
        return bound(*args, **kwargs) if repeats is None else repeats.call(self, bound, args, kwargs)

    return forward


def _noting_reads(original: object) -> object:
    get: Callable[[nn.Module, str], object] = original  # type: ignore[assignment]

    def __getattr__(self: nn.Module, name: str) -> object:
        repeats = _current()
        if repeats is not None and repeats.hidden and (id(vars(self)), name) in repeats.hidden:
            repeats.was_read = True
            return repeats.hidden[id(vars(self)), name]
        return get(self, name)

    return __getattr__


_READS = Patches(Patch(nn.Module, "__getattr__", _noting_reads))
"""Notes reads of hidden attributes."""


@torch.library.custom_op("torchshard::mark", mutates_args=(), schema="(Tensor[] tensors, int number) -> Tensor")
def _mark(tensors: Sequence[Tensor], number: int) -> Tensor:
    """Marks a value that enters or leaves a layer, or a result of a layer that is not traced."""
    raise NotImplementedError("torchshard::mark exists only in graphs that are being captured")


@_mark.register_fake
def _(tensors: Sequence[Tensor], number: int) -> Tensor:
    repeats = _current()
    assert repeats is not None
    return repeats.types[number].made()


_mark.register_autograd(lambda ctx, *grads: (None, None), setup_context=lambda ctx, inputs, output: None)
MARK: torch._ops.OpOverload = torch.ops.torchshard.mark.default
# Layers are found by the numbers of their marks, even of unused results: export must keep them all.
torch.fx.node.has_side_effect(MARK)
