"""The contents of a checkpoint: plain objects, and tensors by their names in the unsharded model.

Each tensor has a layout.

    model/blocks.0.up.weight                 a parameter or buffer
    optimizer/0/exp_avg/blocks.0.up.weight   the first optimizer's state for it
    objects                                  settings of optimizers, schedulers, RNG states, user data

An optimizer's state is keyed by parameter names, not numbers, so it fits any plan, any number of
ranks, and the unsharded model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict
from torch.utils import _pytree as pytree

from torchshard.capture import shared_names
from torchshard.core.errors import InputError
from torchshard.core.hashing import hash_tensor, spread
from torchshard.core.layouts import Shard
from torchshard.core.modules import named_tensors
from torchshard.core.sharding import UNSHARDED, Sharding
from torchshard.runtime.optimizer_states import is_slice_state, leaves_of
from torchshard.runtime.state_forms import opened
from torchshard.runtime.submodule import ShardedSubmodule
from torchshard.weights.local_slice import LocalSlice, unwatched
from torchshard.weights.parameter import ShardedParameter

T = TypeVar("T")
OptimizerState = dict[str, dict[str, object]]
"""Name of a parameter -> an optimizer's state for it, by name."""


class Stateful(Protocol):
    """A learning-rate scheduler, or another object with a state dict of plain data."""

    def state_dict(self) -> StateDict:
        """Returns the state to continue from."""

    def load_state_dict(self, state_dict: StateDict) -> object:
        """Continues from a saved state."""


class Item(NamedTuple):
    """A tensor of a checkpoint, with this rank's share of it."""

    tensor: Tensor
    """This rank's slice or full tensor; it shares memory with the model and is not a copy."""
    sharding: Sharding
    """The sharding over the ranks."""
    shape: tuple[int, ...]
    """The global shape."""

    @classmethod
    def of(cls, value: Tensor) -> Item:
        """Returns the item of a tensor in a state dict."""
        with unwatched():
            plain = value.detach().as_subclass(Tensor)
        if isinstance(value, LocalSlice) and value.is_split:
            return cls(plain, value.sharding, value.whole)
        return cls(plain, UNSHARDED, tuple(value.shape))


@dataclass
class Contents:
    """The tensors and objects of a checkpoint."""

    items: dict[str, Item] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Another name of a tied parameter -> its first name."""
    objects: dict[str, object] = field(default_factory=dict)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel or `torch.compile`; its names are saved."""
    # `_orig_mod` is the model in the module that `torch.compile` returns (PyTorch 2.13.0).
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return model if inner is None else unwrapped(cast(nn.Module, inner))


def as_list(value: T | Sequence[T] | None) -> list[T]:
    """Returns an argument as a list: it may be one value, several, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def contents_of(
    model: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Stateful], extra: object
) -> Contents:
    """Collects the contents of a checkpoint.

    Raises:
        InputError: a part can't be saved.
    """
    contents = Contents()
    _add_model(contents, model)
    names = parameter_names(model)
    contents.objects["optimizers"] = [
        _add_optimizer(contents, number, optimizer, names) for number, optimizer in enumerate(optimizers)
    ]
    contents.objects["schedulers"] = [(type(s).__name__, s.state_dict()) for s in schedulers]
    contents.objects["extra"] = extra
    return contents


def _add_model(contents: Contents, model: nn.Module) -> None:
    first_names, own = tied_names(model), named_tensors(model)
    for name, value in model.state_dict().items():
        if _is_extra_state(name):
            continue
        if name not in own:
            raise _unsaved(name, "it is no parameter or buffer of the model", _RESTORED)
        tensor = own[name]
        if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            kind = "has no values" if tensor.layout is torch.strided else f"is a {tensor.layout} tensor"
            raise _unsaved(name, f"it {kind}", "a model whose parameters and buffers are dense and have values")
        # a hook may have put a copy there, and loading into a copy would be lost
        item, first = Item.of(value if isinstance(value, LocalSlice) else tensor), first_names[name]
        if first != name and f"model/{first}" in contents.items:
            contents.aliases[f"model/{name}"] = f"model/{first}"
        else:
            contents.items[f"model/{name}"] = item
    contents.objects["model"] = {path: m.get_extra_state() for path, m in stateful_modules(model).items()}


_RESTORED = "get_extra_state and set_extra_state of the module, for what is neither"


def _unsaved(name: str, why: str, attempt: str) -> InputError:
    return InputError(f"{name!r} can't be saved", where="ts.save", why=why, attempt=attempt)


def _is_extra_state(name: str) -> bool:
    """Returns whether a name in a state dict is the key of a module's `get_extra_state`."""
    # `_extra_state` is the last part of the key that nn.Module.state_dict writes (PyTorch 2.13.0).
    return name.rpartition(".")[2] == "_extra_state"


def stateful_modules(model: nn.Module, *, sharded: bool = True) -> dict[str, nn.Module]:
    """Returns {path: module} for each module with its own `get_extra_state`.

    Args:
        sharded: includes the modules that a sharded model was captured from; their states can't be
            changed.
    """
    sources = (
        (path, module.source if isinstance(module, ShardedSubmodule) else module)
        for path, module in model.named_modules()
        if sharded or not isinstance(module, ShardedSubmodule)
    )
    return {path: m for path, m in sources if type(m).get_extra_state is not nn.Module.get_extra_state}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Returns {name of a parameter or buffer: first name of the same tensor}."""
    return {name: names[0] for name, names in shared_names(model).items()}


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Returns {id of a parameter: its first name}."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Returns the parameter names of each group.

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
    """Adds the tensors of an optimizer's state; returns the rest of its state."""
    groups = group_names(optimizer, names)
    state_dict = optimizer.state_dict()
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    by_index = dict(zip(indices, itertools.chain.from_iterable(groups), strict=True))
    parameters = dict(zip(indices, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    others: OptimizerState = {}
    for index, state in state_dict["state"].items():
        parameter, name = parameters[index], by_index[index]
        for key, value in opened(state).items():
            leaves = {path: leaf for path, leaf in leaves_of({key: value}).items() if isinstance(leaf, Tensor)}
            for path, leaf in leaves.items():
                contents.items[f"optimizer/{number}/{path}/{name}"] = _state_item(optimizer, parameter, path, leaf)
            if not isinstance(value, Tensor):
                paths = iter(leaves)
                others.setdefault(name, {})[key] = pytree.tree_map_only(Tensor, lambda _: {TENSOR: next(paths)}, value)  # noqa: B023
    settings = [{key: value for key, value in group.items() if key != "params"} for group in state_dict["param_groups"]]
    return {"class": type(optimizer).__name__, "names": groups, "settings": settings, "states": others}


TENSOR: Final = "the tensor at"
"""The key, in the plain part of an optimizer's state, of the path of a tensor that is in a list: 'Q.0'."""


def _state_item(optimizer: Optimizer, parameter: Tensor, key: str, value: Tensor) -> Item:
    item = Item.of(value)
    if not isinstance(parameter, ShardedParameter) or not parameter.is_split or not value.ndim:
        return item
    if isinstance(value, LocalSlice) and value.is_split:
        return item
    if not is_slice_state(value, parameter):
        raise InputError(
            f"{type(optimizer).__name__}'s {key} of {parameter.path!r} can't be saved",
            where=f"{tuple(value.shape)} for a slice of {tuple(parameter.shape)}",
            why="it is no number per element of the slice, so it does not say what it is of the whole parameter",
            attempt="an optimizer that treats each element by itself: SGD, AdamW, ...",
        )
    return Item(item.tensor, parameter.sharding, parameter.whole)


def hashes(items: Mapping[str, Item], axis: str) -> dict[str, str]:
    """Returns hashes of the values that must match on all ranks of a mesh axis.

    A replicated tensor is hashed in full, a slice by a sample. Tensors split over the axis are
    omitted.
    """
    found = {}
    for name, item in items.items():
        if not isinstance(item.sharding.over(axis), Shard):
            compared = spread(item.tensor, _SAMPLED) if item.sharding.is_split else item.tensor
            found[f"the values of {name}"] = f"{hash_tensor(compared):x}"
    return found


_SAMPLED: Final = 1 << 20
"""The minimum number of elements that replicas compare of a large slice."""


# --- RNG states ------------------------------------------------------------------------------------------------------


def generator_states() -> dict[str, object]:
    """Returns the generator states of PyTorch (CPU and current GPU), Python and NumPy."""
    states: dict[str, object] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {"numpy": np.random.get_state(legacy=False)}


def set_generator_states(states: StateDict) -> None:
    """Sets the generators to saved states."""
    torch.set_rng_state(states["cpu"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check_generator_states(states: StateDict) -> None:
    """Raises an error of any kind if the states can't be set."""
    torch.Generator().set_state(states["cpu"])
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.Generator("cuda").set_state(states["cuda"])
