"""State dicts of a sharded model: this rank's slices, which know their places, or full tensors.

state_dict, load_state_dict               this rank's slices; no communication, unless DCP requests full tensors
full_state_dict, load_full_state_dict     the unsharded model's, on every rank: collective calls
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Protocol

from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from torchshard.core.errors import InputError
from torchshard.core.modules import named_tensors
from torchshard.core.sharding import UNSHARDED
from torchshard.core.user_files import is_user_file
from torchshard.runtime.digests import describe_contents
from torchshard.runtime.refusals import no_method
from torchshard.runtime.store import WeightStore
from torchshard.runtime.submodule import ShardedSubmodule
from torchshard.weights.callers import method_of
from torchshard.weights.dcp import wants_whole
from torchshard.weights.local_slice import LocalSlice
from torchshard.weights.place import is_same_slice, place_of, place_text, slice_place


class _Model(Protocol):
    """A sharded model, as the hooks of its state dicts use it."""

    _ts_store: WeightStore


def add_hooks(model: nn.Module) -> None:
    """Makes a sharded model, and each of its submodules, check the state dicts that it loads."""
    model.register_load_state_dict_pre_hook(_cut_whole)
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_check_part)


# --- state dicts of slices -------------------------------------------------------------------------------------------


def refuse_method(caller: FrameType) -> None:
    """Refuses a method of transformers that takes the state dict of a sharded model for the unsharded one's."""
    method = method_of(caller.f_globals.get("__name__", ""))
    if method and not is_user_file(caller.f_code.co_filename):
        raise no_method(method, "it takes a state dict for the whole model's", "ts.save_pretrained(model, folder)")


def with_places(state: StateDict, store: WeightStore, prefix: str) -> StateDict:
    """Gives the slices in a model's state dict their places; returns full tensors if DCP requests them."""
    is_whole = wants_whole()
    for name, names in store.tensors.names.items():
        local, of = state.get(prefix + name), store.shardings.of(names[0])
        if is_whole and isinstance(local, Tensor):
            state[prefix + name] = store.whole_copy(local, names[0])
        elif isinstance(local, Tensor) and of.is_split:
            place = slice_place(names[0], of, store.ranks.place, store.tensors.source(names[0]).shape)
            state[prefix + name] = LocalSlice.stored(local, place)
    return state


def _cut_whole(model: _Model, state: dict[str, object], prefix: str, *others: object) -> None:
    """Cuts full tensors before a state dict is loaded into this model, or into a model that contains it.

    A collective call. `torch.distributed.checkpoint` loads such state dicts with
    `StateDictOptions(full_state_dict=True)`.

    Raises:
        DistributedError: the ranks were given different tensors.
    """
    if not wants_whole():
        return
    store = model._ts_store
    own = {name: state.get(prefix + name) for name in store.tensors.names}
    whole = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor) and place_of(tensor) is None}
    what = "the ranks load different state dicts"
    attempt = "the same state dict on every rank, or broadcast_from_rank0"
    store.ranks.verify(describe_contents(whole), what, attempt)
    for name, tensor in whole.items():
        first = store.tensors.first(name)
        if tensor.shape == store.tensors.source(first).shape:
            state[prefix + name] = store.shardings.local(first, tensor)
            store.shardings.note_distinct(first, tensor)


def _check_part(module: nn.Module, state: Mapping[str, object], prefix: str, *others: object) -> None:
    """Checks a state dict before it is loaded into a model, or into one submodule, as for a pretrained backbone."""
    for name, held in named_tensors(module).items():
        given = state.get(prefix + name)
        if isinstance(given, Tensor):
            _check_slice(prefix + name, held, given)


def _check_slice(name: str, held: Tensor, given: Tensor) -> None:
    """Raises InputError for slices of another rank, number of ranks or plan, and for full tensors of split ones."""
    own = held.place if isinstance(held, LocalSlice) else slice_place(name, UNSHARDED, {}, held.shape)
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


# --- full state dicts ------------------------------------------------------------------------------------------------


def full_state(model: nn.Module, store: WeightStore) -> dict[str, Tensor]:
    """Gathers the unsharded model's state dict, copied on every rank: a collective call."""
    store.follow()
    own = nn.Module.state_dict(model)
    return {name: store.whole_copy(tensor, store.tensors.first(name)) for name, tensor in own.items()}


def load_full_state(model: nn.Module, store: WeightStore, state: Mapping[str, Tensor]) -> None:
    """Loads this rank's slices of an unsharded state dict: a collective call.

    Raises:
        InputError: a name is missing, unknown, or has a different shape from the unsharded model's.
        DistributedError: the ranks were given different tensors.
    """
    what = "the ranks can't load this state dict together"
    names = dict.fromkeys(nn.Module.state_dict(model))
    shapes = {name: store.tensors.source(name).shape for name in names}
    store.ranks.run_on_all(lambda: check_full_state(state, shapes), InputError, what)
    what = "the ranks load different state dicts"
    store.ranks.verify(describe_contents(state), what, "the same state dict on every rank")
    store.follow()
    for name, tensor in state.items():
        store.load_whole(name, tensor)


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


# --- full tensors for exports and adapters ---------------------------------------------------------------------------


def computed_buffers(model: nn.Module, store: WeightStore) -> dict[str, Tensor]:
    """Gathers the full buffers that state dicts omit: a collective call."""
    stored = model.state_dict().keys()
    return {
        name: store.whole_copy(t, store.tensors.first(name)) for name, t in model.named_buffers() if name not in stored
    }


def stored_tensors(model: nn.Module, store: WeightStore) -> dict[str, tuple[str, Tensor, Callable[[], Tensor]]]:
    """Returns {name: (first name, this rank's slice, function that gathers the full tensor)} of a state dict."""
    found: dict[str, tuple[str, Tensor, Callable[[], Tensor]]] = {}
    for name, value in model.state_dict().items():
        first = store.tensors.first(name)
        found[name] = first, value, partial(store.whole, store.tensors.now[first].detach(), first)
    return found


def change_whole(
    store: WeightStore, part: ShardedSubmodule, path: str, change: Callable[[nn.Module], None], name: str
) -> None:
    """Changes a submodule's tensors and attributes by code that needs full tensors: a collective call.

    Args:
        path: the submodule's path.
        change: receives the unsharded module, which has full values while this runs.
        name: the name of the change, equal on all ranks.
    """
    what = "the ranks change different parts of the model"
    store.ranks.verify({"the part and its change": f"{path}.{name}"}, what, "the same call on every rank")
    store.follow()
    tensors = store.tensors
    owned = [name for name in tensors.names if name.startswith(f"{path}.")]
    whole = {name: _whole_parameter(store, name) for name in dict.fromkeys(map(tensors.first, owned))}
    slots = {name: tensors.source_slot(name) for name in owned}
    before = {name: entries[leaf] for name, (entries, leaf) in slots.items()}
    try:
        for name, (entries, leaf) in slots.items():
            entries[leaf] = whole[tensors.first(name)]
        change(part.source)
    finally:
        for name, (entries, leaf) in slots.items():
            entries[leaf] = before[name]
    for name, tensor in whole.items():
        store.load_whole(name, tensor.detach())


def _whole_parameter(store: WeightStore, name: str) -> Tensor:
    """Returns a copy of the full parameter or buffer with this first name."""
    held = store.tensors.now[name]
    whole = store.whole_copy(held, name)
    return nn.Parameter(whole, held.requires_grad) if isinstance(held, nn.Parameter) else whole
