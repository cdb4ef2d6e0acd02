"""Matches a checkpoint to a model, its optimizers and schedulers, before any tensor is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from torchshard.checkpoints.contents import Item, Stateful, check_generator_states, stateful_modules, tied_names
from torchshard.core.errors import InputError, in_short
from torchshard.core.mesh import Place
from torchshard.core.modules import named_tensors
from torchshard.core.sharding import UNSHARDED, Sharding, local_shape
from torchshard.distributed.objects import decode, encode
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.optimizer_states import state_type
from torchshard.weights.boxes import pieces
from torchshard.weights.checkpoint_files import Checkpoint, SlicedTensor, broken
from torchshard.weights.local_slice import LocalSlice
from torchshard.weights.parameter import ShardedParameter


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


def saved_objects(checkpoint: Checkpoint, ranks: Ranks) -> tuple[StateDict, StateDict | None]:
    """Returns (the objects, this replica's RNG states).

    The RNG states are None if the run had fewer replicas when it was saved.
    """
    data, path = checkpoint.objects(), checkpoint.objects_path
    try:
        both = decode(data, allow_pickle=False)
        objects: StateDict = {name: decode(part, allow_pickle=False) for name, part in both["objects"].items()}
        states = [decode(state, allow_pickle=False) for state in both["rng"]]
        for state in states:
            check_generator_states(state)
        _check_objects(objects)
    except Exception as error:  # the bytes are untrusted, so decoding may raise anything
        raise broken(path, f"its objects are not what ts.save writes: {in_short(error)}") from error
    return objects, states[ranks.replicas.rank] if ranks.replicas.rank < len(states) else None


def _check_objects(objects: StateDict) -> None:
    """Raises an error of any kind if these are not `Contents.objects`."""
    kinds = {"class": str, "names": list, "settings": list, "states": dict}
    for optimizer in objects["optimizers"]:
        wrong = [name for name, kind in kinds.items() if not isinstance(optimizer[name], kind)]
        if wrong or len(optimizer["names"]) != len(optimizer["settings"]):
            raise TypeError(f"an optimizer has wrong {', '.join(wrong) or 'parameter groups'}")
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
        raise mismatch_error(
            "the model's modules with extra state differ from the checkpoint's", checkpoint, SAVED_MODEL
        )
    for path, module in own.items():
        is_equal = encode(module.get_extra_state(), allow_pickle=False) == encode(saved[path], allow_pickle=False)
        if path not in changeable and not is_equal:
            raise mismatch_error(
                f"the extra state of {path or 'the model'} differs from the sharded model's",
                checkpoint,
                "load the checkpoint into the unsharded model, and shard that",
                "a module's extra state can't change after sharding",
            )


def matched_items(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Item]:
    """Returns {stored name: `Item`} for the model's tensors; tied tensors appear once."""
    found, tensors = dict[str, Item](), named_tensors(model)
    state = {
        name: value if isinstance(value, LocalSlice) else tensors[name]
        for name, value in model.state_dict().items()
        if name in tensors
    }
    saved = {name.removeprefix("model/") for name in (*checkpoint.tensors, *checkpoint.aliases) if name[:6] == "model/"}
    _check_names(checkpoint, saved, set(state))
    first_names, stored_of, own_of = tied_names(model), dict[str, str](), dict[str, str]()
    for name, value in state.items():
        item, stored = Item.of(value), cast(SlicedTensor, checkpoint.find(f"model/{name}"))
        _check_type(name, item, stored, checkpoint)
        first = first_names.get(name, name)
        if stored_of.setdefault(first, stored.name) != stored.name:
            raise mismatch_error(
                f"{name!r} is tied to {first!r} in the model, and not in the checkpoint", checkpoint, _UNTIE
            )
        if own_of.setdefault(stored.name, first) != first:
            other = own_of[stored.name]
            raise mismatch_error(
                f"{name!r} is tied to {other!r} in the checkpoint, and not in the model", checkpoint, _UNTIE
            )
        found[stored.name] = item
    return found


def _check_names(checkpoint: Checkpoint, saved: set[str], own: set[str]) -> None:
    only_in = {"the checkpoint": saved - own, "the model": own - saved}
    differences = [f"only in {where}: {_listed(names)}" for where, names in only_in.items() if names]
    if differences:
        what = "the model's parameters and buffers differ from the checkpoint's"
        raise mismatch_error(what, checkpoint, SAVED_MODEL, "; ".join(differences))


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:5]
    more = len(names) - len(shown)
    return ", ".join(map(repr, shown)) + (f" and {more} more" if more else "")


def _check_type(name: str, item: Item, stored: SlicedTensor, checkpoint: Checkpoint) -> None:
    here: object = item.shape
    there: object = stored.shape
    what, attempt = "shape", SAVED_MODEL
    if here == there:
        what, here, there = "dtype", item.tensor.dtype, stored.dtype
        attempt = f"{SAVED_MODEL}; or ts.shard(..., weights={str(checkpoint.folder)!r}), which casts"
    if here != there:
        why = f"it is {there} in the checkpoint, {here} in the model"
        raise mismatch_error(f"{name!r} has a different {what} from the model's", checkpoint, attempt, why)


SAVED_MODEL = "load into the model that was saved"
_UNTIE = f"{SAVED_MODEL}, with the same tied parameters"


def mismatch_error(what: str, checkpoint: Checkpoint, attempt: str, why: str = "nothing was loaded") -> InputError:
    """Returns the error for a checkpoint that does not fit."""
    return InputError(what, where=str(checkpoint.folder), why=why, attempt=attempt)


def check_counts(kind: str, given: int, saved: int) -> None:
    """Raises InputError unless the numbers match or no objects are given."""
    if given and given != saved:
        raise InputError(
            f"{saved} {kind}s were saved, and {given} are given",
            where=f"ts.load({kind}=...)",
            why="they are matched by their order",
            attempt=f"pass the {kind}s that were passed to ts.save, or none of them",
        )


def check_optimizer(optimizer: Optimizer, groups: Sequence[Sequence[str]], saved: StateDict) -> None:
    """Checks an optimizer before its state is loaded; warns if its class is not known to step slices.

    Raises:
        InputError: its class or parameter groups differ from the saved ones, or it can't step slices.
    """
    name, names = type(optimizer).__name__, saved["names"]
    if name != saved["class"]:
        raise _different_optimizer("class", f"given: {name}; saved: {saved['class']}")
    if len(groups) != len(names):
        raise _different_optimizer("number of parameter groups", f"given: {len(groups)}; saved: {len(names)}")
    for number, (own, other) in enumerate(zip(groups, names, strict=True)):
        if sorted(own) != sorted(other):
            only_one = _listed(set(own) ^ set(other))
            sizes = f"given: {len(own)} parameters; saved: {len(other)}"
            raise _different_optimizer(f"parameter group {number}", f"{sizes}; only in one of the two: {only_one}")


def _different_optimizer(what: str, why: str) -> InputError:
    return InputError(
        f"the optimizer has a different {what} from the saved one",
        where="ts.load(optimizer=...)",
        why=why,
        attempt="pass the optimizer that was saved, with the same parameters in each group; or None, to start over",
    )


def check_scheduler(scheduler: Stateful, saved_class: str) -> None:
    """Raises InputError if a scheduler's class differs from the saved one."""
    if type(scheduler).__name__ != saved_class:
        raise InputError(
            "the scheduler has a different class from the saved one",
            where="ts.load(scheduler=...)",
            why=f"given: {type(scheduler).__name__}; saved: {saved_class}",
            attempt="pass the schedulers that were saved, in the same order; or None, to start over",
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
            raise mismatch_error(
                f"{stored_name!r} belongs to no parameter of the optimizer",
                checkpoint,
                "pass the optimizer that was saved",
            )
        parameter, sharding = own[name], UNSHARDED
        if isinstance(parameter, ShardedParameter) and parameter.is_split and stored.shape:
            sharding = state_type(parameter, stored.shape).sharding
        # optimizers keep steps on the CPU; fused and capturable ones move them when they load a state
        found[stored_name] = Wanted(stored, sharding, parameter.device if stored.shape else torch.device("cpu"))
    return found
