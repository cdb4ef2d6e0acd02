"""Optimizers of sharded models, seen at their steps: those that train nothing, those that ranks step differently.

One hook of PyTorch's, for the steps of all optimizers, is set when a model is first sharded in a process. At each step
of an optimizer that has parameters of a sharded model, the model counts the step and what the optimizer's settings are;
the ranks compare that at the model's next call.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchshard.core.errors import InputError
from torchshard.weights.parameter import ShardedParameter, support_foreach
from torchshard.weights.slice_values import check_other_group, watch_slices
from torchshard.weights.state_slices import PLACE, StateSlice, shown_place


class Steps(Protocol):
    """A sharded model, as optimizers are to it."""

    def note_step(self, settings: str) -> None:
        """An optimizer steps this model's parameters."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """The model's parameters."""


_sources: Any = WeakIdKeyDictionary()
"""A parameter of an unsharded model -> a weak reference to the model that was sharded from it."""
_known: Any = weakref.WeakSet()
"""The optimizers that were seen before."""
_hooks: list[Any] = []


def watch(model: Steps, source: nn.Module) -> None:
    """From now on steps of optimizers that hold parameters of a sharded model, or of its source, are seen."""
    for parameter in source.parameters():
        _sources[parameter] = weakref.ref(model)
    if not _hooks:
        support_foreach()
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(lambda *ignored: watch_slices(True)))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _check_trained(optimizer, [p for p in parameters if p in _sources])
    sharded = [p for p in parameters if isinstance(p, ShardedParameter)]
    if optimizer not in _known:
        _known.add(optimizer)
        _meet(optimizer, parameters) if sharded else _check_unsharded(optimizer)
    if not sharded:
        return
    models = {id(model): model for model in (p.owner() for p in sharded) if model is not None}
    settings = f"{type(optimizer).__name__} {[_settings(group) for group in optimizer.param_groups]}"
    for model in models.values():
        model.note_step(settings)
    if type(optimizer).__module__.startswith("torch.optim."):
        watch_slices(False)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer's group says, as it is the same on every rank."""
    held = {name: value for name, value in group.items() if name != "params"}
    return {
        name: value.item() if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1 else value
        for name, value in held.items()
        if not isinstance(value, Tensor) or value.device.type == "cpu"
    }


def _check_trained(optimizer: Optimizer, stale: list[Tensor]) -> None:
    """The parameters of a model that was sharded since get no gradients: an optimizer of them trains nothing."""
    if not stale or any(p.grad is not None and bool(p.grad.any()) for p in stale):
        return
    models = [model for model in (_sources[p]() for p in stale) if model is not None]
    if any(p.grad is not None for model in models[:1] for p in model.parameters()):
        raise InputError(
            f"{type(optimizer).__name__} has the parameters of the unsharded model, which get no gradients",
            where=f"{type(optimizer).__name__}.step(), {len(stale)} parameters",
            why="it was made before ts.shard, which makes parameters of its own: the sharded model would never train",
            attempt="optimizer = AdamW(sharded.parameters(), ...), after ts.shard",
        )


_BY_ELEMENT = frozenset([
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "SparseAdam",
    "Lion", "ZeroRedundancyOptimizer",
])  # fmt: skip
"""Optimizers that treat each element by itself, so that steps of slices are slices of steps."""
_BY_TENSOR = frozenset([
    "Adafactor", "LBFGS", "Muon", "Lamb", "LAMB", "Lars", "LARS", "Shampoo", "DistributedShampoo", "SOAP", "NovoGrad",
    "AdaFactor", "Adalayer", "KFAC", "Sophia",
])  # fmt: skip
"""Optimizers that look at a whole matrix, or at the whole model."""


def _stepping(optimizer: Optimizer) -> str:
    """The class whose `step` an optimizer has."""
    return type(optimizer).step.__qualname__.rpartition(".step")[0].rpartition(".")[2]


def _check_kind(optimizer: Optimizer) -> None:
    """Refuses an optimizer whose steps of slices are other steps; warns of one that is not known."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if any(name in _BY_TENSOR for name in names):
        raise InputError(
            f"{names[0]} can't step slices of parameters",
            where=f"{names[0]}.step()",
            why="it computes from a whole matrix, or from the whole model: of a slice it would make another step",
            attempt="an optimizer that treats each element by itself: SGD, AdamW, ...; or keep those parameters whole "
            "with a plan of 'replicate' and give it these alone",
        )
    if _stepping(optimizer) not in _BY_ELEMENT:
        warnings.warn(
            f"{names[0]} is not known here: it steps a sharded model as the unsharded one if it treats each element by "
            "itself, as AdamW does, and not if it looks at whole matrices or norms, as Muon and LAMB do",
            stacklevel=2,
        )


def _meet(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Before the first step of an optimizer with slices: what it may not be, what it was loaded with, what it saves."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        group = next(p.group for p in parameters if isinstance(p, ShardedParameter))
        check_other_group(getattr(optimizer, "process_group", None), group, "ZeroRedundancyOptimizer")
    if any(isinstance(p, ShardedParameter) and p.is_split for p in parameters):
        _check_kind(optimizer)
    _check_all_loaded(optimizer)
    optimizer.register_load_state_dict_post_hook(_check_all_loaded)
    optimizer.register_state_dict_post_hook(_with_places)


def _check_unsharded(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        place = next((p for p in (getattr(value, PLACE, None) for value in state.values()) if p), None)
        if place is not None:
            raise InputError(
                f"the optimizer of an unsharded model was given a slice's state, {shown_place(place)} of {place[0]!r}",
                where="optimizer.load_state_dict",
                why=f"the parameter has shape {tuple(parameter.shape)}",
                attempt="a state dict of an unsharded model's optimizer; states of slices can't be joined yet",
            )


def _check_all_loaded(optimizer: Optimizer) -> None:
    by_element = _stepping(optimizer) in _BY_ELEMENT
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        _check_loaded(parameter, optimizer.state.get(parameter, {}), by_element=by_element)


def _check_loaded(parameter: Tensor, state: dict[str, Any], *, by_element: bool) -> None:
    if not isinstance(parameter, ShardedParameter):
        return
    own = parameter.place
    for name, value in state.items():
        place = getattr(value, PLACE, None)
        if place is not None and tuple(place[1:]) != own[1:]:
            raise InputError(
                f"the optimizer's {name} of {parameter.path!r} is another slice's",
                where="optimizer.load_state_dict",
                why=f"given: {shown_place(place)}; wanted: {shown_place(own)}",
                attempt="the optimizer's state dict that this rank saved, of the same plan on as many ranks",
            )
        if by_element and isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise InputError(
                f"the optimizer's {name} of {parameter.path!r} is of another shape than this rank's slice",
                where="optimizer.load_state_dict",
                why=f"given: {tuple(value.shape)}; wanted: {tuple(parameter.shape)}, {shown_place(own)}",
                attempt="the optimizer's state dict that this rank saved; an unsharded model's can't be split yet",
            )


def _with_places(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state dict, whose tensors of a slice's shape say what they are slices of."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = dict(state_dict["state"])
    for index, state in held.items():
        parameter = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        if isinstance(parameter, ShardedParameter) and parameter.is_split:
            shape, place = parameter.shape, parameter.place
            held[index] = {
                name: StateSlice.of(v, place) if isinstance(v, torch.Tensor) and v.shape == shape else v
                for name, v in state.items()
            }
    return {**state_dict, "state": held}
