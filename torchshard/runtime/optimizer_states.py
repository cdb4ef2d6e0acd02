"""Marks the states of optimizers of slices, in memory and in state dicts, and checks the states that are loaded.

Slices know their place in the full tensor, so the state of another rank raises an error. Full tensors, of an unsharded
run, are cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict
from torch.utils import _pytree as pytree

from torchshard.core.errors import InputError
from torchshard.core.layouts import Shard
from torchshard.core.sharding import Sharding
from torchshard.runtime.optimizer_classes import known_reach, parameters_of
from torchshard.runtime.optimizer_names import in_own_order
from torchshard.runtime.state_forms import as_given, closed, is_wrapper, opened
from torchshard.weights.dcp import wants_whole
from torchshard.weights.following import SliceType
from torchshard.weights.local_slice import LocalSlice
from torchshard.weights.over_ranks import is_of_a_model
from torchshard.weights.parameter import ShardedParameter
from torchshard.weights.place import is_same_slice, place_of, place_text, slice_place

OptimizerState = Mapping[str, object]
"""An optimizer's state for one parameter: tensors, such as 'exp_avg', and numbers."""


def is_state(value: object) -> TypeGuard[dict[str, object]]:
    """Returns whether a value in `Optimizer.state` is a parameter's: some optimizers count steps there too."""
    return isinstance(value, dict)


UNMARKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers that may have unmarked slices in their states.

That is so before the first step, after a load, and while their steps are compiled, because compiled
graphs take plain tensors.
"""


def unmark_states(optimizer: Optimizer) -> None:
    """Makes an optimizer's state plain tensors, as compiled steps need them."""
    if optimizer not in UNMARKED:
        UNMARKED.add(optimizer)
        for state in filter(is_state, optimizer.state.values()):
            state |= {name: value.plain for name, value in state.items() if is_of_a_model(value)}


def mark_states(optimizer: Optimizer) -> None:
    """Marks an optimizer's state of slices, because users read and save it."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, ShardedParameter) and parameter.is_split:
            for name, value in state.items():
                if type(value) is Tensor and is_slice_state(value, parameter):
                    state[name] = LocalSlice.sharing(value, parameter)


_MARKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers with hooks that mark slices in state dicts."""


def mark_state_dicts(optimizer: Optimizer) -> None:
    """Makes slices in an optimizer's state dicts know their place, and has loaded state dicts checked."""
    # `_optimizer_state_dict_post_hooks`: a class that wraps another may not call Optimizer's constructor, which makes
    # them (PyTorch 2.13.0); it has no public name.
    if optimizer not in _MARKED and hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        _MARKED.add(optimizer)
        optimizer.register_load_state_dict_pre_hook(_checked_state)
        optimizer.register_load_state_dict_post_hook(_mark_loaded)
        optimizer.register_state_dict_post_hook(_with_places)


def check_states(optimizer: Optimizer) -> None:
    """Raises InputError if an optimizer's state does not belong to the slices that it steps."""
    by_element = known_reach(optimizer) == "element"
    for parameter in parameters_of(optimizer):
        if isinstance(parameter, ShardedParameter):
            _check_state(parameter, optimizer.state.get(parameter, {}), by_element=by_element)


def state_type(parameter: ShardedParameter, whole: Sequence[int]) -> SliceType:
    """Returns the type of a slice of a parameter's state: the parameter's for its shape, others are split by rows.

    Args:
        whole: the global shape.
    """
    if tuple(whole) == parameter.whole:
        return SliceType(parameter.sharding, parameter.whole)
    return SliceType(Sharding.of(*((axis, Shard(0)) for axis, _ in parameter.sharding)), tuple(whole))


def as_slice(value: Tensor, parameter: ShardedParameter, whole: Sequence[int]) -> LocalSlice:
    """Returns an alias of a tensor of a parameter's state, marked as this rank's slice of a tensor of shape `whole`."""
    return LocalSlice.sharing(value, parameter, state_type(parameter, whole))


def leaves_of(state: OptimizerState) -> dict[str, object]:
    """Returns the tensors and other leaves of a parameter's state, which may be in lists, by their path: 'Q.0'."""
    return {".".join(map(_key, path)): leaf for path, leaf in pytree.tree_flatten_with_path(dict(state))[0]}


def _key(entry: object) -> str:
    return str(entry.key if isinstance(entry, pytree.MappingKey) else getattr(entry, "idx", entry))


def _check_state(parameter: ShardedParameter, state: OptimizerState, *, by_element: bool) -> None:
    for name, value in leaves_of(state).items():
        place, own = place_of(value), parameter.place
        if place is not None and len(place) == len(own):
            of = state_type(parameter, place[4])
            own = slice_place(parameter.path, of.sharding, parameter.at, of.whole)
        # The name may differ, as when the model is now a part of another one; the rest of the place must match.
        if place is not None and not is_same_slice(place, own):
            raise InputError(
                f"the optimizer's {name} of {parameter.path!r} is another slice's",
                where="optimizer.load_state_dict",
                why=f"given: {place_text(place)}; wanted: {place_text(own)}",
                attempt="the optimizer's state dict that this rank saved, of the same plan on as many ranks",
            )
        if by_element and isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise InputError(
                f"the optimizer's {name} of {parameter.path!r} has another shape than this rank's slice",
                where="optimizer.load_state_dict",
                why=f"given: {tuple(value.shape)}; wanted: {tuple(parameter.shape)}, {place_text(own)}",
                attempt="the state dict of this rank's optimizer, or of an unsharded run's with its parameters in the "
                "same order",
            )


def _checked_state(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Returns a state dict to load, with plain tensors instead of slices, and slices of full ones.

    Raises:
        InputError: it has a slice of another place.
    """
    UNMARKED.add(optimizer)
    state_dict = in_own_order(optimizer, state_dict)
    states, by_element = dict(state_dict["state"]), known_reach(optimizer) == "element"
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    for parameter, index in zip(parameters_of(optimizer), indices, strict=False):
        if isinstance(parameter, ShardedParameter) and index in states:
            cut = partial(_cut, parameter=parameter, is_full=not by_element)
            states[index] = pytree.tree_map(cut, opened(states[index]) if parameter.is_split else states[index])
            _check_state(parameter, states[index], by_element=by_element)
            _LOADED.setdefault(optimizer, {})[parameter] = states[index]
            states[index] = pytree.tree_map_only(LocalSlice, lambda x: x.plain, states[index])
    return {**state_dict, "state": states}


_LOADED: weakref.WeakKeyDictionary[Optimizer, dict[ShardedParameter, OptimizerState]] = weakref.WeakKeyDictionary()
"""An optimizer that loads a state dict -> parameter -> its state there."""


def _mark_loaded(optimizer: Optimizer) -> None:
    """Marks the loaded slices of other shapes than the parameter's, whose types do not follow from their shapes."""
    for parameter, given in _LOADED.pop(optimizer, {}).items():
        if parameter in optimizer.state:
            optimizer.state[parameter] = as_given(optimizer.state[parameter], given)
        places = {path: place_of(value) for path, value in leaves_of(given).items()}
        shapes = {path: tuple(place[4]) for path, place in places.items() if place is not None}
        state = optimizer.state.get(parameter, {})
        paths, (leaves, spec) = list(leaves_of(state)), pytree.tree_flatten(state)
        others = [(i, path) for i, path in enumerate(paths) if shapes.get(path, parameter.whole) != parameter.whole]
        for i, path in others:
            leaves[i] = as_slice(leaves[i], parameter, shapes[path])
        if others:
            optimizer.state[parameter] = pytree.tree_unflatten(leaves, spec)


def _cut(value: object, parameter: ShardedParameter, is_full: bool) -> object:
    """Returns this rank's slice of an optimizer's full tensor; other values as they are.

    Args:
        is_full: whether tensors of other shapes than the parameter's are full unless they have a place.
    """
    if not isinstance(value, Tensor) or place_of(value) is not None or not value.ndim or is_wrapper(value):
        return value
    is_like_parameter = tuple(value.shape) == parameter.whole
    if not (is_like_parameter or (is_full and parameter.is_split)):
        return value
    own = state_type(parameter, value.shape).sharding.local(value, parameter.ranks.place)
    if not is_like_parameter:
        return as_slice(own.clone(), parameter, value.shape)
    # fused steps run through memory in order: the strides must be the parameter's
    return torch.empty_like(parameter.plain, dtype=value.dtype, device=value.device).copy_(own)


def _with_places(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Returns the optimizer's state dict; tensors of a slice's shape know their place in the full tensor."""
    parameters, mark = parameters_of(optimizer), _whole_copy if wants_whole() else _with_place
    states = dict(state_dict["state"])
    for index, state in states.items():
        parameter = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        if isinstance(parameter, ShardedParameter):
            marked = pytree.tree_map(partial(mark, parameter=parameter), state)
            states[index] = closed(marked) if wants_whole() else marked
    return {**state_dict, "state": states}


def _with_place(value: object, parameter: ShardedParameter) -> object:
    if not (parameter.is_split and is_slice_state(value, parameter)):
        return value
    return LocalSlice.stored(value, parameter.place)


def _whole_copy(value: object, parameter: ShardedParameter) -> object:
    """Returns a copy of a state, gathered from all ranks if it is a slice's: a collective call."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, LocalSlice) and value.is_split:
        return parameter.ranks.gathered(value.plain, value.sharding, value.whole)
    if not (parameter.is_split and is_slice_state(value, parameter)):
        return value.clone()
    return parameter.ranks.gathered(value, parameter.sharding, parameter.whole)


def is_slice_state(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    """Returns whether an optimizer's state for a parameter has one number per element."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
