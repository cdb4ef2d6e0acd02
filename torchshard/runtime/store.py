"""The weights of a sharded model: this rank's slices under the unsharded names.

`WeightStore` cuts, gathers and loads them, and keeps them consistent when users move, cast, replace
or copy a module's tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from torchshard.capture import copy_attributes, without_storage
from torchshard.core.errors import InputError
from torchshard.core.layouts import I, Layout
from torchshard.core.modules import storage_id
from torchshard.runtime.initialized import Uninitialized
from torchshard.runtime.reading import compare_read, read_weights
from torchshard.runtime.shardings import Shardings
from torchshard.runtime.submodule import ShardedSubmodule
from torchshard.runtime.tensors import ModelTensors, owner, types_of
from torchshard.weights.folder import Weights
from torchshard.weights.following import SliceType
from torchshard.weights.local_slice import LocalSlice
from torchshard.weights.materialize import for_each_whole, local_tensor
from torchshard.weights.parameter import ShardedParameter


class WeightStore:
    """The parameters and buffers of a model split over a mesh."""

    def __init__(
        self, model: ShardedSubmodule, original: nn.Module, shardings: Shardings, weights: Weights | None, *, cut: bool
    ) -> None:
        """Takes this rank's slices of a model.

        Args:
            model: the sharded model, with tensors without memory.
            original: the unsharded model, with its values.
            weights: values that replace the original's.
            cut: False leaves all tensors without memory until `fix_layouts` knows the slices.
        """
        self.shardings, self.ranks, self.weights = shardings, shardings.ranks, weights
        self.tensors = ModelTensors(model, model.source)
        self.parameters: dict[str, ShardedParameter] = {}
        """First name -> parameter."""
        self._model = weakref.ref(model)
        self._replaced: list[tuple[str, Tensor]] = []
        """Tensors that users replaced before a graph fixed the layouts."""
        self._unfixed = [weakref.ref(self)]
        """The stores of a model and its copies: the first graph of one fixes the layouts of all."""
        self._uninitialized = Uninitialized()
        own = dict((*original.named_parameters(), *original.named_buffers()))
        if weights is not None and weights.conversions is not None:
            # `_weight_conversions`: `save_pretrained` reverses the conversions in this attribute (transformers 5.24.0).
            vars(model.source)["_weight_conversions"] = weights.conversions
        self._uncut = own | (weights.tensors if weights else {})
        empty = {n: without_storage(t, device=self._uncut[n].device if t.is_meta else None) for n, t in own.items()}
        persistent = set(original.state_dict())
        for name, names in self.tensors.names.items():
            module, leaf = owner(model, name)
            self.tensors.slot(name)[0][leaf] = empty[names[0]]
            if leaf in module._buffers and name not in persistent:
                # In public, only `register_buffer` does this, for a buffer that it registers (PyTorch 2.13.0).
                module._non_persistent_buffers_set.add(leaf)
        self._own_tensors()
        self.tensors.read()
        if cut:
            self._cut_all(shardings.of_model)

    def _own_tensors(self) -> None:
        """Marks all parameters and split buffers as this model's: PyTorch makes new ones in `cuda()` and in copies."""
        for name, names in self.tensors.names.items():
            (entries, leaf), of = self.tensors.slot(name), self.shardings.of(names[0])
            tensor = cast(Tensor, entries[leaf])
            if isinstance(tensor, ShardedParameter):
                tensor.sharding, tensor.owner = of, self._model
            elif isinstance(tensor, nn.Parameter):
                entries[leaf] = self._parameter(names[0], tensor)
            elif of.is_split:
                whole = SliceType(of, self.tensors.source(name).shape)
                LocalSlice.converted(tensor).become(whole, self.ranks, names[0], self._model())

    def _parameter(self, name: str, tensor: Tensor) -> ShardedParameter:
        """Returns the parameter with this first name and memory; tied names share one object."""
        parameter, source, of = self.parameters.get(name), self.tensors.source(name), self.shardings.of(name)
        if parameter is tensor:  # `torch.utils.swap_tensors` keeps the object and changes its class
            parameter = ShardedParameter.converted(tensor)
            parameter.become(SliceType(of, source.shape), self.ranks, name, self._model())
        elif parameter is None or storage_id(parameter) != storage_id(tensor):
            parameter = ShardedParameter.of(tensor, of, self.ranks, name, source.shape, self._model())
            copy_attributes(source, parameter)
            parameter.grad = tensor.grad
            self.parameters[name] = parameter
        return parameter

    def buffers(self) -> dict[str, Tensor]:
        """Returns the buffers by name."""
        tensors = self.tensors
        return {name: tensors.now[name] for name in tensors.names if tensors.first(name) not in self.parameters}

    def update_source(self) -> None:
        """Updates the unsharded model before a capture: `requires_grad`, and the values of one-element buffers.

        Forward may convert such buffers to Python numbers.
        """
        for name, parameter in self.tensors.parameters().items():
            self.tensors.source(name).requires_grad_(parameter.requires_grad)
        for name in self.tensors.names:
            source = self.tensors.source(name)
            value = self._uncut.get(name, self.tensors.now[name]).detach()
            if not isinstance(source, nn.Parameter) and source.numel() == 1 and not (source.is_meta or value.is_meta):
                source.untyped_storage().resize_(source.itemsize)
                source.copy_(value)

    # --- following the user's changes --------------------------------------------------------------------------------

    def follow(self) -> None:
        """Follows the user's replacements of tensors since the last call.

        Raises:
            InputError: a new tensor has a different shape from the slice, or replaces only one of tied tensors.
        """
        current, tensors = self.tensors.replaced(), self.tensors
        if current is None:
            return
        for name, (shape, _, _) in tensors.types.items():
            self._check_replaced(name, shape, current[name], current[tensors.first(name)])
        self._check_tied(current)
        if not self.shardings.is_fixed:  # `functional_call` puts them back after the first graph has cut the others
            self._replaced += [(name, t) for name, t in tensors.now.items() if t is not current[name]]
        tensors.now = cast(dict[str, Tensor], current)
        self._own_tensors()
        if types_of(tensors.now) != tensors.types:
            tensors.read()

    def _check_replaced(self, name: str, before: torch.Size, current: object, first: object) -> None:
        """Checks the tensor that a name refers to now; `first` is the tensor of the first of its tied names."""
        if current is first and isinstance(current, Tensor) and current.shape == before:
            return
        if current is first:
            shape = tuple(current.shape) if isinstance(current, Tensor) else current
            why = f"this rank's slice has shape {tuple(before)}, the new value {shape}"
        else:
            why = f"it is tied to {self.tensors.first(name)!r}, which holds another tensor now"
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
            first = self.tensors.first(name)
            other = firsts.setdefault(id(tensor), first)
            is_same = self.shardings.is_fixed and self.shardings.of(first) == self.shardings.of(other)
            if other != first and not is_same:
                raise InputError(
                    f"{name!r} was tied to {other!r} after sharding",
                    where=f"parameter or buffer {name!r}",
                    why="the plan splits each in its own way",
                    attempt="tie them in the unsharded model, then ts.shard",
                )

    def on_meta(self) -> list[str]:
        """Returns the names of the tensors without memory."""
        return [name for name, tensor in self.tensors.now.items() if tensor.is_meta]

    def read_moved(self, were_meta: Iterable[str]) -> None:
        """Reads the tensors after the model was moved or cast.

        Args:
            were_meta: the names of the tensors that had no memory before.
        """
        self._own_tensors()
        self.tensors.read()
        self._uninitialized.note(were_meta, self.tensors.now)

    def check_initialized(self) -> None:
        """Checks that all parameters and buffers have been written to.

        Raises:
            InputError: some lack memory, or have not been written to since `to_empty`.
        """
        self._uninitialized.check(self.tensors.now)

    def join_copy(self, model: ShardedSubmodule) -> None:
        """Attaches this store, itself a copy, to the copied model."""
        self._model = weakref.ref(model)
        if not self.shardings.is_fixed:
            self._unfixed.append(weakref.ref(self))
        self._own_tensors()
        self.tensors.read()

    @property
    def shared_by_copies(self) -> tuple[object, ...]:
        """The objects that copies of a model share: its ranks, and the stores of which a graph fixes the layouts."""
        return self.ranks, self.ranks.group, self.ranks.replicas, self._unfixed

    # --- cutting -----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # a tensor made in inference mode can't be trained
    def fix_layouts(self, layouts: Mapping[str, Layout]) -> None:
        """Cuts the parameters as the first graph needs them; later graphs are planned for these layouts.

        It also cuts copies made before, so that moving averages combine slices of the same shape.

        Args:
            layouts: the layouts over the model's axis, by name.
        """
        stores = [store for reference in self._unfixed if (store := reference()) is not None]
        self._unfixed.clear()
        for store in stores:
            store.follow()
            store._fix_own_layouts(layouts)

    def _fix_own_layouts(self, layouts: Mapping[str, Layout]) -> None:
        tensors = self.tensors
        replaced = [(n, t, storage_id(t) == storage_id(tensors.now[n])) for n, t in self._replaced]
        self._replaced.clear()
        if self._uncut:
            self._cut_all(layouts)
        else:
            for name, layout in layouts.items():
                if self.shardings.of_model.get(name, I) != layout:
                    whole = self.whole(tensors.now[name].detach(), name)
                    self.shardings.update({name: layout})
                    self._cut(name, whole)
        self.shardings.update(layouts)
        for name, tensor, is_same in replaced:
            if tensor.shape == tensors.source(name).shape:
                own = self.shardings.local(tensors.first(name), tensor.detach())
                tensor.data = tensors.now[name].detach() if is_same else own
        self._own_tensors()
        self.shardings.fix()

    def _cut_all(self, layouts: Mapping[str, Layout]) -> None:
        """Gives all tensors memory: this rank's slices of the unsharded tensors."""
        self.shardings.update(layouts)
        uncut, self._uncut = self._uncut, {}
        if self.weights is not None:
            read_weights(self.weights, self.shardings, self._hold)
            read = sorted(self.weights.read.names)
            compare_read({name: self.tensors.now[name] for name in read}, self.shardings)
            uncut = {name: tensor for name, tensor in uncut.items() if name not in self.weights.read.names}
        for_each_whole(uncut, self._cut)

    def _cut(self, name: str, whole: Tensor) -> None:
        self._hold(name, local_tensor(whole, self.shardings.of(name), self.ranks.place).detach())
        self.shardings.note_distinct(name, whole)

    def _hold(self, name: str, local: Tensor) -> None:
        """Stores this rank's slice in a parameter or buffer, and keeps the object: optimizers may refer to it."""
        tensors = self.tensors
        local = local if local.is_meta else local.to(tensors.now[name].device)
        tensors.now[name].data = local
        tensors.types |= types_of(dict.fromkeys(tensors.names[name], local))  # a tied tensor has several names

    # --- gathering and loading ---------------------------------------------------------------------------------------

    def whole(self, tensor: Tensor, name: str) -> Tensor:
        """Returns the full tensor of a slice, gathered from all ranks; a replicated tensor as it is."""
        of, source = self.shardings.of(name), self.tensors.source(name)
        if tensor.is_meta and of.is_split:
            return torch.empty_like(source, device="meta")
        return self.ranks.gathered(tensor, of, source.shape)

    def whole_copy(self, tensor: Tensor, name: str) -> Tensor:
        """Returns a copy of the full tensor of a slice, gathered from all ranks."""
        whole = self.whole(tensor.detach(), name)
        return whole.clone() if storage_id(whole) == storage_id(tensor) else whole

    def load_whole(self, name: str, whole: Tensor) -> None:
        """Loads this rank's slice of a full tensor, which all ranks have."""
        first = self.tensors.first(name)
        with torch.no_grad():
            self.tensors.now[name].copy_(self.shardings.local(first, whole))
        if name == first:
            self.shardings.note_distinct(name, whole)

    def note_loaded(self) -> None:
        """Compares parameters and buffers after all ranks have loaded their slices of one checkpoint.

        Raises:
            DistributedError: replicated values differ.
        """
        self.follow()
        compare_read(dict(sorted(self.tensors.by_first_name().items())), self.shardings)
