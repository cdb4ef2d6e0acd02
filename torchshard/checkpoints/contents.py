"""What a checkpoint holds: tensors under the names of the unsharded model, each with its layout, and plain objects.

    model/blocks.0.up.weight                 a parameter or buffer
    optimizer/0/exp_avg/blocks.0.up.weight   what the first optimizer keeps for it
    objects                                  settings of optimizers, schedulers, RNG states, data of the user's

An optimizer's state goes by the names of parameters, not by their numbers: it fits any plan and number of ranks, and
the unsharded model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchshard.core.errors import InputError
from torchshard.core.layouts import I, Layout
from torchshard.distributed.objects import encode
from torchshard.runtime.optimizers import check_class, is_slice_state
from torchshard.weights.parameter import ShardedParameter
from torchshard.weights.slice_values import Slice, unwatched
from torchshard.weights.state_slices import StateSlice

OptimizerState = dict[str, dict[str, object]]
"""Name of a parameter -> what an optimizer keeps for it, by name."""


class Stateful(Protocol):
    """A learning-rate scheduler, or what else has a state dict of plain data."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Goes on from there."""


class Item(NamedTuple):
    """A tensor of a checkpoint, as this rank has it."""

    tensor: Tensor
    """This rank's slice, or the whole; its own memory, not a copy."""
    layout: Layout
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @classmethod
    def of(cls, value: Tensor) -> Item:
        """The item of a tensor in a state dict."""
        if isinstance(value, StateSlice):
            return cls(value.plain, value.sharding, value.place[4])
        with unwatched():
            plain = value.detach().as_subclass(Tensor)
        if isinstance(value, Slice) and value.is_split:
            return cls(plain, value.sharding, value.whole)
        return cls(plain, I, tuple(value.shape))


@dataclass
class Contents:
    """What a checkpoint holds."""

    items: dict[str, Item] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Another name of a tied parameter -> its first name."""
    objects: dict[str, object] = field(default_factory=dict)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in a DistributedDataParallel, whose names it then has."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def as_list(value: Any) -> list[Any]:
    """What a caller gave one of, several, or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def contents_of(
    model: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Stateful], extra: object
) -> Contents:
    """What a checkpoint of these holds.

    Raises:
        InputError: some of it can't be saved.
    """
    contents = Contents()
    _add_model(contents, model)
    names = parameter_names(model)
    contents.objects["optimizers"] = [
        _add_optimizer(contents, number, optimizer, names) for number, optimizer in enumerate(optimizers)
    ]
    contents.objects["schedulers"] = [(type(s).__name__, s.state_dict()) for s in schedulers]
    contents.objects["extra"] = extra
    encoded(contents.objects)  # tells what can't be saved, before anything is written
    return contents


def _add_model(contents: Contents, model: nn.Module) -> None:
    extra, first_names = dict[str, object](), tied_names(model)
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            extra[name] = value
            continue
        item, first = Item.of(value), first_names.get(name, name)
        if item.tensor.layout is not torch.strided or item.tensor.is_meta:
            raise InputError(
                f"{name!r} can't be saved",
                where="ts.save",
                why="it has no values" if item.tensor.is_meta else f"it is a {item.tensor.layout} tensor",
                attempt="a model whose parameters and buffers are dense and have values",
            )
        if first != name and f"model/{first}" in contents.items:
            contents.aliases[f"model/{name}"] = f"model/{first}"
        else:
            contents.items[f"model/{name}"] = item
    contents.objects["model"] = extra


def tied_names(model: nn.Module) -> dict[str, str]:
    """Name of a parameter or buffer -> the first name of the same tensor.

    By the objects: an empty slice has no memory that it could share.
    """
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first_names: dict[int, str] = {}
    return {name: first_names.setdefault(id(tensor), name) for name, tensor in named}


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id of a parameter -> its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of the parameters of each group.

    Raises:
        InputError: a parameter is not the model's.
    """
    found = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    stranger = next((p for group in optimizer.param_groups for p in group["params"] if id(p) not in names), None)
    if stranger is not None:
        raise InputError(
            f"{type(optimizer).__name__} has a parameter that is not the model's",
            where=f"a parameter of shape {tuple(stranger.shape)}",
            why="an optimizer's state goes by the names of the model's parameters",
            attempt="the model that the optimizer was made for; nn.ModuleDict of several, where it has all their "
            "parameters",
        )
    return found


def _add_optimizer(contents: Contents, number: int, optimizer: Optimizer, names: Mapping[int, str]) -> object:
    """Adds the tensors that an optimizer keeps; returns what else it needs to go on."""
    groups = group_names(optimizer, names)
    state_dict = optimizer.state_dict()
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    by_index = dict(zip(indices, itertools.chain.from_iterable(groups), strict=True))
    parameters = dict(zip(indices, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    others: OptimizerState = {}
    for index, state in state_dict["state"].items():
        parameter, name = parameters[index], by_index[index]
        if isinstance(parameter, ShardedParameter) and parameter.is_split:
            check_class(optimizer)
        for key, value in state.items():
            if not isinstance(value, Tensor):
                others.setdefault(name, {})[key] = value
                continue
            contents.items[f"optimizer/{number}/{key}/{name}"] = _state_item(optimizer, parameter, key, value)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in state_dict["param_groups"]]
    return {"class": type(optimizer).__name__, "names": groups, "settings": settings, "states": others}


def _state_item(optimizer: Optimizer, parameter: Tensor, key: str, value: Tensor) -> Item:
    item = Item.of(value)
    if not isinstance(parameter, ShardedParameter) or not parameter.is_split or not value.ndim:
        return item
    if not is_slice_state(value, parameter):
        raise InputError(
            f"{type(optimizer).__name__}'s {key} of {parameter.path!r} can't be saved",
            where=f"{tuple(value.shape)} for a slice of {tuple(parameter.shape)}",
            why="it is no number per element of the slice, so it does not say what it is of the whole parameter",
            attempt="an optimizer that treats each element by itself: SGD, AdamW, ...",
        )
    return Item(item.tensor, parameter.sharding, parameter.whole)


def encoded(objects: Mapping[str, object]) -> bytes:
    """Plain objects as bytes.

    Raises:
        InputError: one of them is not plain.
    """
    for name, value in objects.items():
        try:
            encode(value, allow_pickle=False)
        except InputError as error:
            raise InputError(
                f"a checkpoint can't hold what {name} has",
                where=f"ts.save, {name}",
                why=f"{error.args[0].splitlines()[0] if error.args else error}; it would have to be pickled, and "
                "opening a pickle may run any code",
                attempt="numbers, texts, bytes, tensors and arrays, and lists, tuples, sets and dicts of them",
            ) from None
    return encode(dict(objects), allow_pickle=False)


# --- RNG states ------------------------------------------------------------------------------------------------------


def rng_states() -> dict[str, object]:
    """The states of this process's generators: PyTorch's, of the CPU and the current GPU, Python's and NumPy's."""
    states: dict[str, object] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {"numpy": _numpy().get_state(legacy=False)}


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Sets the generators to saved states."""
    torch.set_rng_state(states["cpu"])
    random.setstate(states["python"])
    _numpy().set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _numpy() -> Any:
    import numpy as np

    return np.random
