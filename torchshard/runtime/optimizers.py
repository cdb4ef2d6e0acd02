"""Observes the steps of optimizers of sharded models, and makes them equal steps of the unsharded model.

At each step of an optimizer with parameters of a sharded model, the model counts the step and notes
the optimizer's settings; the ranks compare both at the model's next call. A step that reads more than
single elements runs on full parameters (`full_steps`). Before an optimizer's first step, its state must
belong to the slices that it steps.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchshard.core.errors import InputError
from torchshard.runtime.compiled_regions import is_compiled, uncompiled
from torchshard.runtime.full_steps import FullStep
from torchshard.runtime.optimizer_classes import Reach, known_reach, parameters_of
from torchshard.runtime.optimizer_states import (
    UNMARKED,
    check_states,
    is_state,
    mark_state_dicts,
    mark_states,
    unmark_states,
)
from torchshard.runtime.optimizer_trials import Ops, agreed_reach
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
            _wrap_pytorchs()
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


def _wrap_pytorchs() -> None:
    """Wraps the steps of PyTorch's own optimizers.

    Hooks can't do this: the user's hooks and closure run between them, and no hook runs after a
    step that raises. So the classes' own functions are wrapped, inside PyTorch's hooks. A class
    without a wrapper steps correctly too, but slower.
    """
    for cls in vars(torch.optim).values():
        if isinstance(cls, type) and issubclass(cls, Optimizer) and "step" in vars(cls):
            _wrap(cls, "step")


_STEPS = ("step", "first_step", "second_step")
"""The methods that update parameters; users of SAM call the last two instead of `step`."""


def wrap_steps(optimizer: Optimizer) -> None:
    """Wraps the steps of an optimizer's class and its bases."""
    for name in _STEPS:
        for cls in type(optimizer).__mro__:
            if isinstance(vars(cls).get(name), FunctionType) and issubclass(cls, Optimizer) and cls is not Optimizer:
                _wrap(cls, name)


def _wrap(cls: type[Optimizer], name: str) -> None:
    step = vars(cls)[name]
    is_hooked = getattr(step, "hooked", False)  # PyTorch adds its hooks when it makes a class's first optimizer
    own = step.__wrapped__ if is_hooked else step
    if getattr(own, "hooked", False) or hasattr(own, "of_slices"):
        return  # another library's wrapper is around the hooks; or it is one of these
    wrapped: Any = _step_of_slices(own)
    if is_hooked:
        wrapped = Optimizer.profile_hook_step(wrapped)
        wrapped.hooked = True
    setattr(cls, name, wrapped)


_STEPPED = frozenset([ShardedParameter, nn.Parameter, Tensor])
"""The classes of tensors that PyTorch's optimizers may step unwatched; others may rely on their own code."""


def _step_of_slices(step: Callable[..., object]) -> Callable[..., object]:
    """Wraps a class's step to have full parameters if it reads them, and otherwise slices as plain tensors."""

    @functools.wraps(step)
    def step_of_slices(optimizer: Optimizer, *args: object, **kwargs: object) -> object:
        if not any(isinstance(p, ShardedParameter) and p.is_split for p in parameters_of(optimizer)):
            return step(optimizer, *args, **kwargs)
        reaches, is_found = _reaches(optimizer)
        module = type(optimizer).__module__  # a user's subclass may override methods
        is_pytorchs = module == "torch.optim" or module.startswith("torch.optim.")
        if any(reach != "element" for reach in reaches):
            return torch.compiler.disable(FullStep(optimizer, reaches, in_turns=is_pytorchs).run)(step, args, kwargs)
        if not (is_pytorchs or is_found) or any(type(p) not in _STEPPED for p in parameters_of(optimizer)):
            return step(optimizer, *args, **kwargs)
        ops = Ops(functools.partial(_refuse_op, optimizer)) if is_found and not is_compiled() else None
        around = watched if ops is None else (lambda closure: ops.around(watched(closure)))
        args = tuple(around(arg) if callable(arg) else arg for arg in args)
        kwargs = {name: around(arg) if callable(arg) else arg for name, arg in kwargs.items()}
        if is_compiled():
            unmark_states(optimizer)
        with unwatched(), ops or contextlib.nullcontext(), uncompiled() if ops else contextlib.nullcontext():
            return step(optimizer, *args, **kwargs)

    step_of_slices.of_slices = True  # type: ignore[attr-defined]
    return step_of_slices


def _refuse_op(optimizer: Optimizer, op: str) -> NoReturn:
    name = type(optimizer).__name__
    raise InputError(
        f"{name} reads more than single elements, which its first steps did not",
        where=f"{name}.step(), op {op}",
        why="it steps slices: a trial of twelve steps had elementwise ops only",
        attempt=f'ts.register_optimizer({name}, "parameter") before the first step, or "model" if it reads several '
        "parameters together",
    )


_FOUND: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Reach]]] = weakref.WeakKeyDictionary()
"""An optimizer of an unknown class -> the number of its parameters, and the reaches found for its groups."""


def _reaches(optimizer: Optimizer) -> tuple[list[Reach], bool]:
    """Returns the reach of each group, and whether it was found by a trial, which all ranks then make."""
    known = known_reach(optimizer)
    if known is not None:
        return [known] * len(optimizer.param_groups), False
    count, reaches = _FOUND.get(optimizer, (0, []))
    if count != len(parameters_of(optimizer)) or len(reaches) != len(optimizer.param_groups):
        reaches = agreed_reach(optimizer, _own_step(optimizer))
        _FOUND[optimizer] = len(parameters_of(optimizer)), reaches
    return reaches, True


def _own_step(optimizer: Optimizer) -> Callable[[Callable[[], Tensor]], object]:
    """Returns an optimizer's step without hooks, as a function of the closure, which it calls if its step takes one."""
    step: Any = type(optimizer).step
    while hasattr(step, "of_slices") or getattr(step, "hooked", False):
        step = step.__wrapped__
    if "closure" in inspect.signature(step).parameters:
        return functools.partial(step, optimizer)
    return lambda closure: step(optimizer)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if optimizer in UNMARKED and not is_compiled():
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
    check_states(optimizer)
    mark_state_dicts(optimizer)
    marking = optimizer.register_step_post_hook(_after_step)
    # `_optimizer_step_post_hooks`: `register_step_post_hook` can only append a hook (PyTorch 2.13.0).
    hooks = cast("OrderedDict[int, object]", optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(marking.id, last=False)  # before users' hooks, which may read the states
    UNMARKED.add(optimizer)


def _check_unsharded(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if not is_state(state):
            continue
        place = next(filter(None, map(place_of, state.values())), None)
        if place is not None:
            raise InputError(
                f"the optimizer of an unsharded model was given a slice's state, {place_text(place)} of {place[0]!r}",
                where="optimizer.load_state_dict",
                why=f"the parameter has shape {tuple(parameter.shape)}",
                attempt="a state dict of an unsharded model's optimizer; states of slices can't be joined yet",
            )
