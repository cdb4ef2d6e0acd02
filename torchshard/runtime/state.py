"""What a sharded model holds: the slices of parameters and buffers under the unsharded names, and their layouts."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from torchshard.capture import model_without_storage, shared_names, without_storage
from torchshard.core.errors import DistributedError, InputError
from torchshard.core.hashing import hash_tensor
from torchshard.core.layouts import I, Layout, Shard, parts_of, split
from torchshard.distributed.consistency import run_on_all_ranks, verify_equal
from torchshard.distributed.group import Group
from torchshard.distributed.kernels import convert
from torchshard.ir.listing import value_text
from torchshard.runtime.history import are_distinct
from torchshard.runtime.submodule import ShardedSubmodule
from torchshard.weights.materialize import local_state
from torchshard.weights.parameter import ShardedParameter
from torchshard.weights.state_slices import PLACE, Place, StateSlice, refuse_checkpointing, shown_place


class State(ShardedSubmodule):
    """The parameters and buffers of a model split over a group."""

    def __init__(self, model: nn.Module, layouts: Mapping[str, Layout], group: Group) -> None:
        super().__init__(model_without_storage(model))
        self._ts_group = group
        self._ts_layouts: dict[str, Layout] = dict(layouts)
        self._ts_fixed = False
        self._ts_names = shared_names(self.source)
        self._ts_made: dict[str, ShardedParameter] = {}
        self._ts_distinct: dict[str, bool] = {}
        self._ts_uninitialized: dict[str, tuple[int, int]] = {}
        self._register(local_state(model, layouts, group.coordinate), model)
        for module in self.modules():
            cast(ShardedSubmodule, module).fix_names()
        self._note()
        self._own_parameters()
        self.register_load_state_dict_pre_hook(_check_slices)

    def _register(self, state: Mapping[str, Tensor], model: nn.Module) -> None:
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

    def _note_distinct(self, whole: Mapping[str, Tensor]) -> None:
        """Of which parameters the ranks' slices differ, as their wholes tell."""
        found = {n: are_distinct(t, self._ts_layouts.get(n, I), self._ts_group.size) for n, t in whole.items()}
        self._ts_distinct, self._ts_watched = {**self._ts_distinct, **found}, False

    def _parameter(self, name: str, tensor: Tensor) -> ShardedParameter:
        """The parameter of that name, which has several where it is tied, with this memory."""
        held = self._ts_made.get(name)
        if held is None or held.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            held = ShardedParameter.of(tensor, self._ts_layouts.get(name, I), self._ts_group, name, self)
            held.grad = tensor.grad
            self._ts_made[name] = held
        return held

    def _own_parameters(self) -> None:
        """Parameters that PyTorch has made anew (by `cuda()`, a copy) become this model's own again."""
        for name, names in self._ts_names.items():
            holder, leaf = _slot(*self._owner(name))
            if isinstance(held := holder[leaf], ShardedParameter):
                held.sharding, held.owner = self._ts_layouts.get(names[0], I), weakref.ref(self)
            elif isinstance(held, nn.Parameter):
                holder[leaf] = self._parameter(names[0], held)

    def _submodule(self, path: str) -> ShardedSubmodule:
        """By the dicts of submodules, for names such as `plan` and `group` are attributes of ours besides."""
        module: ShardedSubmodule = self
        for part in path.split(".") if path else ():
            if part not in module._modules:
                module._modules[part] = ShardedSubmodule(module.source.get_submodule(part))
            module = cast(ShardedSubmodule, module._modules[part])
        return module

    def _owner(self, name: str) -> tuple[ShardedSubmodule, str]:
        path, _, leaf = name.rpartition(".")
        return self._submodule(path), leaf

    def _source_tensor(self, name: str) -> Tensor:
        module, leaf = self._owner(name)
        held: Tensor = getattr(module.source, leaf)
        return held

    # --- following what the user does to parameters ------------------------------------------------------------------

    def _note(self) -> None:
        """The source for captures follows the parameters' dtype and device; graphs captured before are void."""
        self._ts_slots = {name: _slot(*self._owner(name)) for name in self._ts_names}
        self._ts_tensors: dict[str, Tensor] = {name: holder[leaf] for name, (holder, leaf) in self._ts_slots.items()}
        for names in dict.fromkeys(self._ts_names.values()):
            held, source = self._ts_tensors[names[0]], self._source_tensor(names[0])
            if (held.dtype, held.device) != (source.dtype, source.device):
                moved = without_storage(source, dtype=held.dtype, device=held.device)
                for name in names:
                    module, leaf = self._owner(name)
                    _slot(module.source, leaf)[0][leaf] = moved
        self._ts_programs: dict[Any, list[Any]] = {}
        self._ts_watched = False
        self._ts_source_modules = tuple(self.source.modules())
        self._ts_fitting_devices: set[tuple[torch.device, ...]] = set()

    def _follow(self) -> None:
        """Takes over tensors that the user has put in the place of others since the last call.

        Raises:
            InputError: one has another shape than this rank's slice, or a tied one was replaced alone.
        """
        now: dict[str, Any] = {name: holder.get(leaf) for name, (holder, leaf) in self._ts_slots.items()}
        if all(map(operator.is_, now.values(), self._ts_tensors.values())):
            return
        for name, before in self._ts_tensors.items():
            self._check_replaced(name, before, now[name], now[self._ts_names[name][0]])
        same_kind = all((now[n].dtype, now[n].device) == (t.dtype, t.device) for n, t in self._ts_tensors.items())
        self._ts_tensors = now
        if not same_kind:
            self._note()

    def _check_replaced(self, name: str, before: Tensor, now: Any, first: Any) -> None:
        if now is first and isinstance(now, Tensor) and now.shape == before.shape:
            return
        held = tuple(now.shape) if isinstance(now, Tensor) else now
        raise InputError(
            f"{name!r} was replaced by what does not fit",
            where=f"parameter or buffer {name!r}",
            why=f"this rank's slice has shape {tuple(before.shape)}, it now holds {held}"
            if now is first
            else f"it is one with {self._ts_names[name][0]!r}, which holds another now",
            attempt="a slice of the same shape, under all its names; or load_full_state_dict",
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves and casts (`.to`, `.cuda`, `.double`, `.to_empty`): graphs are captured anew for what comes of them."""
        meta = [name for name, tensor in self._ts_tensors.items() if tensor.is_meta]
        super()._apply(fn, recurse)
        self._own_parameters()
        self._note()
        made = {name: self._ts_tensors[name] for name in meta if not self._ts_tensors[name].is_meta}
        self._ts_uninitialized |= {name: (tensor._version, _sample(tensor)) for name, tensor in made.items()}
        for tensor in made.values():
            tensor.touched = False  # type: ignore[attr-defined]
        return self

    def check_initialized(self) -> None:
        """Parameters and buffers hold what somebody has put there.

        Raises:
            InputError: some have no memory, or memory that nobody has written since `to_empty`.
        """
        empty = [name for name, tensor in self._ts_tensors.items() if tensor.is_meta]
        for name, (version, sample) in list(self._ts_uninitialized.items()):
            tensor = self._ts_tensors[name]
            touched = getattr(tensor, "touched", False) or tensor._version != version or _sample(tensor) != sample
            if touched:
                del self._ts_uninitialized[name]
        if empty or self._ts_uninitialized:
            wrong = empty or list(self._ts_uninitialized)
            written = f"with torch.no_grad(): model.{wrong[0]}.copy_(...)"
            raise InputError(
                f"{len(wrong)} parameters and buffers {'have no memory' if empty else 'hold uninitialised memory'}",
                where=", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else ""),
                why="the model is on the meta device"
                if empty
                else "they were on the meta device, and no state dict "
                "that was loaded since to_empty() has them; buffers that a constructor computes are in none",
                attempt="shard a model that has its weights"
                if empty
                else f"{written}; or shard a model that has its weights",
            )

    # --- layouts -----------------------------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The group that the model is split over."""
        return self._ts_group

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each parameter and buffer, by its first name."""
        return dict(self._ts_layouts)

    @torch.inference_mode(False)
    def _fix_layouts(self, layouts: Mapping[str, Layout]) -> None:
        """The first graph says how parameters lie; those that were split otherwise until now are split anew."""
        for name, layout in layouts.items():
            have, tensor = self._ts_layouts.get(name, I), self._ts_tensors[name]
            if have != layout:
                whole = self._whole(tensor.detach(), have, name)
                sliced = split(whole, layout, self._ts_group.rank, self._ts_group.size)
                tensor.data = sliced.clone(memory_format=torch.contiguous_format)
                self._ts_distinct[name] = are_distinct(whole, layout, self._ts_group.size)
            self._ts_layouts[name] = layout
        self._own_parameters()
        self._ts_fixed, self._ts_watched = True, False

    def _whole(self, tensor: Tensor, layout: Layout, name: str) -> Tensor:
        if not isinstance(layout, Shard):
            return tensor
        if tensor.is_meta:
            return torch.empty_like(self._source_tensor(name), device="meta")
        size = self._source_tensor(name).shape[layout.dim]
        return convert("all_gather", tensor, Shard(layout.dim, parts_of(size, layout)), I, self._ts_group)

    # --- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's slices under the unsharded model's names; each knows what it is a slice of.

        Raises:
            InputError: PyTorch's distributed checkpointing asks for it, which would take slices for whole tensors.
        """
        refuse_checkpointing()
        held = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name in self._ts_layouts if not kwargs.get("keep_vars") else ():
            for tied in self._ts_names[name]:
                if isinstance(self._ts_layouts[name], Shard) and prefix + tied in held:
                    held[prefix + tied] = StateSlice.of(held[prefix + tied], self._place(name))
        return held

    def _place(self, name: str) -> Place:
        return name, str(self._ts_layouts.get(name, I)), self._ts_group.rank, self._ts_group.size

    def _check_slice(self, name: str, tensor: Tensor) -> None:
        """Raises InputError for the slice of another rank, number of ranks or plan, and for whole tensors."""
        own, place = self._place(self._ts_names[name][0]), getattr(tensor, PLACE, None)
        held = self._ts_tensors[name].shape
        if tensor.shape == held if place is None else tuple(place[1:]) == own[1:]:
            return
        whole = place is None and tensor.shape == self._source_tensor(name).shape
        given = f"{tuple(tensor.shape)}" if place is None else shown_place(place)
        advice = "load_full_state_dict, which takes whole tensors on every rank"
        raise InputError(
            f"the state dict has {'the whole of' if whole else 'another slice of'} {name!r}",
            where="load_state_dict",
            why=f"given: {given}; wanted: {tuple(held)}, {shown_place(own)}",
            attempt=advice if whole else f"the state dict that this rank saved; between numbers of ranks {advice}",
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """The unsharded model's state dict, a whole copy on every rank (a collective call: all ranks must make it)."""
        return {
            name: self._whole_copy(tensor, self._ts_layouts.get(self._ts_names[name][0], I), name)
            for name, tensor in super().state_dict().items()
        }

    def _whole_copy(self, tensor: Tensor, layout: Layout, name: str) -> Tensor:
        whole = self._whole(tensor.detach(), layout, name)
        return whole if whole.untyped_storage()._cdata != tensor.untyped_storage()._cdata else whole.clone()

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's slices of an unsharded state dict (a collective call: all ranks must make it).

        Raises:
            InputError: a name is missing, unknown, or has another shape than the unsharded model's.
            DistributedError: the ranks were given different tensors.
        """
        what = "the ranks can't load this state dict together"
        names = dict.fromkeys(super().state_dict())
        shapes = {name: self._source_tensor(name).shape for name in names}
        run_on_all_ranks(self._ts_group, lambda: check_full_state(state, shapes), InputError, what)
        facts = {name: content(tensor) for name, tensor in state.items()}
        what = "the ranks load different state dicts"
        verify_equal(self._ts_group, facts, DistributedError, what)
        self._follow()
        for name, tensor in state.items():
            layout = self._ts_layouts.get(self._ts_names[name][0], I)
            with torch.no_grad():
                self._ts_tensors[name].copy_(split(tensor, layout, self._ts_group.rank, self._ts_group.size))
        self._note_distinct({name: tensor for name, tensor in state.items() if self._ts_names[name][0] == name})

    # --- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with parameters of its own, in the same group; it captures its graphs anew."""
        source = self.source
        memo.update({id(t): without_storage(t) for t in (*source.parameters(), *source.buffers())})
        memo[id(self._ts_group)] = self._ts_group
        memo[id(self._ts_programs)] = {}
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made._own_parameters()
        made._note()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a sharded model can't be pickled",
            where="ShardedModule",
            why="it belongs to the process group of its ranks",
            attempt="torch.save(model.state_dict()) for this rank's slices, or model.full_state_dict() for the whole",
        )


def _check_slices(model: State, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    """Before a state dict is loaded, into the model itself or as a part of another."""
    for name, tensor in state.items():
        if name.startswith(prefix) and name[len(prefix) :] in model._ts_names and isinstance(tensor, Tensor):
            model._check_slice(name[len(prefix) :], tensor)


def content(tensor: Tensor) -> str:
    """Shape, dtype and a hash of the values."""
    if tensor.is_meta or is_fake(tensor) or not tensor.numel():
        return value_text(tensor)
    return f"{value_text(tensor)} with hash {hash_tensor(tensor):x}"


def _sample(tensor: Tensor) -> int:
    """A hash of some of a tensor's elements."""
    flat = tensor.detach().reshape(-1)
    return hash_tensor(flat[:: max(1, len(flat) // 64)])


def check_full_state(state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises InputError unless a state dict has just these names with these shapes, those of the unsharded model."""
    for name in [*shapes, *state]:
        if name in shapes and name in state and tuple(state[name].shape) == tuple(shapes[name]):
            continue
        raise InputError(
            f"the state dict does not fit at {name!r}",
            where="load_full_state_dict",
            why=f"given: {tuple(state[name].shape) if name in state else 'missing'}; the unsharded model has "
            f"{tuple(shapes[name]) if name in shapes else 'no such tensor'}",
            attempt="a state dict of the unsharded model; load_state_dict takes this rank's slices",
        )


def _slot(module: nn.Module, leaf: str) -> tuple[dict[str, Any], str]:
    """The dict of a module that holds a parameter or buffer, and its key there."""
    return (module._parameters if leaf in module._parameters else module._buffers), leaf
