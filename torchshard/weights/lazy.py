"""Models whose constructors allocate nothing: `with lazy():` notes what they do to their tensors, on a tape.

A `LazyTensor` has a shape, a dtype and a device, and no memory. Its values are computed when `compute` asks for them,
one tensor at a time, and are bit for bit those that the constructor would have made: random numbers are drawn in the
same order, from the RNG state in which `lazy` was entered. Whatever is done to a lazy tensor later, as a cast, a copy
or another initialisation, is noted too. Where a constructor reads values (`.item()`, `.tolist()`), they are computed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from torchshard.core.errors import InputError
from torchshard.weights.safetensors_files import StoredTensor
from torchshard.weights.tape import (
    Entry,
    GeneratorState,
    Slot,
    Tape,
    entry_of,
    is_overwriting,
    viewed_argument,
    written_arguments,
)

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class LazyTensor(Tensor):
    """A tensor without memory that knows how it is made."""

    tape: Tape
    slot: int

    @staticmethod
    def __new__(cls, tape: Tape, slot: int, device: torch.device) -> LazyTensor:
        like = tape.examples[slot]
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device,
        )
        made.tape, made.slot = tape, slot
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        return _call(func, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    @property
    def data(self) -> Tensor:
        """As `Tensor.data`: another tensor in the same memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        lazy = value if isinstance(value, LazyTensor) else _constant(self.tape, value)
        torch._C.TensorBase.__dict__["data"].__set__(self, lazy)
        self.tape, self.slot = lazy.tape, lazy.slot

    def data_ptr(self) -> int:
        """A number that is equal for tensors of a tape that share memory."""
        return self.tape.memories[self.slot]

    def tolist(self) -> Any:
        """As `Tensor.tolist`, of the values, which are computed for it."""
        return self.value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As `Tensor.numpy`, of the values, which are computed for it."""
        return self.value().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().__array__(*args, **kwargs)

    def value(self) -> Tensor:
        """Its values, computed anew."""
        return values_of([self])[id(self)]

    def __deepcopy__(self, memo: dict[int, object]) -> LazyTensor:
        if id(self) not in memo:
            copied: Tensor = self.detach().clone()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return cast(LazyTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InputError(
            "a lazy tensor can't be pickled",
            where=repr(self),
            why="it has no values yet",
            attempt="shard the model first, and ts.save that; or build the model without ts.lazy()",
        )


class _Recording(TorchDispatchMode):
    """Notes the calls that make tensors on the CPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        if any(isinstance(leaf, LazyTensor) for leaf in leaves):
            return _call(func, args, kwargs)
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            return self._call_on_values(func, args, kwargs)
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        if device.type != "cpu" or "device" not in {a.name for a in func._schema.arguments}:
            return func(*args, **kwargs)
        return _record(self._tape, func, args, kwargs, device)

    def _call_on_values(self, func: Any, args: Args, kwargs: Kwargs) -> object:
        """A call on tensors that have values: it runs, after the random numbers of the calls before it are drawn."""
        _draw_recorded(self._tape, func, args, kwargs)
        return func(*args, **kwargs)


_LATEST: list[weakref.ref[Tape]] = []
"""The tape that was written last: models that are built one after the other draw one after the other."""


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Builds models without memory: what constructors do to tensors inside the block is noted, and done later.

        with ts.lazy():
            model = AnyModel(config)
        model = ts.shard(model, "auto", (x,))      # each rank gets its slices, one parameter at a time

    The parameters get bit for bit the values that they have without it, and so does a model that is built in a later
    block, if nothing was drawn between. Random numbers that are drawn after the block differ from those without it.
    """
    tape = _LATEST[0]() if _LATEST else None
    if tape is None or not tape.is_latest:
        tape = Tape()
    _LATEST[:] = [weakref.ref(tape)]
    with _Recording(tape):
        yield


def _call(func: Any, args: Args, kwargs: Kwargs) -> object:
    """A call on lazy tensors, recorded if no value of it is asked for."""
    lazies = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, LazyTensor)]
    into_values = any(
        isinstance(leaf, Tensor) and not isinstance(leaf, LazyTensor)
        for leaf in written_arguments((func, args, kwargs))
    )
    if func.overloadpacket in _RESIZING and not _keeps_shape(args):
        raise InputError(
            f"a lazy tensor can't be resized by {func.overloadpacket.__name__}",
            where=repr(lazies[0]),
            why="its shape is fixed when it is recorded",
            attempt="a new tensor of the shape that is wanted; or build the model without ts.lazy()",
        )
    tape = lazies[0].tape
    # how many numbers it takes from a generator of the caller's may depend on the values that it reads
    draws_by_values = _own_generator(args, kwargs) is not None and not (is_overwriting(func) and len(lazies) == 1)
    if into_values or any(lazy.tape is not tape for lazy in lazies) or func in _VALUES or draws_by_values:
        return _call_on_computed(func, args, kwargs, lazies)
    try:
        return _record(tape, func, args, kwargs, lazies[0].device)
    except (NotImplementedError, RuntimeError):  # its result's shape depends on values, or meta tensors have no kernel
        return _call_on_computed(func, args, kwargs, lazies)


_RESIZING = frozenset({torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.set_})


def _keeps_shape(args: Args) -> bool:
    """Whether `x.set_(y)` takes a tensor of x's shape."""
    return len(args) == 2 and isinstance(args[1], Tensor) and args[0].shape == args[1].shape


_VALUES = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})
"""Ops whose results are no tensors."""


def _call_on_computed(func: Any, args: Args, kwargs: Kwargs, lazies: Sequence[LazyTensor]) -> object:
    held = values_of(lazies)

    def computed(leaf: object) -> object:
        return held[id(leaf)] if isinstance(leaf, LazyTensor) else leaf

    _draw_recorded(lazies[0].tape, func, args, kwargs)
    results = func(*pytree.tree_map(computed, args), **pytree.tree_map(computed, dict(kwargs)))
    for argument in written_arguments((func, args, kwargs)):
        if isinstance(argument, LazyTensor):
            argument.copy_(held[id(argument)])
    return results


def _draw_recorded(tape: Tape, func: Any, args: Args, kwargs: Kwargs) -> None:
    """Before a call that runs: draws the random numbers of the recorded calls before it, if it draws some itself."""
    if torch.Tag.nondeterministic_seeded in func.tags and _own_generator(args, kwargs) is None:
        torch.set_rng_state(tape.rng_state())


def _own_generator(args: Args, kwargs: Kwargs) -> torch.Generator | None:
    """The generator among the arguments, if it is not the process's."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Generator) and not _is_process(leaf)), None)


def _is_process(generator: torch.Generator) -> bool:
    ours: int = torch.default_generator._cdata  # type: ignore[attr-defined]
    return generator._cdata == ours  # type: ignore[attr-defined]  # each dispatched call gets a new Python object


def _record(tape: Tape, func: Any, args: Args, kwargs: Kwargs, device: torch.device) -> object:
    call = func, *pytree.tree_map(lambda leaf: _as_slot(tape, leaf), (args, dict(kwargs)))
    found = func(*_on_meta(tape, call[1]), **_on_meta(tape, call[2], _meta_device(func, args, kwargs)))
    viewed = viewed_argument(call)
    memory = tape.memories[viewed.number] if isinstance(viewed, Slot) else None
    is_written = bool(written_arguments(call))
    device = torch.device(kwargs.get("device") or device)
    made: list[LazyTensor | None] = [
        LazyTensor(tape, tape.new_slot(leaf, memory), device) if isinstance(leaf, Tensor) and not is_written else None
        for leaf in pytree.tree_leaves(found)
    ]
    tape.add(entry_of(tape, call, tuple(None if lazy is None else lazy.slot for lazy in made)))
    generator = _own_generator(args, kwargs)
    if generator is not None:
        tape.advance(call, generator)
    if is_written:
        return return_and_correct_aliasing(func, args, kwargs, found)
    leaves, spec = pytree.tree_flatten(found)
    result = [leaf if lazy is None else lazy for leaf, lazy in zip(leaves, made, strict=True)]
    return return_and_correct_aliasing(func, args, kwargs, pytree.tree_unflatten(result, spec))


def _meta_device(func: Any, args: Args, kwargs: Kwargs) -> dict[str, object]:
    """The argument that makes a call's results on the meta device, if it names a device or takes no tensor."""
    takes_device = "device" in {a.name for a in func._schema.arguments}
    has_tensor = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, dict(kwargs))))
    return {"device": torch.device("meta")} if takes_device and (not has_tensor or kwargs.get("device")) else {}


def _as_slot(tape: Tape, leaf: object) -> object:
    if isinstance(leaf, LazyTensor):
        return Slot(leaf.slot)
    if isinstance(leaf, torch.Generator):
        return None if _is_process(leaf) else GeneratorState(leaf.get_state(), leaf.device)
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf  # its owner may change it later


def _on_meta(tape: Tape, value: Any, changes: Mapping[str, object] | None = None) -> Any:
    def on_meta(leaf: object) -> object:
        if isinstance(leaf, Slot):
            return tape.examples[leaf.number]
        if isinstance(leaf, GeneratorState):
            return None
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    made = pytree.tree_map(on_meta, value)
    return made if changes is None else made | changes


def _constant(tape: Tape, value: Tensor) -> LazyTensor:
    """A lazy tensor with the values of a real one."""
    return cast(LazyTensor, _record(tape, torch.ops.aten.clone.default, (value,), {}, value.device))


def file_tensor(tape: Tape, file: StoredTensor) -> LazyTensor:
    """A lazy tensor with the values of one in a file."""
    slot = tape.new_slot(torch.empty(file.shape, dtype=file.dtype, device="meta"), None)
    nothing = frozenset[int]()
    tape.add(Entry(file, (), {}, (), (slot,), nothing, nothing, False, torch.get_default_dtype()))
    return LazyTensor(tape, slot, torch.device("cpu"))


def compute(tensors: Sequence[LazyTensor], use: Callable[[LazyTensor, Tensor], None]) -> None:
    """Calls `use(tensor, value)` for each lazy tensor; the value is in memory until `use` returns."""
    tapes = {id(tensor.tape): tensor.tape for tensor in tensors}
    for tape in tapes.values():
        by_slot: dict[int, list[LazyTensor]] = {}
        for tensor in tensors:
            if tensor.tape is tape:
                by_slot.setdefault(tensor.slot, []).append(tensor)

        def use_all(slot: int, value: Tensor, by_slot: dict[int, list[LazyTensor]] = by_slot) -> None:
            for tensor in by_slot[slot]:
                use(tensor, value)

        tape.compute(list(by_slot), use_all)


def values_of(tensors: Sequence[LazyTensor]) -> dict[int, Tensor]:
    """id -> value of each lazy tensor, all at once."""
    found: dict[int, Tensor] = {}
    compute(tensors, lambda tensor, value: found.update({id(tensor): value}))
    return found
