"""Lazy tensors, which a constructor makes within `recording.lazy`: no memory, but a tape that can compute the values.

Ops on a lazy tensor, such as a cast, a copy or another initialisation, are recorded too. If code reads
values (`.item()`, `.tolist()`), they are computed at once. `compute` replays the tape, one tensor at a time.

On PyTorch's meta device a constructor loses its values (PyTorch 2.13), and torchdistx, which recorded
constructors in this way, is not developed further (pytorch/pytorch#96161). This module, `recording`
and `tape` could go if PyTorch could compute the values of such a model later, tensor by tensor
(pytorch/pytorch#93947).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

# Views get their base's storage, writes return their argument: by no public function (PyTorch 2.13.0).
from torch.utils._python_dispatch import return_and_correct_aliasing

from torchshard.core.errors import InputError
from torchshard.custom_ops.fx_types import Args, Argument, Kwargs
from torchshard.weights.tape import (
    GeneratorState,
    Slot,
    Tape,
    entry_of,
    is_overwriting,
    viewed_argument,
    written_arguments,
)


class LazyTensor(Tensor):
    """A tensor without memory; its tape can compute its values."""

    tape: Tape
    slot: int

    @staticmethod
    def __new__(cls, tape: Tape, slot: int, device: torch.device) -> LazyTensor:
        like = tape.examples[slot]
        # `_make_wrapper_subclass`: no public way to make a tensor with strides, but no memory (PyTorch 2.13.0).
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

    # `_disabled_torch_function_impl`: `nn.Parameter` has it in place of `Tensor`'s own method (PyTorch 2.13.0).
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        return call_on_lazies(func, args, kwargs or {})

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    @property
    def data(self) -> Tensor:
        """Like `Tensor.data`: a different tensor with the same memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        lazy = value if isinstance(value, LazyTensor) else _constant(self.tape, value)
        torch._C.TensorBase.__dict__["data"].__set__(self, lazy)
        self.tape, self.slot = lazy.tape, lazy.slot

    def data_ptr(self) -> int:
        """Returns a number that is equal for tensors of one tape that share memory."""
        return self.tape.memories[self.slot]

    def tolist(self) -> list[object]:
        """Computes the values, and returns them like `Tensor.tolist`."""
        return self.value().tolist()

    def numpy(self, *, force: bool = False) -> NDArray[np.generic]:
        """Computes the values, and returns them like `Tensor.numpy`."""
        return self.value().numpy(force=force)

    def __array__(self, *args: Argument, **kwargs: Argument) -> NDArray[np.generic]:
        return self.value().__array__(*args, **kwargs)

    def value(self) -> Tensor:
        """Computes the values; they are not cached."""
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


def call_on_lazies(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Records a call on lazy tensors, or runs it on computed values if it needs them."""
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
    # the number of draws from the caller's generator may depend on the values that the op reads
    draws_by_values = _own_generator(args, kwargs) is not None and not (is_overwriting(func) and len(lazies) == 1)
    if into_values or any(lazy.tape is not tape for lazy in lazies) or func in _VALUES or draws_by_values:
        return _call_on_computed(func, args, kwargs, lazies)
    try:
        return record(tape, func, args, kwargs, lazies[0].device)
    except (NotImplementedError, RuntimeError):  # its result's shape depends on values, or meta tensors have no kernel
        return _call_on_computed(func, args, kwargs, lazies)


_RESIZING = frozenset({torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.set_})


def _keeps_shape(args: Args) -> bool:
    """Returns whether this is `x.set_(y)` with a `y` of x's shape."""
    return len(args) == 2 and isinstance(args[1], Tensor) and args[0].shape == args[1].shape


_VALUES = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})
"""Ops that return a Python number or bool."""


def _call_on_computed(func: OpOverload, args: Args, kwargs: Kwargs, lazies: Sequence[LazyTensor]) -> object:
    held = values_of(lazies)

    def computed(leaf: object) -> object:
        return held[id(leaf)] if isinstance(leaf, LazyTensor) else leaf

    draw_recorded(lazies[0].tape, func, args, kwargs)
    results = func(*pytree.tree_map(computed, args), **pytree.tree_map(computed, dict(kwargs)))
    for argument in written_arguments((func, args, kwargs)):
        if isinstance(argument, LazyTensor):
            argument.copy_(held[id(argument)])
    return results


def draw_recorded(tape: Tape, func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Before an immediate call that draws: advances the RNG past the draws recorded so far."""
    if torch.Tag.nondeterministic_seeded in func.tags and _own_generator(args, kwargs) is None:
        torch.set_rng_state(tape.rng_state())


def _own_generator(args: Args, kwargs: Kwargs) -> torch.Generator | None:
    """Returns the generator among the arguments, unless it is the process's default generator."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Generator) and not _is_process(leaf)), None)


def _is_process(generator: torch.Generator) -> bool:
    # `_cdata`: Python objects of the same generator compare unequal (PyTorch 2.13.0).
    ours: int = torch.default_generator._cdata  # type: ignore[attr-defined]
    return generator._cdata == ours  # type: ignore[attr-defined]  # each dispatched call gets a new Python object


def record(tape: Tape, func: OpOverload, args: Args, kwargs: Kwargs, device: torch.device) -> object:
    """Records a call; returns its result, with a lazy tensor for each new tensor."""
    call = func, *pytree.tree_map(_as_slot, (args, dict(kwargs)))
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


def _meta_device(func: OpOverload, args: Args, kwargs: Kwargs) -> dict[str, object]:
    """Returns the `device` argument that puts a call's results on the meta device, if it needs one."""
    takes_device = "device" in {a.name for a in func._schema.arguments}
    has_tensor = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, dict(kwargs))))
    return {"device": torch.device("meta")} if takes_device and (not has_tensor or kwargs.get("device")) else {}


def _as_slot(leaf: object) -> object:
    if isinstance(leaf, LazyTensor):
        return Slot(leaf.slot)
    if isinstance(leaf, torch.Generator):
        return None if _is_process(leaf) else GeneratorState(leaf.get_state(), leaf.device)
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf  # its owner may change it later


def _on_meta(tape: Tape, value: Argument, changes: Mapping[str, object] | None = None) -> Argument:
    def on_meta(leaf: object) -> object:
        if isinstance(leaf, Slot):
            return tape.examples[leaf.number]
        if isinstance(leaf, GeneratorState):
            return None
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    made = pytree.tree_map(on_meta, value)
    return made if changes is None else made | changes


def _constant(tape: Tape, value: Tensor) -> LazyTensor:
    """Returns a lazy tensor with the values of an ordinary one."""
    return cast(LazyTensor, record(tape, torch.ops.aten.clone.default, (value,), {}, value.device))


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
    """Computes all these lazy tensors at once; returns `id` of a tensor -> its value."""
    found: dict[int, Tensor] = {}
    compute(tensors, lambda tensor, value: found.update({id(tensor): value}))
    return found
