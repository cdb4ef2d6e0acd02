"""Follows the layouts of tensors over one mesh axis through the ops of a function, which runs on meta tensors.

Each op has a row, as in the planner: if one of its choices accepts the layouts of the operands, that choice gives the
layouts of the results. A choice with a replacement does not count, because the function ran the op itself. An op
without such a choice is decomposed, if PyTorch can, and its parts are followed; otherwise its results are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# All decompositions; the public `torch.export.default_decompositions` lacks half of them (PyTorch 2.13.0).
from torch._decomp import decomposition_table
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.core.choices import local_replacement
from torchshard.core.layouts import I, Layout, Shard, local_shape
from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.rules import is_random
from torchshard.weights.op_calls import bound, call_of, planned, tensors_in, without_writes

aten = torch.ops.aten


class Lost(NamedTuple):
    """Marks a tensor that depends on slices but is not a slice itself."""

    draws: bool = False
    """Whether it depends on random numbers."""


class _Step(NamedTuple):
    """One call of an op."""

    op: object
    numbers: Mapping[str, object]
    """Its arguments without tensors, except sizes of the result."""
    shapes: Sequence[tuple[int, ...]]
    """The shapes of its results."""
    local: Sequence[tuple[int, ...] | None]
    """The shape of this rank's slice of each result; None if the result is lost or repeats along a dim."""


class Level(TorchDispatchMode):
    """Follows layouts over one mesh axis through ops on meta tensors."""

    def __init__(self, size: int, rank: int, taken_apart: Collection[int]) -> None:
        """Follows the slices of one rank.

        Args:
            size: the number of ranks along the axis.
            taken_apart: the numbers of the ops that were decomposed along an earlier axis.
        """
        super().__init__()
        self.taken_apart = set(taken_apart)
        self.draws, self.takes_sizes = False, False
        self._size, self._rank = size, rank
        self._steps: list[_Step] = []
        self._results: list[object] = []  # PyTorch calls `detach` on some referenced results, so keep all
        self._calls = 0
        self._known: dict[int, tuple[Tensor, Layout | Lost]] = {}
        """`id` of a tensor -> the tensor, kept alive so that the id stays unique, and its layout."""
        self._written = set[int]()
        """The storages that slices were written into; identifies tensors not in `_known`, such as a view's base."""
        self._inside: set[object] = set()

    def note(self, tensor: Tensor, layout: Layout | Lost) -> None:
        """Records the layout of a tensor."""
        self._known[id(tensor)] = tensor, layout

    def layout(self, tensor: Tensor) -> Layout | Lost:
        """Returns the layout of a tensor: I if it does not depend on slices."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        return Lost() if tensor.untyped_storage()._cdata in self._written else I

    def local_shape(self, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
        """Returns the shape of the rank's slice of a tensor."""
        return tuple(map(int, local_shape(shape, layout, self._rank, self._size)))

    def agrees_with(self, local: Level) -> bool:
        """Returns whether a run on the slices' shapes called the same ops with the predicted shapes."""
        if len(self._steps) != len(local._steps):
            return False
        return all(
            (a.op, a.numbers) == (b.op, b.numbers)
            and all(own in (None, other) for own, other in zip(a.local, b.shapes, strict=True))
            for a, b in zip(self._steps, local._steps, strict=True)
        )

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Runs an op and records the layouts of its results."""
        kwargs = {name: "meta" if isinstance(v, torch.device) else v for name, v in (kwargs or {}).items()}
        number, self._calls = self._calls, self._calls + 1
        given = [self.layout(tensor) for tensor in tensors_in((args, kwargs))]
        each = _of_one(func)
        if each is not None:
            with self:
                results = _for_each(each, args, kwargs)
            return results if func._schema.returns else None
        if number in self.taken_apart:
            return self._in_parts(func, args, kwargs)
        result = func(*args, **kwargs)
        made = tensors_in(result)
        layouts = self._layouts_of(func, given, args, kwargs, made)
        if layouts is None and self._parts(func) is not None:
            self.taken_apart.add(number)
            return self._in_parts(func, args, kwargs)
        self._results.append(result)
        if layouts is None:
            self.draws |= is_random(func)
            layouts = [Lost(self.draws)] * len(made)
        if any(layout != I for layout in given):
            self._note_results(func, args, kwargs, made, layouts)
        self._steps.append(self._step(func, args, kwargs, made))
        self.takes_sizes |= any(name in _SIZES for name in bound(func, args, kwargs))
        return result

    def _step(self, func: OpOverload, args: Args, kwargs: Kwargs, made: Sequence[Tensor] = ()) -> _Step:
        named = bound(func, args, kwargs).items()
        is_number = {name: not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(v)) for name, v in named}
        shapes = [tuple(tensor.shape) for tensor in made]
        local = list[tuple[int, ...] | None]()
        for tensor, shape in zip(made, shapes, strict=True):
            layout = self.layout(tensor)
            is_known = not isinstance(layout, Lost) and len(_held(tensor, layout)) == 1
            local.append(self.local_shape(shape, layout) if is_known else None)  # type: ignore[arg-type]
        return _Step(func, {n: v for n, v in named if is_number[n] and n not in _SIZES}, shapes, local)

    def _layouts_of(
        self, func: OpOverload, given: Sequence[Layout | Lost], args: Args, kwargs: Kwargs, made: Sequence[Tensor]
    ) -> Sequence[Layout | Lost] | None:
        """Returns the layouts of an op's results; None if its row does not determine them."""
        if all(layout == I for layout in given):
            return [I] * len(made)
        lost = next((layout for layout in given if isinstance(layout, Lost)), None)
        return [lost] * len(made) if lost is not None else self._planned(func, args, kwargs, made)

    def _note_results(
        self, func: OpOverload, args: Args, kwargs: Kwargs, made: Sequence[Tensor], layouts: Sequence[Layout | Lost]
    ) -> None:
        if not made:
            raise NotImplementedError(func)  # it returns no tensor
        named = bound(func, args, kwargs)
        written = [named[a.name] for a in func._schema.arguments if a.name in named and a.is_write]
        for tensor, layout in zip(made, layouts, strict=True):
            if not any(tensor is target for target in written):
                self.note(tensor, layout)
        for target in written:
            self._write(target, layouts[0])

    def _parts(self, func: OpOverload) -> Callable[..., object] | None:
        """Returns PyTorch's decomposition of an op, if it has one that may run."""
        if func in self._inside or func._schema.is_mutable or is_random(func):
            return None
        # `_can_decompose`: `decompose` raises for ops without a decomposition in C++ (PyTorch 2.13.0).
        return decomposition_table.get(func) or (func.decompose if func._can_decompose() else None)

    def _in_parts(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        parts = self._parts(func)
        assert parts is not None, func
        self._steps.append(self._step(func, args, kwargs))
        self._inside.add(func)
        try:
            with self:
                return parts(*args, **kwargs)
        finally:
            self._inside.discard(func)

    def _write(self, target: Tensor, value: Layout | Lost) -> None:
        """Records a write into a tensor, and so into all tensors that share its memory."""
        before = self.layout(target)
        if before == value and not isinstance(value, Lost):
            return
        memory = target.untyped_storage()._cdata
        self._written.add(memory)
        for tensor, _ in list(self._known.values()):
            if tensor.untyped_storage()._cdata == memory:
                self.note(tensor, value if isinstance(value, Lost) else Lost())
        if before == I:
            self.note(target, value)

    def _planned(
        self, func: OpOverload, args: Args, kwargs: Kwargs, made: Sequence[Tensor]
    ) -> list[Layout | Lost] | None:
        """Returns the layouts of an op's results by its row; None if no choice is legal without a replacement."""
        target, named = without_writes(func, args, kwargs)
        call = call_of(target, named, made)
        found = planned(call, [_held(t, self.layout(t)) for t in tensors_in(named)], self._size, func.tags)
        if found is None:
            return None
        row, choice = found
        # a replacement that only substitutes the rank's sizes equals the call that this rank made
        takes_sizes = any(a.name in _SIZES for a in func._schema.arguments)
        if local_replacement(row, choice) is not None and not takes_sizes:
            return None
        return [layout if isinstance(layout, Shard) else Lost() for layout in choice.results]


def _held(tensor: Tensor, layout: Layout | Lost) -> list[Layout | Lost]:
    """Returns the layouts that a tensor fits: slices of a dim with stride 0 have the same values at any size."""
    repeated = [dim for dim, step in enumerate(tensor.stride()) if not step] if layout == I else []
    return [layout, *(Shard(dim) for dim in repeated)]


_SIZES = ("size", "shape", "sizes")
"""The names that PyTorch's ops use for the argument with the result's shape."""


_FOREACH = "_foreach_"


def _of_one(func: OpOverload) -> OpOverloadPacket | None:
    """Returns the single-tensor op of an op on lists: `mul_` for `_foreach_mul_`."""
    name = func._schema.name.split("::")[1]
    return getattr(aten, name.removeprefix(_FOREACH), None) if name.startswith(_FOREACH) else None


def _for_each(op: OpOverloadPacket, args: Args, kwargs: Kwargs) -> list[object]:
    # _foreach_addcdiv_ takes its last argument by position, addcdiv_ takes it by name
    schema = getattr(op, op.overloads()[0])._schema.arguments
    positional, named = sum(not a.kwarg_only for a in schema), [a.name for a in schema if a.kwarg_only]
    kwargs = {**dict(zip(named, args[positional:], strict=False)), **kwargs}

    def item(value: object, i: int) -> object:
        return value[i] if isinstance(value, (list, tuple)) else value

    return [
        op(*(item(a, i) for a in args[:positional]), **{name: item(a, i) for name, a in kwargs.items()})
        for i in range(len(args[0]))
    ]
