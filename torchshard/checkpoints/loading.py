"""Reads a checkpoint into a model, optimizers and schedulers, for any plan and number of ranks.

check    names, shapes, dtypes and groups of everything, before reading any data
read     this rank's parts of the tensors, into new memory
set      the values, after every rank has read all of its parts
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict
from torch.utils import _pytree as pytree

from torchshard.checkpoints.contents import (
    TENSOR,
    Item,
    Stateful,
    as_list,
    generator_states,
    group_names,
    parameter_names,
    set_generator_states,
    stateful_modules,
    unwrapped,
)
from torchshard.checkpoints.fitting import (
    Wanted,
    check_counts,
    check_extra_state,
    check_optimizer,
    check_scheduler,
    matched_items,
    saved_objects,
    wanted_states,
)
from torchshard.checkpoints.saving import check_module, checked_folder
from torchshard.core.errors import InputError
from torchshard.core.user_files import warn
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.module import ShardedModule
from torchshard.runtime.optimizer_states import as_slice
from torchshard.runtime.state_forms import as_given, closed
from torchshard.weights.checkpoint_files import Checkpoint, read_checkpoint
from torchshard.weights.local_slice import LocalSlice, unwatched
from torchshard.weights.parameter import ShardedParameter
from torchshard.weights.progress import Progress


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
) -> Any:
    """Loads a checkpoint and the RNG states, so the run continues as if it had not stopped.

    All ranks must call it. The model may have a different plan or number of ranks, or be unsharded.
    Each rank reads only its slices. If a file is missing or damaged, or anything does not fit,
    all values stay unchanged. To load only weights into a model without storage, pass the folder to
    `shard(..., weights=folder)`.

    Args:
        model: must have the saved parameters and buffers, by name, shape and dtype.
        optimizer, scheduler: the arguments of `save`; None ignores their saved states.

    Returns:
        the `extra` of `save`.

    Raises:
        InputError: the checkpoint is incomplete or does not fit, or a file can't be read.
        DistributedError: the ranks read different checkpoints.
    """
    check_module(model, "ts.load(folder, model, optimizer)")
    ranks, inner = Ranks.of(model.parameters()), unwrapped(model)
    optimizers, schedulers = as_list(optimizer), as_list(scheduler)
    what = "a rank can't load the checkpoint"
    checkpoint = ranks.run_on_all(lambda: read_checkpoint(checked_folder(folder)), InputError, what)
    given: dict[str, Sequence[object]] = {"optimizers": optimizers, "schedulers": schedulers}
    classes = {f"the {kind}": ", ".join(type(value).__name__ for value in values) for kind, values in given.items()}
    attempt = "one folder that all ranks see, and the same optimizers and schedulers on every rank"
    ranks.verify(_facts(checkpoint) | classes, "the ranks load different checkpoints", attempt)

    def check() -> _Checked:
        return _Checked.of(checkpoint, inner, optimizers, schedulers, ranks)

    checked = ranks.run_on_all(check, InputError, what)
    values = ranks.run_on_all(lambda: checked.read(ranks), InputError, what)
    undo = list[Callable[[], object]]()
    try:
        ranks.run_on_all(lambda: checked.set_all(inner, optimizers, schedulers, values, undo), InputError, what)
    except Exception:
        for step in reversed(undo):
            step()
        raise
    for module in inner.modules():
        if isinstance(module, ShardedModule):
            module.note_loaded()
    return checked.objects["extra"]


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    return {"the checkpoint": checkpoint.id} | {
        f"bytes of {name}": tensor.sample().hex() for name, tensor in checkpoint.tensors.items()
    }


@dataclass(frozen=True)
class _Checked:
    """The checked parts of a checkpoint, ready to load."""

    model: Mapping[str, Item]
    """Stored name -> this rank's memory; each parameter and buffer appears once."""
    wanted: Mapping[str, Wanted]
    """Stored name -> the part to read; tensors of the model and of optimizers."""
    objects: StateDict
    """See `Contents.objects`."""
    rng_states: StateDict | None
    """This replica's states; None if the replica did not exist when they were saved."""
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
        objects, rng_states = saved_objects(checkpoint, ranks)
        check_extra_state(checkpoint, model, objects["model"])
        own = matched_items(checkpoint, model)
        wanted = {
            name: Wanted(checkpoint.tensors[name], item.sharding, torch.device("cpu")) for name, item in own.items()
        }
        names = parameter_names(model)
        groups = [group_names(optimizer, names) for optimizer in optimizers]
        check_counts("optimizer", len(optimizers), len(objects["optimizers"]))
        check_counts("scheduler", len(schedulers), len(objects["schedulers"]))
        for (saved_class, _), scheduler in zip(objects["schedulers"], schedulers, strict=False):
            check_scheduler(scheduler, saved_class)
        for number, optimizer in enumerate(optimizers):
            check_optimizer(optimizer, groups[number], objects["optimizers"][number])
            wanted |= wanted_states(checkpoint, number, optimizer, groups[number])
        return cls(own, wanted, objects, rng_states, groups)

    def read(self, ranks: Ranks) -> dict[str, Tensor]:
        """Reads this rank's parts of all tensors."""
        read, values = 0, dict[str, Tensor]()
        total = sum(wanted.bytes_in(ranks.place) for wanted in self.wanted.values())
        shown = Progress("reading a checkpoint", ranks.number, total)
        for name, wanted in self.wanted.items():
            values[name] = wanted.read(ranks.place)
            read += values[name].numel() * values[name].itemsize
            shown.show(read)
        shown.end()
        return values

    def set_all(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Stateful],
        values: dict[str, Tensor],
        undo: list[Callable[[], object]],
    ) -> None:
        """Sets all values; appends steps to `undo` that restore them if an error follows."""
        with torch.no_grad(), unwatched():
            for name, own in self.model.items():
                _swap(own.tensor, values[name])
                undo.append(functools.partial(_swap, own.tensor, values[name]))
        for number, optimizer in enumerate(optimizers):
            undo.append(functools.partial(optimizer.__dict__.update, dict(optimizer.__dict__)))
            self._set_optimizer(number, optimizer, values)
        for (_, state), scheduler in zip(self.objects["schedulers"], schedulers, strict=False):
            undo.append(functools.partial(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict())))
            scheduler.load_state_dict(state)
        changeable = stateful_modules(model, sharded=False)
        for path, module in changeable.items():
            undo.append(functools.partial(module.set_extra_state, module.get_extra_state()))
            module.set_extra_state(self.objects["model"][path])
        undo.append(functools.partial(set_generator_states, generator_states()))
        if self.rng_states is None:
            warn("the checkpoint has no RNG states of this replica: they stay as they are")
        else:
            set_generator_states(self.rng_states)

    def _set_optimizer(self, number: int, optimizer: Optimizer, values: Mapping[str, Tensor]) -> None:
        saved, states = self.objects["optimizers"][number], dict[str, dict[str, object]]()
        index, by_index, groups = itertools.count(), dict[int, str](), []
        for names, settings in zip(self.names[number], saved["settings"], strict=True):
            indices = [next(index) for _ in names]
            by_index |= dict(zip(indices, names, strict=True))
            # states are matched by these names; the optimizer keeps its own `param_names`
            groups.append(
                {**{key: value for key, value in settings.items() if key != "param_names"}, "params": indices}
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = {name: parameters[i] for i, name in by_index.items()}
        for name, state in saved["states"].items():
            states[name] = dict(state)
        for stored_name, value in values.items():
            kind, _, rest = stored_name.partition("/")
            owner, _, path = rest.partition("/")
            if (kind, owner) == ("optimizer", str(number)):
                key, _, name = path.partition("/")
                parameter, whole = own[name], self.wanted[stored_name].stored.shape
                is_slice = isinstance(parameter, ShardedParameter) and parameter.is_split and value.ndim > 0
                states.setdefault(name, {})[key] = as_slice(value, parameter, whole) if is_slice else value
        by_number = {i: _nested(states[name]) for i, name in by_index.items() if name in states}
        optimizer.load_state_dict({"state": by_number, "param_groups": groups})
        for i, state in by_number.items():
            parameter, loaded = parameters[i], _with_dtypes(optimizer.state[parameters[i]], state)
            is_split = isinstance(parameter, ShardedParameter) and parameter.is_split
            optimizer.state[parameter] = loaded if is_split else closed(loaded)


def _nested(state: dict[str, object]) -> dict[str, object]:
    """Returns a parameter's state with tensors in its lists instead of their paths."""

    def is_path(value: object) -> bool:
        return type(value) is dict and [*value] == [TENSOR]

    def filled(value: Any) -> object:
        return state[value[TENSOR]] if is_path(value) else value

    found = {key: pytree.tree_map(filled, value, is_leaf=is_path) for key, value in state.items()}
    inside = {v[TENSOR] for v in pytree.tree_leaves(state, is_leaf=is_path) if is_path(v)}
    return {key: value for key, value in found.items() if key not in inside}


def _swap(a: Tensor, b: Tensor) -> None:
    """Exchanges the values of two tensors."""
    before = a.clone()
    a.copy_(b)
    b.copy_(before)


def _with_dtypes(loaded: StateDict, saved: Mapping[str, object]) -> StateDict:
    """Undoes a cast: PyTorch casts all states but 'step' to their parameter's dtype."""
    loaded = as_given(loaded, saved)
    return loaded | {key: pytree.tree_map(_of_dtype, loaded[key], value) for key, value in saved.items()}


def _of_dtype(loaded: object, saved: object) -> object:
    if not (isinstance(loaded, Tensor) and isinstance(saved, Tensor)) or loaded.dtype == saved.dtype:
        return loaded
    moved = saved.detach().as_subclass(Tensor).to(loaded.device)
    return LocalSlice.sharing(moved, saved) if isinstance(saved, LocalSlice) else moved
