"""Reads a checkpoint into a model, its optimizers and schedulers: any plan, any number of ranks, or unsharded.

check    names, shapes, dtypes and groups of all that is to be loaded, before anything is read
read     this rank's parts of the tensors, into new memory
set      the values, once every rank has read all of its parts
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchshard.checkpoints.contents import (
    Item,
    Stateful,
    as_list,
    group_names,
    parameter_names,
    set_rng_states,
    tied_names,
    unwrapped,
)
from torchshard.checkpoints.ranks import Ranks
from torchshard.core.errors import InputError
from torchshard.core.layouts import I, Layout, local_shape
from torchshard.core.mesh import Coordinate
from torchshard.distributed.objects import decode
from torchshard.runtime.module import ShardedModule
from torchshard.runtime.optimizers import check_class
from torchshard.weights.boxes import pieces
from torchshard.weights.checkpoint_files import Checkpoint, SlicedTensor, broken, read_checkpoint
from torchshard.weights.parameter import ShardedParameter
from torchshard.weights.progress import Progress
from torchshard.weights.slice_values import unwatched


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
) -> Any:
    """Loads what `save` has saved, and sets the RNG states: the run goes on as if it had not stopped.

    A collective call: all ranks make it. The model may have another plan, or be on another number of ranks, or be the
    unsharded one. Each rank reads its slices alone. If a file is missing or torn, or anything does not fit, nothing is
    changed. To take a checkpoint's weights alone, into a model that is not in memory yet: `shard(..., weights=folder)`.

    Args:
        model: with the parameters and buffers of the saved one, by name, shape and dtype.
        optimizer, scheduler: as they were given to `save`; None leaves what was saved of them.

    Returns:
        the `extra` of `save`.

    Raises:
        InputError: there is no complete checkpoint, a file can't be read, or it does not fit.
        DistributedError: the ranks read different checkpoints.
    """
    ranks, inner = Ranks.own(), unwrapped(model)
    optimizers, schedulers = as_list(optimizer), as_list(scheduler)
    what = "a rank can't load the checkpoint"
    checkpoint = ranks.run_on_all(lambda: read_checkpoint(Path(folder)), InputError, what)
    ranks.verify(_facts(checkpoint), "the ranks load different checkpoints")

    def check() -> _Checked:
        return _Checked.of(checkpoint, inner, optimizers, schedulers, ranks)

    checked = ranks.run_on_all(check, InputError, what)
    values = ranks.run_on_all(lambda: checked.read(ranks.group.coordinate), InputError, what)
    with torch.no_grad(), unwatched():
        for name, own in checked.model.items():
            own.tensor.copy_(values[name])
    for module in inner.modules():
        if isinstance(module, ShardedModule):
            module.note_loaded()
    for number, into in enumerate(optimizers):
        checked.set_optimizer(number, into, values)
    for (_, state), target in zip(checked.objects["schedulers"], schedulers, strict=False):
        target.load_state_dict(state)
    _set_extra_state(inner, checked.objects["model"])
    _set_rng_states(checked.objects["rng"], ranks)
    return checked.objects["extra"]


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    return {"the checkpoint": checkpoint.id} | {
        f"bytes of {name}": tensor.sample().hex() for name, tensor in checkpoint.tensors.items()
    }


@dataclass(frozen=True)
class _Wanted:
    """A tensor of the checkpoint that this rank needs a part of."""

    stored: SlicedTensor
    layout: Layout
    device: torch.device

    def read(self, coordinate: Coordinate) -> Tensor:
        """This rank's part."""
        local = torch.empty(
            local_shape(self.stored.shape, self.layout, coordinate.rank, coordinate.axis.size), dtype=self.stored.dtype
        )
        for piece in pieces(self.stored.shape, self.layout, coordinate):
            self.stored.read(piece.box, piece.of(local))
        return local.to(self.device)


@dataclass(frozen=True)
class _Checked:
    """What is loaded from where, after everything was found to fit."""

    model: Mapping[str, Item]
    """Stored name -> this rank's memory, of each parameter and buffer once."""
    wanted: Mapping[str, _Wanted]
    """What is read, by stored name: tensors of the model and of optimizers."""
    objects: Mapping[str, Any]
    """As `Contents.objects`, and 'rng'."""
    names: Sequence[Sequence[Sequence[str]]]
    """Optimizer, group -> names of parameters."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Stateful],
        ranks: Ranks,
    ) -> _Checked:
        """Checks everything.

        Raises:
            InputError: something does not fit.
        """
        objects = _objects(checkpoint)
        own = _fitting_model(checkpoint, model)
        wanted = {
            name: _Wanted(checkpoint.tensors[name], item.layout, torch.device("cpu")) for name, item in own.items()
        }
        names = parameter_names(model)
        groups = [group_names(optimizer, names) for optimizer in optimizers]
        _check_counts("optimizer", len(optimizers), len(objects["optimizers"]))
        _check_counts("scheduler", len(schedulers), len(objects["schedulers"]))
        for (saved_class, _), scheduler in zip(objects["schedulers"], schedulers, strict=False):
            _check_scheduler(scheduler, saved_class)
        for number, optimizer in enumerate(optimizers):
            _check_optimizer(optimizer, groups[number], objects["optimizers"][number])
            wanted |= _wanted_states(checkpoint, number, optimizer, groups[number])
        return cls(own, wanted, objects, groups)

    def read(self, coordinate: Coordinate) -> dict[str, Tensor]:
        """This rank's parts of all tensors."""
        shown, read, values = Progress("reading a checkpoint", coordinate.rank), 0, dict[str, Tensor]()
        for name, wanted in self.wanted.items():
            values[name] = wanted.read(coordinate)
            read += values[name].numel() * values[name].itemsize
            shown.show(read)
        shown.end()
        return values

    def set_optimizer(self, number: int, optimizer: Optimizer, values: Mapping[str, Tensor]) -> None:
        """Gives an optimizer its state."""
        saved, states = self.objects["optimizers"][number], dict[int, dict[str, object]]()
        index, groups = itertools.count(), []
        for names, settings in zip(self.names[number], saved["settings"], strict=True):
            indices = [next(index) for _ in names]
            groups.append({**settings, "params": indices})
            for i, name in zip(indices, names, strict=True):
                state = dict(saved["states"].get(name, {}))
                prefix, suffix = f"optimizer/{number}/", f"/{name}"
                state |= {
                    key[len(prefix) : -len(suffix)]: value
                    for key, value in values.items()
                    if key.startswith(prefix) and key.endswith(suffix)
                }
                if state:
                    states[i] = state
        optimizer.load_state_dict({"state": states, "param_groups": groups})


def _objects(checkpoint: Checkpoint) -> dict[str, Any]:
    data, path = checkpoint.objects(), checkpoint.objects_path
    known = {"optimizers": list, "schedulers": list, "rng": list, "model": dict, "extra": object}
    try:
        objects: dict[str, Any] = decode(data, allow_pickle=False)
        wrong = next((name for name, kind in known.items() if not isinstance(objects[name], kind)), None)
    except Exception as error:  # the bytes are not trusted, and decoding them may fail in any way
        raise broken(path, f"its objects are not what ts.save writes: {str(error).partition(chr(10))[0]}") from error
    if wrong is not None:
        raise broken(path, f"its {wrong} are a {type(objects[wrong]).__name__}")
    return objects


# --- what fits -------------------------------------------------------------------------------------------------------


def _fitting_model(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Item]:
    """Stored name -> this rank's memory of the model's tensors; tied names once."""
    found, state = dict[str, Item](), {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    saved = {name.removeprefix("model/") for name in (*checkpoint.tensors, *checkpoint.aliases) if name[:6] == "model/"}
    for name in (*sorted(saved - set(state)), *sorted(set(state) - saved)):
        where, other = ("the checkpoint", "the model") if name in saved else ("the model", "the checkpoint")
        raise _unfit(f"{name!r} is in {where} and not in {other}", checkpoint, "the model that was saved")
    first_names, stored_of, own_of = tied_names(model), dict[str, str](), dict[str, str]()
    for name, value in state.items():
        item, stored = Item.of(value), cast(SlicedTensor, checkpoint.find(f"model/{name}"))
        for what, here, there in (
            ("shape", tuple(item.shape), stored.shape),
            ("dtype", item.tensor.dtype, stored.dtype),
        ):
            if here != there:
                raise _unfit(
                    f"{name!r} has another {what} than the model's",
                    checkpoint,
                    f"the model that was saved; ts.shard(..., weights={str(checkpoint.folder)!r}) casts"
                    if what == "dtype"
                    else "the model that was saved",
                    f"it is {there} in the checkpoint, {here} in the model",
                )
        first = first_names.get(name, name)
        if stored_of.setdefault(first, stored.name) != stored.name:
            raise _unfit(f"{name!r} is tied to {first!r} in the model, and not in the checkpoint", checkpoint, _UNTIE)
        if own_of.setdefault(stored.name, first) != first:
            other = own_of[stored.name]
            raise _unfit(f"{name!r} is tied to {other!r} in the checkpoint, and not in the model", checkpoint, _UNTIE)
        found[stored.name] = item
    return found


_UNTIE = "the model that was saved, with the same tied parameters"


def _unfit(what: str, checkpoint: Checkpoint, attempt: str, why: str = "nothing was loaded") -> InputError:
    return InputError(what, where=str(checkpoint.folder), why=why, attempt=attempt)


def _check_counts(kind: str, given: int, saved: int) -> None:
    if given and given != saved:
        raise InputError(
            f"{saved} {kind}s were saved, and {given} are given",
            where=f"ts.load({kind}=...)",
            why="they are matched by their order",
            attempt=f"the {kind}s that were given to ts.save, or none of them",
        )


def _check_optimizer(optimizer: Optimizer, groups: Sequence[Sequence[str]], saved: Mapping[str, Any]) -> None:
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
            attempt="the optimizer that was saved, with the same parameters in each group; or None, to begin anew",
        )
    if any(isinstance(p, ShardedParameter) and p.is_split for g in optimizer.param_groups for p in g["params"]):
        check_class(optimizer)


def _check_scheduler(scheduler: Stateful, saved_class: str) -> None:
    if type(scheduler).__name__ != saved_class:
        raise InputError(
            "the scheduler is of another class than the saved one",
            where="ts.load(scheduler=...)",
            why=f"given: {type(scheduler).__name__}; saved: {saved_class}",
            attempt="the schedulers that were saved, in the same order; or None, to begin anew",
        )


def _wanted_states(
    checkpoint: Checkpoint, number: int, optimizer: Optimizer, groups: Sequence[Sequence[str]]
) -> dict[str, _Wanted]:
    """What the checkpoint holds of an optimizer's state, with the layouts of its parameters."""
    own = {
        name: p
        for group, names in zip(optimizer.param_groups, groups, strict=True)
        for p, name in zip(group["params"], names, strict=True)
    }
    found, prefix = dict[str, _Wanted](), f"optimizer/{number}/"
    for stored_name, stored in checkpoint.tensors.items():
        if not stored_name.startswith(prefix):
            continue
        _, _, name = stored_name.removeprefix(prefix).partition("/")
        if name not in own:
            raise _unfit(f"{stored_name!r} belongs to no parameter of the optimizer", checkpoint, "the saved optimizer")
        item = Item.of(own[name])
        is_by_element = stored.shape == item.shape
        found[stored_name] = _Wanted(stored, item.layout if is_by_element else _whole(stored), own[name].device)
    return found


def _whole(stored: SlicedTensor) -> Layout:
    """The layout of a state that is no number per element of its parameter, such as a step: all ranks have it."""
    if stored.shape:
        raise InputError(
            f"{stored.name!r} has another shape than its parameter",
            where="ts.load(optimizer=...)",
            why=f"it is {stored.shape}",
            attempt="the model that was saved",
        )
    return I


# --- what is no tensor -----------------------------------------------------------------------------------------------


def _set_extra_state(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Gives modules what their `get_extra_state` had returned."""
    for name, value in extra.items():
        path, _, _ = name.rpartition(".")
        model.get_submodule(path).set_extra_state(value)


def _set_rng_states(states: Sequence[bytes], ranks: Ranks) -> None:
    if ranks.replicas.rank < len(states):
        set_rng_states(decode(states[ranks.replicas.rank], allow_pickle=False)["the RNG state"])
    else:
        warnings.warn(
            f"the checkpoint has the RNG states of {len(states)} replicas; that of replica {ranks.replicas.rank} stays "
            "as it is",
            stacklevel=3,
        )
