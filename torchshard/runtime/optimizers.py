"""Observes the steps of optimizers of sharded models, and refuses optimizers that would step slices wrongly.

At each step of an optimizer with parameters of a sharded model, the model counts the step and notes
the optimizer's settings; the ranks compare both at the model's next call. Before an optimizer's
first step, two checks run: steps on slices must equal slices of the full step, and the optimizer's
state must belong to the slices that it steps.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

# `torch.compiler.set_stance` asks this too, whether it is called in a compiled region; no public name (PyTorch 2.13.0).
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchshard.core.errors import InputError
from torchshard.runtime.optimizer_classes import check_class_of_slices, parameters_of
from torchshard.runtime.optimizer_states import UNMARKED, check_states, mark_state_dicts, mark_states, unmark_states
from torchshard.weights.local_slice import LocalSlice, unwatched, watched
from torchshard.weights.over_ranks import check_other_group
from torchshard.weights.parameter import ShardedParameter, support_foreach
from torchshard.weights.place import is_same_slice, place_of, place_text


class StepCounter(Protocol):
    """A sharded model, as optimizers see it."""

    def note_step(self, settings: str) -> None:
        """Counts a step of this model's parameters by an optimizer with these settings."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """The model's parameters."""


class _StepObserver:
    """Observes the steps of all optimizers of this process.

    A model can't know which optimizers will get its parameters, and PyTorch's only hooks for future
    optimizers are process-wide. So each process has one observer. Its hooks are set when a model is
    first sharded, and stay: a slice's state may be loaded into an unsharded optimizer after the
    sharded model is gone. Its references are weak, so models, parameters and optimizers are freed
    as usual.
    """

    def __init__(self) -> None:
        self._sharded_from = WeakIdKeyDictionary()
        """A parameter of an unsharded model -> a weak reference to the model sharded from it."""
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The optimizers that passed the checks before their first step."""
        self._has_hooks = False

    def observe(self, model: StepCounter, source: nn.Module) -> None:
        for parameter in source.parameters():
            self._sharded_from[parameter] = weakref.ref(model)
        if not self._has_hooks:
            support_foreach()
            register_optimizer_step_pre_hook(self._before_step)
            _wrap_steps()
            self._has_hooks = True

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        parameters = parameters_of(optimizer)
        self._check_trained(optimizer, [p for p in parameters if p in self._sharded_from])
        slices = [p for p in parameters if isinstance(p, ShardedParameter)]
        if optimizer not in self._checked:
            _before_first_step(optimizer, slices) if slices else _check_unsharded(optimizer)
            self._checked.add(optimizer)  # after the checks: a step after a caught error is checked again
        if not slices:
            return
        with unwatched():
            _check_places(optimizer, slices)
        settings = f"{type(optimizer).__name__} {[_settings(group) for group in optimizer.param_groups]}"
        models = {id(model): model for model in (p.owner() for p in slices) if model is not None}
        for model in models.values():
            cast(StepCounter, model).note_step(settings)

    def _check_trained(self, optimizer: Optimizer, stale: Sequence[Tensor]) -> None:
        """Refuses an optimizer of parameters that get no gradients, because their model was sharded afterwards.

        Only gradients in the sharded model prove that the user trains that model, and not the
        unsharded one.
        """
        if not stale or any(p.grad is not None and bool(p.grad.any()) for p in stale):
            return
        references = (self._sharded_from[p] for p in stale)
        models = [model for model in (reference() for reference in references) if model is not None]
        if any(p.grad is not None for model in models[:1] for p in model.parameters()):
            raise InputError(
                f"{type(optimizer).__name__} has the parameters of the unsharded model, which get no gradients",
                where=f"{type(optimizer).__name__}.step(), {len(stale)} parameters",
                why="it was made before ts.shard, which makes parameters of its own: the sharded model would never "
                "train",
                attempt="optimizer = AdamW(sharded.parameters(), ...), after ts.shard",
            )


def _check_places(optimizer: Optimizer, slices: Sequence[ShardedParameter]) -> None:
    """Refuses gradients and state that are another rank's saved slices; assigning them raises no error."""
    for parameter in slices:
        for name, value in (("grad", parameter.grad), *optimizer.state.get(parameter, {}).items()):
            if isinstance(value, LocalSlice) and value.is_stored and not is_same_slice(value.place, parameter.place):
                raise InputError(
                    f"{name!r} of {parameter.path!r} is another slice than this rank's",
                    where=f"{type(optimizer).__name__}.step()",
                    why=f"it is the slice {place_text(value.place)}, and this rank holds {place_text(parameter.place)}",
                    attempt="each rank's own, as ts.save, ts.load and state dicts keep them",
                )


_OBSERVER = _StepObserver()


def observe_steps(model: StepCounter, source: nn.Module) -> None:
    """Starts to observe optimizers that step parameters of a sharded model or of its source."""
    _OBSERVER.observe(model, source)


def _wrap_steps() -> None:
    """Makes PyTorch's own optimizers step slices unwatched.

    Hooks can't do this: the user's hooks and closure run between them, and no hook runs after a
    step that raises. So the classes' own functions are wrapped, inside PyTorch's hooks. A class
    without a wrapper steps correctly too, but slower.
    """
    for cls in vars(torch.optim).values():
        if not (isinstance(cls, type) and issubclass(cls, Optimizer) and "step" in vars(cls)):
            continue
        step = vars(cls)["step"]
        is_hooked = getattr(step, "hooked", False)  # PyTorch adds its hooks when it makes a class's first optimizer
        own = step.__wrapped__ if is_hooked else step
        if getattr(own, "hooked", False):
            continue  # another library's wrapper is around the hooks
        wrapped: Any = _unwatched_step(own)
        if is_hooked:
            wrapped = Optimizer.profile_hook_step(wrapped)
            wrapped.hooked = True
        cls.step = wrapped  # type: ignore[method-assign]


_STEPPED = frozenset([ShardedParameter, nn.Parameter, Tensor])
"""The classes of tensors that PyTorch's optimizers may step unwatched; others may rely on their own code."""


def _unwatched_step(step: Callable[..., object]) -> Callable[..., object]:
    """Wraps a step to take slices as plain tensors: PyTorch's optimizers handle them, and watching is slow."""

    @functools.wraps(step)
    def step_unwatched(optimizer: Optimizer, *args: object, **kwargs: object) -> object:
        is_pytorchs = type(optimizer).__module__.startswith("torch.optim.")  # a user's subclass may override methods
        if not is_pytorchs or any(type(p) not in _STEPPED for p in parameters_of(optimizer)):
            return step(optimizer, *args, **kwargs)
        args = tuple(watched(arg) if callable(arg) else arg for arg in args)
        kwargs = {name: watched(arg) if callable(arg) else arg for name, arg in kwargs.items()}
        if _is_compiled():
            unmark_states(optimizer)
        with unwatched():
            return step(optimizer, *args, **kwargs)

    return step_unwatched


def _is_compiled() -> bool:
    """Returns whether `torch.compile` compiles the functions called from here."""
    return get_eval_frame_callback() not in (None, False)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if optimizer in UNMARKED and not _is_compiled():
        UNMARKED.discard(optimizer)
        mark_states(optimizer)


def _settings(group: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of an optimizer's group, in a form that is equal on every rank.

    It omits tensors on other devices, because reading them would wait for the device.
    """
    settings: dict[str, object] = {}
    for name, value in group.items():
        if name == "params" or (isinstance(value, Tensor) and value.device.type != "cpu"):
            continue
        is_number = isinstance(value, Tensor) and value.numel() == 1
        settings[name] = _without_address(value.item() if isinstance(value, Tensor) and is_number else value)
    return settings


def _without_address(value: object) -> object:
    """Returns a setting as values with the same text on every rank; for other objects, the type's name."""
    if isinstance(value, (list, tuple)):
        return [_without_address(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _without_address(item) for key, item in value.items()}
    has_text = isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, Tensor, enum.Enum))
    return value if has_text else type(value).__qualname__


def _before_first_step(optimizer: Optimizer, slices: Sequence[ShardedParameter]) -> None:
    """Checks an optimizer of slices, and adds the hooks that check and mark its state dicts."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        groups = {group.name: group for p in slices for group in (p.ranks.group, *p.ranks.groups_of(p.sharding))}
        check_other_group(getattr(optimizer, "process_group", None), groups.values(), "ZeroRedundancyOptimizer")
    check_class_of_slices(optimizer)
    check_states(optimizer)
    mark_state_dicts(optimizer)
    marking = optimizer.register_step_post_hook(_after_step)
    # `_optimizer_step_post_hooks`: `register_step_post_hook` can only append a hook (PyTorch 2.13.0).
    hooks = cast("OrderedDict[int, object]", optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(marking.id, last=False)  # before users' hooks, which may read the states
    UNMARKED.add(optimizer)


def _check_unsharded(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        place = next(filter(None, map(place_of, state.values())), None)
        if place is not None:
            raise InputError(
                f"the optimizer of an unsharded model was given a slice's state, {place_text(place)} of {place[0]!r}",
                where="optimizer.load_state_dict",
                why=f"the parameter has shape {tuple(parameter.shape)}",
                attempt="a state dict of an unsharded model's optimizer; states of slices can't be joined yet",
            )
