"""Carried slices: this rank's slices of caches and states that one call leaves in its arguments for the next.

cache.layers[0].keys                  f32[1,8@tp,5,64] on rank 0 of 2: tensor(...)
keys.index_select(0, beams)           computed on the slice: the same slice of the result, by the op's row
keys.sum()                            an InputError: it would be the sum of a slice
keys.full_tensor()                    the full tensor, on every rank

PyTorch's `DTensor` (2.13) has no sharding for parts of unequal size, and by default its ops insert
collectives, where an op here raises. This class could go if DTensor had such shardings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from torchshard.capture import Leaves
from torchshard.capture.carried import Changes, finder
from torchshard.capture.keys import ReferenceTo
from torchshard.core.choices import replacement_on
from torchshard.core.conversions import step_args
from torchshard.core.errors import InputError
from torchshard.core.layouts import I, Layout, P, Shard, dtype_text
from torchshard.core.mesh import MeshAxis
from torchshard.core.rows import Choice, Row
from torchshard.core.sharding import Sharding, split_text
from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.distributed.group import Group
from torchshard.weights.op_calls import bound, call_of, planned, tensors_in


class CarriedSlice(Tensor):
    """A rank's slice of a tensor that a call of a sharded model has left in its arguments."""

    sharding: Shard
    """The layout of the full tensor over the ranks."""
    group: Group
    left_by: tuple[int, int]
    """(number of the model, number of the call) that left it."""
    whole: tuple[int, ...]
    """The shape of the full tensor."""
    plain: Tensor
    """A plain tensor with the same memory."""

    @classmethod
    def of(
        cls, tensor: Tensor, sharding: Shard, whole: Sequence[int], group: Group, left_by: tuple[int, int]
    ) -> CarriedSlice:
        """Returns a tensor with the same memory, marked as a slice."""
        marked: CarriedSlice = torch.Tensor._make_subclass(cls, tensor, tensor.requires_grad)
        marked.sharding, marked.whole, marked.group, marked.left_by = sharding, tuple(whole), group, left_by
        marked.plain = tensor
        return marked

    def full_tensor(self) -> Tensor:
        """Gathers the full tensor, with its gradient: a collective call.

        Source: torch.distributed.tensor.DTensor.full_tensor
        """
        args = step_args(self.sharding, I, self.whole)
        whole: Tensor = torch.ops.torchshard.gather.default(self.plain, *args, self.group.name)
        return whole

    @property
    def like_whole(self) -> Tensor:
        """A tensor of the full shape without memory; contiguous, because strides may differ between ranks."""
        return torch.empty(self.whole, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if torch.is_grad_enabled() and func.__name__ not in _READS:
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, cls) and tensor.plain.requires_grad:
                    why = "it has a gradient, which such a computation would lose"
                    tensor._refuse(func.__name__, why, "; or first t.detach(), if none is to flow")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        slices = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls)]
        first = slices[0]
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda t: t.plain, (args, kwargs))
        if func in _WRITES:
            func(*plain_args, **plain_kwargs)
            return args[0]
        if func in _SAME:
            return cls.of(func(*plain_args, **plain_kwargs), first.sharding, first.whole, first.group, first.left_by)
        if func in _SIZED:
            return first._reshaped(func, *plain_args)
        row, choice, whole = first._as_planned(func, args, kwargs)
        run = replacement_on(first.group.coordinate, row, choice) or func
        return mark(run(*plain_args, **plain_kwargs), choice.results[0], whole, first.group, first.left_by)

    def _reshaped(self, func: OpOverload, tensor: Tensor, size: Sequence[int]) -> Tensor:
        """Returns the result of `view` or `expand`; other ops call these with the sizes of slices."""
        result: Tensor = func(tensor, size)
        dim, own = self.sharding.dim, tensor.shape
        if func is torch.ops.aten.expand.default:
            to = dim + result.ndim - tensor.ndim
        else:
            before = math.prod(own[:dim])
            to = next((d for d in range(result.ndim) if math.prod(result.shape[:d]) == before), -1)
        if to < 0 or to >= result.ndim or result.shape[to] != own[dim]:
            self._refuse(str(func))
        whole = list(result.shape)
        whole[to] = self.whole[dim]
        return CarriedSlice.of(result, replace(self.sharding, dim=to), whole, self.group, self.left_by)

    def _as_planned(self, func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[Row, Choice, tuple[int, ...]]:
        """Returns an op's row, its choice for the operands' layouts, and the full shape of its result.

        Raises:
            InputError: the row lacks a choice for these layouts, or the result is a partial sum.
        """

        def whole(value: Tensor) -> Tensor:
            return value.like_whole if isinstance(value, CarriedSlice) else value.to("meta")

        meta_args, meta_kwargs = pytree.tree_map_only(Tensor, whole, (args, kwargs))
        made = func(*meta_args, **meta_kwargs)
        call = call_of(func, bound(func, meta_args, meta_kwargs), made)
        given = [[t.sharding if isinstance(t, CarriedSlice) else I] for t in tensors_in((args, kwargs))]
        found = planned(call, given, self.group.size) if isinstance(made, Tensor) else None
        if found is None or found[1].results[0] == P:
            self._refuse(str(func))
        return *found, tuple(made.shape)

    def _refuse(self, name: str, why: str = "the result would be that of a slice", also: str = "") -> NoReturn:
        raise InputError(
            f"{name} can't be computed of this rank's slice of what a call has left",
            where=f"a tensor of {self.dtype} that a sharded model has left in its arguments, such as a cache's",
            why=f"it is {self.type_text} on rank {self.group.rank} of {self.group.size}: {why}",
            attempt=f"the whole tensor, t.full_tensor(), on every rank{also}",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> CarriedSlice:
        copied = self.of(self.plain.detach().clone(), self.sharding, self.whole, self.group, self.left_by)
        return memo.setdefault(id(self), copied)  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        self._refuse("saving it")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{self.type_text} on rank {self.group.rank} of {self.group.size}: {self.plain!r}"

    @property
    def type_text(self) -> str:
        """The tensor's type with its sharding: 'f32[1,8@tp,5,64]'."""
        return split_text(self.whole, Sharding.of((MeshAxis(self.group.size), self.sharding)), dtype_text(self.dtype))


_READS = frozenset({"__get__", "size", "dim", "stride", "numel", "detach", "__repr__", "is_floating_point"})
"""Functions that read a slice's metadata, or drop its gradient."""
_WRITES = {torch.ops.aten.zero_.default, torch.ops.aten.mul_.Scalar}
_SIZED = {torch.ops.aten.expand.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
"""Ops that return the same slice."""


def local_tensors(inputs: Leaves) -> tuple[Tensor, ...]:
    """Returns a call's tensors with carried slices as plain tensors, for this rank's graph."""
    return tuple(t.plain if isinstance(t, CarriedSlice) else t for t in inputs.tensors)


def whole_inputs(inputs: Leaves, group: Group, model: int, places: Collection[str]) -> tuple[Leaves, dict[str, Layout]]:
    """Returns a call's tensors, with full shapes without memory for slices, and the carried inputs' layouts.

    Args:
        places: the names of inputs in which calls leave tensors.

    Raises:
        InputError: a slice is from another model, or from other ranks.
    """
    named = dict(zip(inputs.names, inputs.tensors, strict=True))
    slices = {name: tensor for name, tensor in named.items() if isinstance(tensor, CarriedSlice)}
    layouts: dict[str, Layout] = {
        n: slices[n].sharding if n in slices else I for n in named if n in slices or n in places
    }
    if not slices:
        return inputs, layouts
    for name, tensor in slices.items():
        if tensor.group is not group or tensor.left_by[0] != model:
            raise InputError(
                f"{name} was left by a call of another sharded model",
                where=f"argument {name!r}",
                why=f"it is a slice of {tensor.type_text}, as that model's plan has it",
                attempt="a cache or state for each model; or the whole tensors, t.full_tensor()",
            )
    tensors = tuple(t.like_whole if isinstance(t, CarriedSlice) else t for t in inputs.tensors)
    return replace(inputs, tensors=tensors), layouts


def check_once(inputs: Leaves, changes: Changes) -> None:
    """Checks that a call changes no argument that is passed twice: a graph treats the two as different.

    Raises:
        InputError: a tensor, or an object that forward changes, is passed twice.
    """
    find = finder(inputs.arguments)
    for keys in changes.holders if inputs.repeated else ():
        if id(find(ReferenceTo(keys))) in inputs.repeated:
            raise InputError(
                "a list, dict or object that forward changes is passed twice",
                where="".join(f"[{key!r}]" for key in keys[1:]) + " of the arguments",
                why="a graph takes the two for others: what forward adds to one it would not find in the other",
                attempt="an object for each argument",
            )
    seen: dict[int, str] = {}
    for name, tensor in inputs.named_tensors if changes.holders else ():
        first = seen.setdefault(id(tensor), name)
        if first != name:
            raise InputError(
                f"{first} and {name} are one tensor, and forward changes its arguments",
                where=f"argument {name!r}",
                why="a graph takes them for two: what forward writes to one it would not read from the other",
                attempt=f"a copy of one of them, such as {name}.clone()",
            )


def refuse_changes(changes: Changes) -> None:
    """Checks that a call with the full batch carries no values: they would be this rank's shard of the batch.

    Raises:
        InputError: forward changes its arguments.
    """
    if changes.names:
        raise InputError(
            "forward changes its arguments, and each rank passes the whole batch",
            where=f"argument {changes.names[0]!r}",
            why="what a call leaves for the next one, such as a cache, is this rank's part of the batch",
            attempt='inputs="local": each rank passes its part of the batch; without a cache, use_cache=False',
        )


def mark_whole(left: Sequence[object], shardings: Sequence[Sharding]) -> None:
    """Marks the carried tensors that are replicated over the batch's ranks, whatever their sizes are."""
    for value, of in zip(left, shardings, strict=True):
        if not of.is_split and isinstance(value, Tensor):
            value._ts_is_of_all = True  # type: ignore[attr-defined]


def is_of_all(tensor: Tensor) -> bool:
    """Returns whether a carried tensor is replicated over the batch's ranks."""
    return getattr(tensor, "_ts_is_of_all", False)


def mark(
    tensor: Tensor, layout: Layout, whole: Sequence[int | torch.SymInt], group: Group, left_by: tuple[int, int]
) -> Tensor:
    """Returns a carried value, marked if it is a slice; `whole` has symbols in dims that are not split."""
    if not isinstance(layout, Shard) or group.size == 1:
        return tensor
    shape = [
        int(size) if dim == layout.dim else own for dim, (size, own) in enumerate(zip(whole, tensor.shape, strict=True))
    ]
    return CarriedSlice.of(tensor, layout, shape, group, left_by)
