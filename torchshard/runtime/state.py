"""The parameters and buffers of a sharded model: this rank's slices under the unsharded names, and their shardings.

`State` keeps them consistent when users move, cast, replace, load or copy a module's tensors. It
contains the unsharded model without memory, from which graphs are captured.
"""

from __future__ import annotations

import json
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn

from torchshard.capture import copy_attributes, model_without_storage, shared_names, views_kept, without_storage
from torchshard.core.errors import DistributedError, InputError
from torchshard.core.hashing import hash_tensor, spread
from torchshard.core.layouts import I, Layout, Shard
from torchshard.core.mesh import MODEL
from torchshard.core.modules import named_tensors, storage_id
from torchshard.core.sharding import UNSHARDED, Sharding
from torchshard.core.user_files import is_user_file
from torchshard.distributed.consistency import gather_bytes
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.compiled import GraphCache
from torchshard.runtime.digests import SAMPLED, are_distinct, describe_contents
from torchshard.runtime.submodule import ShardedSubmodule, no_method
from torchshard.weights.callers import method_of
from torchshard.weights.folder import Weights
from torchshard.weights.following import SliceType
from torchshard.weights.materialize import ReadSlices, for_each_whole, local_tensor, read_slices
from torchshard.weights.parameter import ShardedParameter
from torchshard.weights.slice_values import Slice, SliceValue
from torchshard.weights.state_slices import (
    SlicePlace,
    StateSlice,
    is_same_slice,
    place_of,
    place_text,
    slice_place,
    wants_whole,
)

_LOG = logging.getLogger(__name__)


class State(ShardedSubmodule):
    """The parameters and buffers of a model split over a group."""

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, Layout],
        ranks: Ranks,
        *,
        of_batch: Mapping[str, Mapping[str, Layout]] | None = None,
        cut: bool = True,
        weights: Weights | None = None,
    ) -> None:
        """Takes this rank's slices of a model.

        Args:
            layouts: the layouts of parameters and buffers over the model's axis, by name.
            of_batch: their layouts over each data axis, by the axis's name.
            weights: values that replace the model's.
            cut: False leaves all tensors without memory until `_fix_layouts` knows the slices.
        """
        super().__init__(model_without_storage(model))
        self._ts_ranks, self._ts_group = ranks, ranks.group
        self._ts_layouts: dict[str, Layout] = dict(layouts)
        self._ts_of_batch: dict[str, Mapping[str, Layout]] = dict(of_batch or {})
        self._ts_fixed = False  # whether a graph has fixed the layouts
        self._ts_swapped: list[tuple[str, Tensor]] = []  # tensors that users replaced before that
        self._ts_unfixed = [weakref.ref(self)]  # with its copies: the first graph of one fixes the layouts of all
        self._ts_names = shared_names(self.source)
        self._ts_parameters: dict[str, ShardedParameter] = {}
        self._ts_distinct: dict[str, dict[str, bool]] = {axis: {} for axis in ranks.groups}
        self._ts_uninitialized: dict[str, tuple[int, int]] = {}  # name -> (version, sample) after `to_empty`
        self._ts_graphs = GraphCache()
        self._ts_left_places = set[tuple[str, ...]]()
        own = dict((*model.named_parameters(), *model.named_buffers()))
        self._ts_weights = weights
        if weights is not None and weights.conversions is not None:
            cast(Any, self.source)._weight_conversions = weights.conversions
        self._ts_uncut = own | (weights.tensors if weights else {})
        self._register(
            {n: without_storage(t, device=self._ts_uncut[n].device if t.is_meta else None) for n, t in own.items()},
            model,
        )
        for module in self.modules():
            cast(ShardedSubmodule, module).fix_names()
        self._read_tensors()
        self._own_tensors()
        if cut:
            self._cut_all(layouts)
        self.register_load_state_dict_pre_hook(_cut_whole)
        for module in self.modules():
            module.register_load_state_dict_pre_hook(_check_part)

    def _register(self, state: Mapping[str, Tensor], model: nn.Module) -> None:
        """Makes the submodules and stores this rank's tensors in them."""
        for path, _ in self.source.named_modules(remove_duplicate=False):
            self._submodule(path)
        persistent = set(model.state_dict())
        for name, names in self._ts_names.items():
            (module, leaf), tensor = self._owner(name), state[names[0]]
            if isinstance(tensor, nn.Parameter):
                module._parameters[leaf] = self._parameter(names[0], tensor)
            else:
                module._buffers[leaf] = tensor
                if name not in persistent:
                    module._non_persistent_buffers_set.add(leaf)

    def _note_distinct(self, name: str, whole: Tensor, of: Sharding) -> None:
        """Notes whether the ranks' slices of a parameter differ; if so, equal slices later are an error."""
        for axis, distinct in self._ts_distinct.items():
            distinct[name] = are_distinct(whole, of, self._ts_ranks.place, axis)
        self._ts_watched = False

    def _parameter(self, name: str, tensor: Tensor) -> ShardedParameter:
        """Returns the parameter with this first name and memory; tied names share one object."""
        parameter = self._ts_parameters.get(name)
        if parameter is None or storage_id(parameter) != storage_id(tensor):
            source = self._source_tensor(name)
            parameter = ShardedParameter.of(tensor, self._sharding(name), self._ts_ranks, name, source.shape, self)
            copy_attributes(source, parameter)
            parameter.grad = tensor.grad
            self._ts_parameters[name] = parameter
        return parameter

    def _own_tensors(self) -> None:
        """Marks all parameters and split buffers as this model's: PyTorch makes new ones in `cuda()` and in copies."""
        for name, names in self._ts_names.items():
            entries, leaf = _slot(*self._owner(name))
            tensor, of = cast(Tensor, entries[leaf]), self._sharding(names[0])
            if isinstance(tensor, ShardedParameter):
                tensor.sharding, tensor.owner = of, weakref.ref(self)
            elif isinstance(tensor, nn.Parameter):
                entries[leaf] = self._parameter(names[0], tensor)
            elif of.is_split:
                whole = SliceType(of, self._source_tensor(name).shape)
                SliceValue.marked(tensor, whole, self._ts_ranks, names[0], weakref.ref(self))

    def _submodule(self, path: str) -> ShardedSubmodule:
        """Returns the submodule at a path, and makes it if it is missing.

        It reads the dicts of submodules, because attributes of this class, such as `plan` and
        `group`, may hide a submodule.
        """
        module: ShardedSubmodule = self
        for part in path.split(".") if path else ():
            if part not in module._modules:
                module._modules[part] = ShardedSubmodule(
                    module.source.get_submodule(part), self.__dict__["_ts_assigned"]
                )
            module = cast(ShardedSubmodule, module._modules[part])
        return module

    def _owner(self, name: str) -> tuple[ShardedSubmodule, str]:
        """Returns the submodule that has a parameter or buffer, and the last part of the name."""
        path, _, leaf = name.rpartition(".")
        return self._submodule(path), leaf

    def _source_tensor(self, name: str) -> Tensor:
        """Returns the unsharded model's parameter or buffer, without memory."""
        module, leaf = self._owner(name)
        tensor: Tensor = getattr(module.source, leaf)
        return tensor

    def give_source_numbers(self) -> None:
        """Copies values into the source's buffers of one element: forward may make Python numbers of them."""
        for name in self._ts_names:
            source = self._source_tensor(name)
            value = self._ts_uncut.get(name, self._ts_tensors[name]).detach()
            if not isinstance(source, nn.Parameter) and source.numel() == 1 and not (source.is_meta or value.is_meta):
                source.untyped_storage().resize_(source.itemsize)
                source.copy_(value)

    # --- following what the user does to parameters ------------------------------------------------------------------

    def _read_tensors(self) -> None:
        """Reads the tensors from the submodules, updates the source's dtypes and devices, and drops old graphs."""
        self._ts_slots = {name: _slot(*self._owner(name)) for name in self._ts_names}
        self._ts_tensors = {name: cast(Tensor, entries[leaf]) for name, (entries, leaf) in self._ts_slots.items()}
        self._ts_types = _types(self._ts_tensors)
        for names in dict.fromkeys(self._ts_names.values()):
            tensor, source = self._ts_tensors[names[0]], self._source_tensor(names[0])
            if (tensor.dtype, tensor.device) != (source.dtype, source.device):
                moved = without_storage(source, dtype=tensor.dtype, device=tensor.device)
                for name in names:
                    module, leaf = self._owner(name)
                    _slot(module.source, leaf)[0][leaf] = moved
        self._ts_graphs.clear()
        self._ts_watched = False
        self._ts_source_modules = tuple(self.source.modules())
        self._ts_fitting_devices: set[tuple[torch.device, ...]] = set()

    @property
    def weights(self) -> Weights | None:
        """The weights read from the files that `shard` was given; None without files."""
        return self._ts_weights

    def _follow(self) -> None:
        """Follows the user's replacements of tensors since the last call.

        Raises:
            InputError: a new tensor has another shape than the slice, or replaces only one of tied tensors.
        """
        current = {name: entries.get(leaf) for name, (entries, leaf) in self._ts_slots.items()}
        is_same = all(map(operator.is_, current.values(), self._ts_tensors.values()))
        if is_same and _types(self._ts_tensors) == self._ts_types:  # `p.data = ...` keeps the object
            return
        for name, (shape, _, _) in self._ts_types.items():
            self._check_replaced(name, shape, current[name], current[self._ts_names[name][0]])
        self._check_tied(current)
        if not self._ts_fixed:  # `functional_call` puts them back after the first graph has cut the others
            self._ts_swapped += [(name, t) for name, t in self._ts_tensors.items() if t is not current[name]]
        self._ts_tensors = cast(dict[str, Tensor], current)
        self._own_tensors()
        if _types(self._ts_tensors) != self._ts_types:
            self._read_tensors()

    def _check_replaced(self, name: str, before: torch.Size, current: object, first: object) -> None:
        """Checks the tensor that a name refers to now; `first` is the tensor of the first of its tied names."""
        if current is first and isinstance(current, Tensor) and current.shape == before:
            return
        if current is first:
            shape = tuple(current.shape) if isinstance(current, Tensor) else current
            why = f"this rank's slice has shape {tuple(before)}, the new value {shape}"
        else:
            why = f"it is tied to {self._ts_names[name][0]!r}, which holds another tensor now"
        raise InputError(
            f"{name!r} was replaced by an incompatible tensor",
            where=f"parameter or buffer {name!r}",
            why=why,
            attempt="a slice of the same shape, under all its names; or load_full_state_dict",
        )

    def _check_tied(self, current: Mapping[str, object]) -> None:
        """Checks that names which share a tensor now, but did not at first, have the same sharding."""
        firsts: dict[int, str] = {}
        for name, tensor in current.items():
            first = self._ts_names[name][0]
            other = firsts.setdefault(id(tensor), first)
            if other != first and not (self._ts_fixed and self._sharding(first) == self._sharding(other)):
                raise InputError(
                    f"{name!r} was tied to {other!r} after sharding",
                    where=f"parameter or buffer {name!r}",
                    why="the plan splits each in its own way",
                    attempt="tie them in the unsharded model, then ts.shard",
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts (`.to`, `.cuda`, `.double`, `.to_empty`); later calls capture graphs for the new tensors."""
        were_meta = [name for name, tensor in self._ts_tensors.items() if tensor.is_meta]
        super()._apply(fn, recurse)
        self._own_tensors()
        self._read_tensors()
        for name in were_meta:
            tensor = self._ts_tensors[name]
            if not tensor.is_meta:
                self._ts_uninitialized[name] = (tensor._version, hash_tensor(spread(tensor, 64)))
                tensor.touched = False  # type: ignore[attr-defined]
        return self

    def check_initialized(self) -> None:
        """Checks that all parameters and buffers have been written.

        Raises:
            InputError: some lack memory, or have not been written since `to_empty`.
        """
        without_memory = [name for name, tensor in self._ts_tensors.items() if tensor.is_meta]
        self._forget_written()
        if without_memory:
            raise InputError(
                f"{len(without_memory)} parameters and buffers have no memory",
                where=_first_names(without_memory),
                why="the model is on the meta device",
                attempt="shard a model that has its weights",
            )
        if self._ts_uninitialized:
            names = list(self._ts_uninitialized)
            raise InputError(
                f"{len(names)} parameters and buffers hold uninitialised memory",
                where=_first_names(names),
                why="they were on the meta device, and no state dict that was loaded since to_empty() has them; "
                "buffers that a constructor computes are in none",
                attempt=f"in no_grad() model.get_parameter({names[0]!r}).copy_(...), or get_buffer; or shard a "
                "model that has its weights",
            )

    def _forget_written(self) -> None:
        """Removes tensors that were written since `to_empty` from the uninitialised ones.

        A write through `.data` does not raise the version. So access to `.data`, and new values in
        a sample, count as well.
        """
        for name, noted in list(self._ts_uninitialized.items()):
            tensor = self._ts_tensors[name]
            if getattr(tensor, "touched", False) or (tensor._version, hash_tensor(spread(tensor, 64))) != noted:
                del self._ts_uninitialized[name]

    # --- layouts -----------------------------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The group that the model is split over."""
        return self._ts_group

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each parameter and buffer over the group, by its first name."""
        return dict(self._ts_layouts)

    def _sharding(self, name: str) -> Sharding:
        """Returns the sharding of the parameter or buffer with this first name."""
        axes = {MODEL: self._ts_layouts, **self._ts_of_batch}
        return self._ts_ranks.sharding({axis: layouts.get(name, I) for axis, layouts in axes.items()})

    @torch.inference_mode(False)  # a tensor made in inference mode can't be trained
    def _fix_layouts(self, layouts: Mapping[str, Layout]) -> None:
        """Cuts the parameters as the first graph needs them; later graphs are planned for these layouts.

        It also cuts copies made before, so that moving averages combine slices of the same shape.
        """
        copies = [model for reference in self._ts_unfixed if (model := reference()) is not None]
        self._ts_unfixed.clear()
        for model in copies:
            model._follow()
            model._fix_own_layouts(layouts)

    def _fix_own_layouts(self, layouts: Mapping[str, Layout]) -> None:
        swapped = [(n, t, storage_id(t) == storage_id(self._ts_tensors[n])) for n, t in self._ts_swapped]
        self._ts_swapped.clear()
        if self._ts_uncut:
            self._cut_all(layouts)
        else:
            for name, layout in layouts.items():
                if self._ts_layouts.get(name, I) != layout:
                    whole = self._whole(self._ts_tensors[name].detach(), name)
                    self._ts_layouts[name] = layout
                    self._cut(name, whole)
        self._ts_layouts.update(layouts)
        for name, tensor, is_same in swapped:
            if tensor.shape == self._source_tensor(name).shape:
                of = self._sharding(self._ts_names[name][0])
                own = of.local(tensor.detach(), self._ts_ranks.place)
                tensor.data = self._ts_tensors[name].detach() if is_same else own
        self._own_tensors()
        self._ts_fixed, self._ts_watched = True, False

    def _cut_all(self, layouts: Mapping[str, Layout]) -> None:
        """Gives all tensors memory: this rank's slices of the unsharded tensors."""
        self._ts_layouts.update(layouts)
        uncut, self._ts_uncut = self._ts_uncut, {}
        if self._ts_weights is not None:
            self._read_weights(self._ts_weights)
            uncut = {name: tensor for name, tensor in uncut.items() if name not in self._ts_weights.read.names}
        for_each_whole(uncut, self._cut)

    def _read_weights(self, weights: Weights) -> None:
        """Reads this rank's slices from files.

        Raises:
            InputError: a file can't be read on some rank.
            DistributedError: the ranks have read different files.
        """

        def put(name: str, local: Tensor) -> None:
            self._hold(name, local.to(self._ts_tensors[name].device))

        def read() -> ReadSlices:
            held = {name: self._sharding(name) for name in weights.tensors}
            return read_slices(weights.tensors, held, self._ts_ranks.place, put)

        weights.read = self._ts_ranks.run_on_all(read, InputError, "a rank can't read its weights")
        _LOG.info("%s", weights)
        kept = {name: self._ts_tensors[name] for name in sorted(weights.read.names)}
        self._compare_read(kept)

    def _compare_read(self, tensors: Mapping[str, Tensor]) -> None:
        """Compares tensors that each rank has read from files, and notes which slices differ between ranks.

        Raises:
            DistributedError: replicas differ, because the ranks have read different files.
        """
        of, what = {name: self._sharding(name) for name in tensors}, "the ranks read different weights"
        hashes = [hash_tensor(spread(t, SAMPLED) if of[name].is_split else t) for name, t in tensors.items()]
        for axis, group in self._ts_ranks.groups.items():
            gathered = gather_bytes(group, "shard", lambda: json.dumps(hashes).encode())
            everyone = [json.loads(data) for data in gathered]
            found = {name: [of_rank[i] for of_rank in everyone] for i, name in enumerate(tensors)}
            split = {name for name in tensors if isinstance(of[name].over(axis), Shard)}
            self._ts_distinct[axis] |= {name: name in split and len(set(here[:2])) == 2 for name, here in found.items()}
            whole = {name: here for name, here in found.items() if name not in split}
            self._ts_ranks.run_on_all(partial(_check_read, whole), DistributedError, what)
        self._ts_watched = False

    def note_loaded(self) -> None:
        """Compares parameters and buffers after all ranks have loaded their slices of one checkpoint.

        Raises:
            DistributedError: replicated values differ.
        """
        self._follow()
        self._compare_read(dict(sorted(self._tensors_by_first_name().items())))

    def _tensors_by_first_name(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by first name, tied ones once."""
        return {name: t for name, t in self._ts_tensors.items() if self._ts_names[name][0] == name}

    def _cut(self, name: str, whole: Tensor) -> None:
        of = self._sharding(name)
        local = local_tensor(whole, of, self._ts_ranks.place).detach()
        self._hold(name, local if local.is_meta else local.to(self._ts_tensors[name].device))
        self._note_distinct(name, whole, of)

    def _hold(self, name: str, local: Tensor) -> None:
        """Stores this rank's slice in a parameter or buffer, and keeps the object: optimizers may refer to it."""
        self._ts_tensors[name].data = local
        self._ts_types |= _types(dict.fromkeys(self._ts_names[name], local))  # a tied tensor has several names

    def _whole(self, tensor: Tensor, name: str) -> Tensor:
        """Returns the full tensor of a slice, gathered from all ranks; a replicated tensor as it is."""
        of = self._sharding(name)
        if tensor.is_meta and of.is_split:
            return torch.empty_like(self._source_tensor(name), device="meta")
        return self._ts_ranks.gathered(tensor, of, self._source_tensor(name).shape)

    # --- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's slices under the unsharded names; each slice knows its place in the full tensor.

        `torch.distributed.checkpoint` saves and loads them as parts of full tensors, with any
        number of ranks. For its `get_state_dict` with `full_state_dict=True` this returns full
        tensors, in a collective call.
        """
        caller = sys._getframe(1)
        method = method_of(caller.f_globals.get("__name__", ""))
        if method and not is_user_file(caller.f_code.co_filename):
            raise no_method(method, "it takes a state dict for the whole model's", "ts.save_pretrained(model, folder)")
        state = nn.Module.state_dict(self, *args, **kwargs)
        if kwargs.get("keep_vars"):
            return state
        prefix, is_whole = kwargs.get("prefix", ""), wants_whole()
        for name, names in self._ts_names.items():
            local = state.get(prefix + name)
            if is_whole and isinstance(local, Tensor):
                state[prefix + name] = self._whole_copy(local, names[0])
            elif isinstance(local, Tensor) and self._sharding(names[0]).is_split:
                state[prefix + name] = StateSlice.of(local, self._place(names[0]))
        return state

    def _place(self, name: str) -> SlicePlace:
        return slice_place(name, self._sharding(name), self._ts_ranks.place, self._source_tensor(name).shape)

    def cut_state(self, state: dict[str, object], prefix: str) -> None:
        """Replaces full tensors in a state dict by this rank's slices: a collective call.

        `torch.distributed.checkpoint` loads such state dicts with
        `StateDictOptions(full_state_dict=True)`.

        Raises:
            DistributedError: the ranks were given different tensors.
        """
        own = {name: state.get(prefix + name) for name in self._ts_names}
        whole = {
            name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor) and place_of(tensor) is None
        }
        what = "the ranks load different state dicts"
        self._ts_ranks.verify(
            describe_contents(whole), what, "the same state dict on every rank, or broadcast_from_rank0"
        )
        for name, tensor in whole.items():
            first = self._ts_names[name][0]
            if tensor.shape == self._source_tensor(first).shape:
                state[prefix + name] = self._sharding(first).local(tensor, self._ts_ranks.place)
                self._note_distinct(first, tensor, self._sharding(first))

    def computed_buffers(self) -> dict[str, Tensor]:
        """Gathers the full buffers that state dicts omit: a collective call."""
        stored = self.state_dict().keys()
        return {
            name: self._whole_copy(t, self._ts_names[name][0]) for name, t in self.named_buffers() if name not in stored
        }

    def stored_tensors(self) -> dict[str, tuple[str, Tensor, Callable[[], Tensor]]]:
        """Returns {name: (first name, this rank's slice, function that gathers the full tensor)} of a state dict."""
        found: dict[str, tuple[str, Tensor, Callable[[], Tensor]]] = {}
        for name, value in self.state_dict().items():
            first = self._ts_names[name][0]
            found[name] = first, value, partial(self._whole, self._ts_tensors[first].detach(), first)
        return found

    def full_state_dict(self) -> dict[str, Tensor]:
        """Gathers the unsharded model's state dict, copied on every rank: a collective call."""
        self._follow()
        return {
            name: self._whole_copy(tensor, self._ts_names[name][0])
            for name, tensor in nn.Module.state_dict(self).items()
        }

    def _whole_copy(self, tensor: Tensor, name: str) -> Tensor:
        whole = self._whole(tensor.detach(), name)
        return whole.clone() if storage_id(whole) == storage_id(tensor) else whole

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads this rank's slices of an unsharded state dict: a collective call.

        Raises:
            InputError: a name is missing, unknown, or has another shape than the unsharded model's.
            DistributedError: the ranks were given different tensors.
        """
        what = "the ranks can't load this state dict together"
        names = dict.fromkeys(nn.Module.state_dict(self))
        shapes = {name: self._source_tensor(name).shape for name in names}
        self._ts_ranks.run_on_all(lambda: check_full_state(state, shapes), InputError, what)
        facts = describe_contents(state)
        what = "the ranks load different state dicts"
        self._ts_ranks.verify(facts, what, "the same state dict on every rank")
        self._follow()
        for name, tensor in state.items():
            first = self._ts_names[name][0]
            with torch.no_grad():
                self._ts_tensors[name].copy_(self._sharding(first).local(tensor, self._ts_ranks.place))
            if name == first:
                self._note_distinct(name, tensor, self._sharding(name))

    def change_whole(self, part: nn.Module, change: Callable[[nn.Module], None], name: str) -> None:
        """Changes a submodule's tensors and attributes by code that needs full tensors: a collective call.

        Args:
            change: receives the unsharded module, which has full values while this runs.
            name: the name of the change, equal on all ranks.
        """
        path = next(path for path, module in self.named_modules() if module is part)
        what = "the ranks change different parts of the model"
        self._ts_ranks.verify({"the part and its change": f"{path}.{name}"}, what, "the same call on every rank")
        self._follow()
        owned = [name for name in self._ts_names if name.startswith(f"{path}.")]
        first = {name: self._ts_names[name][0] for name in owned}
        whole = {name: self._whole_parameter(name) for name in dict.fromkeys(first.values())}
        slots = {name: _slot(module.source, leaf) for name in owned for module, leaf in [self._owner(name)]}
        before = {name: entries[leaf] for name, (entries, leaf) in slots.items()}
        try:
            for name, (entries, leaf) in slots.items():
                entries[leaf] = whole[first[name]]
            change(cast(ShardedSubmodule, part).source)
        finally:
            for name, (entries, leaf) in slots.items():
                entries[leaf] = before[name]
        for name, tensor in whole.items():
            with torch.no_grad():
                self._ts_tensors[name].copy_(self._sharding(name).local(tensor.detach(), self._ts_ranks.place))
            self._note_distinct(name, tensor.detach(), self._sharding(name))
        self._ts_assigned.add(path)

    def _whole_parameter(self, name: str) -> Tensor:
        """Returns a copy of the full parameter or buffer with this first name."""
        held = self._ts_tensors[name]
        whole = self._whole_copy(held, name)
        return nn.Parameter(whole, held.requires_grad) if isinstance(held, nn.Parameter) else whole

    # --- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Returns a copy with its own parameters, in the same group; it captures its own graphs."""
        source = self.source
        memo.update({id(t): without_storage(t) for t in (*source.parameters(), *source.buffers())})
        memo.update(views_kept(source))
        shared = (self._ts_ranks, self._ts_ranks.group, self._ts_ranks.replicas, self._ts_unfixed)
        memo.update({id(each): each for each in shared})
        copied = ShardedSubmodule.__deepcopy__(self, memo)
        if not self._ts_fixed:
            self._ts_unfixed.append(weakref.ref(copied))
        copied._own_tensors()
        copied._read_tensors()
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InputError(
            "a sharded model can't be pickled",
            where="ShardedModule",
            why="it belongs to the process group of its ranks",
            attempt="torch.save(model.state_dict()) for this rank's slices, or model.full_state_dict() for the whole",
        )


def _cut_whole(model: State, state: dict[str, object], prefix: str, *others: object) -> None:
    """Cuts full tensors before a state dict is loaded into this model, or into a model that contains it."""
    if wants_whole():
        model.cut_state(state, prefix)


def _check_part(module: nn.Module, state: Mapping[str, object], prefix: str, *others: object) -> None:
    """Checks a state dict before it is loaded into a model, or into one submodule, as for a pretrained backbone."""
    for name, held in named_tensors(module).items():
        given = state.get(prefix + name)
        if isinstance(given, Tensor):
            _check_slice(prefix + name, held, given)


def _check_slice(name: str, held: Tensor, given: Tensor) -> None:
    """Raises InputError for slices of another rank, number of ranks or plan, and for full tensors of split ones."""
    own = held.place if isinstance(held, Slice) else slice_place(name, UNSHARDED, {}, held.shape)
    place = place_of(given)
    fits = given.shape == held.shape if place is None else is_same_slice(place, own)
    if fits:
        return
    wrong, advice = "another slice of", "load_full_state_dict, which takes whole tensors on every rank"
    if place is None and tuple(given.shape) == own[4]:
        wrong = "the whole of"
    elif place is not None and tuple(held.shape) == place[4]:
        wrong = "a slice of"
        advice = f"a model that is split already: ts.shard with example_inputs=, or one call; or {advice}"
    else:
        advice = f"the state dict that this rank saved; between numbers of ranks {advice}"
    given_text = f"{tuple(given.shape)}" if place is None else place_text(place)
    raise InputError(
        f"the state dict has {wrong} {own[0]!r}",
        where="load_state_dict",
        why=f"given: {given_text}; wanted: {tuple(held.shape)}, {place_text(own)}",
        attempt=advice,
    )


def _check_read(whole: Mapping[str, Sequence[object]]) -> None:
    """Checks that the ranks' hashes of replicated tensors are equal.

    Raises:
        DistributedError: they differ.
    """
    for name, here in whole.items():
        if len(set(here)) > 1:
            raise DistributedError(
                "the ranks read different weights",
                where=name,
                why=f"its values are {len(set(here))} different ones on {len(here)} ranks",
                attempt="the same files on every rank",
            )


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _types(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}


def check_full_state(state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Checks that a state dict has exactly these names and shapes, which are the unsharded model's.

    Raises:
        InputError: a name is missing or unknown, or a shape differs.
    """
    for name in [*shapes, *state]:
        given = tuple(state[name].shape) if name in state else "missing"
        expected = tuple(shapes[name]) if name in shapes else "no such tensor"
        if given != expected:
            raise InputError(
                f"the state dict does not fit at {name!r}",
                where="load_full_state_dict",
                why=f"given: {given}; the unsharded model has {expected}",
                attempt="a state dict of the unsharded model; load_state_dict takes this rank's slices",
            )


def _slot(module: nn.Module, leaf: str) -> tuple[dict[str, Tensor | None], str]:
    """Returns the dict of a module that contains a parameter or buffer, and its key there."""
    entries = module._parameters if leaf in module._parameters else module._buffers
    return cast(dict[str, Tensor | None], entries), leaf
