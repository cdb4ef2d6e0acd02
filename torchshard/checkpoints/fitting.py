"""Checks that a checkpoint fits a model, its optimizers and schedulers, before reading any data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchshard.checkpoints.contents import (
    Item,
    Stateful,
    check_generator_states,
    stateful_modules,
    tied_names,
)
from torchshard.core.errors import InputError, in_short
from torchshard.core.mesh import Place
from torchshard.core.modules import named_tensors
from torchshard.core.sharding import UNSHARDED, Sharding, local_shape
from torchshard.distributed.objects import decode, encode
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.optimizer_classes import check_class_of_slices
from torchshard.weights.boxes import pieces
from torchshard.weights.checkpoint_files import Checkpoint, SlicedTensor, broken
from torchshard.weights.local_slice import LocalSlice


@dataclass(frozen=True)
class Wanted:
    """A tensor of the checkpoint that this rank reads a part of."""

    stored: SlicedTensor
    sharding: Sharding
    """The sharding over the ranks."""
    device: torch.device

    def bytes_in(self, place: Place) -> int:
        """Returns the bytes of one rank's part."""
        return math.prod(local_shape(self.stored.shape, self.sharding.cuts(place))) * self.stored.dtype.itemsize

    def read(self, place: Place) -> Tensor:
        """Reads one rank's part."""
        own = self.sharding.cuts(place)
        local = torch.empty(local_shape(self.stored.shape, own), dtype=self.stored.dtype, device="cpu")
        for piece in pieces(self.stored.shape, own):
            self.stored.read(piece.box, piece.of(local))
        return local.to(self.device)


def saved_objects(checkpoint: Checkpoint, ranks: Ranks) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Returns (the objects, this replica's RNG states).

    The RNG states are None if the run had fewer replicas when it was saved.
    """
    data, path = checkpoint.objects(), checkpoint.objects_path
    try:
        both = decode(data, allow_pickle=False)
        objects: dict[str, Any] = {name: decode(part, allow_pickle=False) for name, part in both["objects"].items()}
        states = [decode(state, allow_pickle=False) for state in both["rng"]]
        for state in states:
            check_generator_states(state)
        _check_objects(objects)
    except Exception as error:  # the bytes are untrusted, so decoding may raise anything
        raise broken(path, f"its objects are not what ts.save writes: {in_short(error)}") from error
    return objects, states[ranks.replicas.rank] if ranks.replicas.rank < len(states) else None


def _check_objects(objects: Mapping[str, Any]) -> None:
    """Raises an error of any kind if these are not `Contents.objects`."""
    kinds = {"class": str, "names": list, "settings": list, "states": dict}
    for optimizer in objects["optimizers"]:
        wrong = [name for name, kind in kinds.items() if not isinstance(optimizer[name], kind)]
        if wrong or len(optimizer["names"]) != len(optimizer["settings"]):
            raise TypeError(f"{wrong or 'the groups'} of an optimizer")
    for name, state in objects["schedulers"]:
        if not (isinstance(name, str) and isinstance(state, dict)):
            raise TypeError("a scheduler")
    if not isinstance(objects["model"], dict) or "extra" not in objects:
        raise TypeError("the model's extra states")


def check_extra_state(checkpoint: Checkpoint, model: nn.Module, saved: Mapping[str, object]) -> None:
    """Checks a checkpoint's extra states.

    Raises:
        InputError: they belong to other modules, or differ from the states that a sharded model was
            captured with.
    """
    own, changeable = stateful_modules(model), stateful_modules(model, sharded=False)
    if {*saved} != {*own}:
        raise unfit("the model's modules have other extra states than the checkpoint", checkpoint, SAVED_MODEL)
    for path, module in own.items():
        is_equal = encode(module.get_extra_state(), allow_pickle=False) == encode(saved[path], allow_pickle=False)
        if path not in changeable and not is_equal:
            raise unfit(
                f"the extra state of {path or 'the model'} is another than that of the sharded model",
                checkpoint,
                "load the checkpoint into the unsharded model, and shard that",
                "what modules hold beside parameters and buffers can't change after sharding",
            )


def fitting_model(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Item]:
    """Returns {stored name: this rank's memory} of the model's tensors; tied names appear once."""
    found, tensors = dict[str, Item](), named_tensors(model)
    state = {
        name: value if isinstance(value, LocalSlice) else tensors[name]
        for name, value in model.state_dict().items()
        if name in tensors
    }
    saved = {name.removeprefix("model/") for name in (*checkpoint.tensors, *checkpoint.aliases) if name[:6] == "model/"}
    for name in (*sorted(saved - set(state)), *sorted(set(state) - saved)):
        where, other = ("the checkpoint", "the model") if name in saved else ("the model", "the checkpoint")
        raise unfit(f"{name!r} is in {where} and not in {other}", checkpoint, SAVED_MODEL)
    first_names, stored_of, own_of = tied_names(model), dict[str, str](), dict[str, str]()
    for name, value in state.items():
        item, stored = Item.of(value), cast(SlicedTensor, checkpoint.find(f"model/{name}"))
        _check_type(name, item, stored, checkpoint)
        first = first_names.get(name, name)
        if stored_of.setdefault(first, stored.name) != stored.name:
            raise unfit(f"{name!r} is tied to {first!r} in the model, and not in the checkpoint", checkpoint, _UNTIE)
        if own_of.setdefault(stored.name, first) != first:
            other = own_of[stored.name]
            raise unfit(f"{name!r} is tied to {other!r} in the checkpoint, and not in the model", checkpoint, _UNTIE)
        found[stored.name] = item
    return found


def _check_type(name: str, item: Item, stored: SlicedTensor, checkpoint: Checkpoint) -> None:
    here: object = item.shape
    there: object = stored.shape
    what, attempt = "shape", SAVED_MODEL
    if here == there:
        what, here, there = "dtype", item.tensor.dtype, stored.dtype
        attempt = f"{SAVED_MODEL}; or ts.shard(..., weights={str(checkpoint.folder)!r}), which casts"
    if here != there:
        why = f"it is {there} in the checkpoint, {here} in the model"
        raise unfit(f"{name!r} has another {what} than the model's", checkpoint, attempt, why)


SAVED_MODEL = "the model that was saved"
_UNTIE = "the model that was saved, with the same tied parameters"


def unfit(what: str, checkpoint: Checkpoint, attempt: str, why: str = "nothing was loaded") -> InputError:
    """Returns the error for a checkpoint that does not fit."""
    return InputError(what, where=str(checkpoint.folder), why=why, attempt=attempt)


def check_counts(kind: str, given: int, saved: int) -> None:
    """Raises InputError unless the numbers match or no objects are given."""
    if given and given != saved:
        raise InputError(
            f"{saved} {kind}s were saved, and {given} are given",
            where=f"ts.load({kind}=...)",
            why="they are matched by their order",
            attempt=f"the {kind}s that were given to ts.save, or none of them",
        )


def check_optimizer(optimizer: Optimizer, groups: Sequence[Sequence[str]], saved: Mapping[str, Any]) -> None:
    """Raises InputError if an optimizer's class or groups of parameters differ from the saved ones."""
    name = type(optimizer).__name__
    what, here, there = "is of another class", name, saved["class"]
    if here == there:
        what, here, there = "has other groups", f"{len(groups)} groups", f"{len(saved['names'])} groups"
        for own, other in zip(groups, saved["names"], strict=False):
            if here == there and sorted(own) != sorted(other):
                different = sorted(set(own) ^ set(other))
                here, there = (
                    f"a group of {len(own)} parameters",
                    f"one of {len(other)}, with or without {different[:3]}",
                )
    if here != there:
        raise InputError(
            f"the optimizer {what} than the saved one",
            where="ts.load(optimizer=...)",
            why=f"given: {here}; saved: {there}",
            attempt="the optimizer that was saved, with the same parameters in each group; or None, to start over",
        )
    check_class_of_slices(optimizer)


def check_scheduler(scheduler: Stateful, saved_class: str) -> None:
    """Raises InputError for a scheduler of another class."""
    if type(scheduler).__name__ != saved_class:
        raise InputError(
            "the scheduler is of another class than the saved one",
            where="ts.load(scheduler=...)",
            why=f"given: {type(scheduler).__name__}; saved: {saved_class}",
            attempt="the schedulers that were saved, in the same order; or None, to start over",
        )


def wanted_states(
    checkpoint: Checkpoint, number: int, optimizer: Optimizer, groups: Sequence[Sequence[str]]
) -> dict[str, Wanted]:
    """Returns this rank's parts of an optimizer's saved state, in its parameters' layouts."""
    own = {
        name: p
        for group, names in zip(optimizer.param_groups, groups, strict=True)
        for p, name in zip(group["params"], names, strict=True)
    }
    found, prefix = dict[str, Wanted](), f"optimizer/{number}/"
    for stored_name, stored in checkpoint.tensors.items():
        if not stored_name.startswith(prefix):
            continue
        _, _, name = stored_name.removeprefix(prefix).partition("/")
        if name not in own:
            raise unfit(f"{stored_name!r} belongs to no parameter of the optimizer", checkpoint, "the saved optimizer")
        item = Item.of(own[name])
        is_by_element = stored.shape == item.shape and bool(item.shape)
        if not is_by_element and stored.shape and item.sharding.is_split:
            raise unfit(
                f"{stored_name!r} is no number per element of its parameter, of which this rank has a slice",
                checkpoint,
                "a plan that keeps the parameter whole",
                f"it is {stored.shape}",
            )
        # optimizers keep steps on the CPU; fused and capturable ones move them when they load a state
        sharding = item.sharding if is_by_element else UNSHARDED
        found[stored_name] = Wanted(stored, sharding, own[name].device if stored.shape else torch.device("cpu"))
    return found
