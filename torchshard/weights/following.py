"""Infers whether f(slice) is the slice of f(full tensor), from the rows of the ops that f calls.

    p            f32[8@tp,4]
    p.mul(2)     f32[8@tp,4]       ... -> ...          a slice
    p.t()        f32[4,8@tp]       a b -> b a          a slice, of other dims
    p[:, 0]      f32[8@tp]         a !b -> a           a slice
    p.sum(1)     f32[8@tp]         a b -> a            a slice
    p.sum()      lost              a b ->              a partial sum
    p.sort(0)    lost              !a b -> !a b        a rank can't sort its rows separately

The function runs on meta tensors of the full shapes, and the row of each op that it calls gives the
layouts of the op's results (`op_layouts`). Mesh axes are followed one by one, each on the local
shapes that the previous axis leaves.

Finally the function runs on meta tensors of the slice's shape. It must call the same ops with the
same numbers, and return the shapes that the rows predict. A function that computes with the sizes of
its operands, such as `channel_shuffle`, may call different ops and then can't be followed.

DTensor's strategies for ops (PyTorch 2.13) serve the same purpose, but where operands fit no
strategy, DTensor inserts a collective. This module could go together with `local_slice`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchshard.core.layouts import I, Layout, Shard, local_shape
from torchshard.core.mesh import MeshAxis, Place
from torchshard.core.sharding import Placement, Sharding
from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.weights.op_calls import tensors_in
from torchshard.weights.op_layouts import Level, Lost

Function = Callable[..., object]
Shapes = Sequence[tuple[int, ...] | None]
"""The shapes of a call's tensors; None for a tensor's own."""


class SliceType(NamedTuple):
    """The sharding and global shape of a rank's slice."""

    sharding: Sharding
    whole: tuple[int, ...]
    """The global shape."""


Followed = SliceType | Lost | None
"""The inferred type of a tensor; None if it does not depend on slices."""


@dataclass(frozen=True)
class Outcome:
    """The inferred types of a call's results and arguments."""

    results: tuple[Followed, ...]
    """The type of each tensor that the function returns."""
    written: Mapping[int, SliceType | Lost] = field(default_factory=dict)
    """Number of a tensor argument -> its type if the function writes to it; only types that are new."""
    slices: Collection[int] = ()
    """The numbers of the tensor arguments that were treated as slices."""


def follow(
    func: Function,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    held: Mapping[int, SliceType],
    place: Place,
    result: object,
) -> Outcome:
    """Infers the types of a call's results and of the arguments that it wrote to.

    Args:
        held: the number of a slice among the tensor arguments -> its type.
        place: this rank's place.
        result: the value that the function returned on this rank.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    types = [held.get(i) for i in range(len(tensors_in(leaves)))]
    shapes = [tuple(t.shape) for t in tensors_in(result)]
    key = _key(func, structure, leaves, types, place, shapes)
    if key in _KNOWN:
        return _KNOWN[key]
    question = _Question(func, leaves, structure, types, set(held), place, shapes)
    outcome = next(filter(None, (asked.answered(scaled) for asked, scaled in question.readings())), None)
    if outcome is None:
        lost = Lost(question.draws)
        outcome = Outcome((lost,) * len(shapes), dict.fromkeys(held, lost))
    if key is not None:
        if len(_KNOWN) >= MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = outcome
    return outcome


_KNOWN: dict[Hashable, Outcome] = {}
MAX_KNOWN = 1 << 12
"""The size at which the cache is cleared; a step of a hand-written optimizer adds a few calls per shape."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice)


def _key(
    func: Function,
    structure: object,
    leaves: Sequence[object],
    types: Sequence[SliceType | None],
    place: Place,
    shapes: Sequence[tuple[int, ...]],
) -> Hashable:
    """Returns the cache key of a call, with all that its outcome depends on; None if it can't be cached."""
    given, known = list[Hashable](), iter(types)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            given.append((tuple(leaf.shape), leaf.dtype, leaf.layout, next(known)))
        elif isinstance(leaf, _PLAIN):
            given.append((type(leaf), str(leaf)))
        else:
            return None
    return func, str(structure), tuple(given), tuple(place.items()), tuple(shapes)


@dataclass
class _Question:
    func: Function
    leaves: Sequence[object]
    structure: pytree.TreeSpec
    types: Sequence[SliceType | None]
    """The type of each tensor among the leaves."""
    held: Collection[int]
    """The numbers of the tensors marked as slices; others with a type only have a slice's shape."""
    place: Place
    shapes: Sequence[tuple[int, ...]]
    """The shapes of this rank's results."""
    draws: bool = False

    def readings(self) -> Iterator[tuple[_Question, int | None]]:
        """Yields the interpretations of the call, each with the leaf that is a size of the slice, if any.

        First, all other tensors and numbers refer to the full tensors. If the function rejects them,
        tensors of a slice's shape are slices too. Last, one number is a size of the slice and is
        scaled to the full size, as in `p.view(p.shape[0], -1)`. All other numbers refer to the full
        tensor: `p.view(2, -1, 6)` means two heads on any rank.
        """
        yield self, None
        takes_wholes = self._takes_wholes()
        question = self if takes_wholes else self._with_tensors_of_a_slices_shape()
        if question is not self:
            yield question, None
        if takes_wholes and self._infers_a_size_of_one():
            return
        numbers = (i for i, leaf in enumerate(self.leaves) if type(leaf) is int and question._is_size(leaf))
        yield from ((question, i) for i in numbers)

    def _is_size(self, number: int) -> bool:
        """Returns whether a number is the size of a split dim, or its product with neighboring sizes."""
        own = (tuple(leaf.shape) for leaf in self.leaves if isinstance(leaf, Tensor))
        for of, sizes in zip(self.types, own, strict=True):
            for dim in (d for d, size in enumerate(sizes) if of is not None and size != of.whole[d]):
                spans = itertools.product(range(dim + 1), range(dim + 1, len(sizes) + 1))
                if number > 0 and any(number == math.prod(sizes[i:j]) for i, j in spans):
                    return True
        return False

    def _infers_a_size_of_one(self) -> bool:
        """Returns whether a view infers a size of 1: `p.view(4, -1, 6)` of four rows means four heads."""
        own = [tuple(leaf.shape) for leaf in self.leaves if isinstance(leaf, Tensor)]
        stated = sum(type(leaf) is int and leaf == 1 for leaf in self.leaves)
        most = max(sizes.count(1) for sizes in own) + stated
        return all(len(sizes) > 1 for sizes in own) and any(shape.count(1) > most for shape in self.shapes)

    def _with_tensors_of_a_slices_shape(self) -> _Question:
        own = [tuple(leaf.shape) for leaf in self.leaves if isinstance(leaf, Tensor)]
        like = {own[i]: self.types[i] for i in sorted(self.held, reverse=True)}
        return replace(self, types=[of or like.get(shape) for of, shape in zip(self.types, own, strict=True)])

    def _takes_wholes(self) -> bool:
        args, kwargs, _ = self._called_with([of and of.whole for of in self.types])
        try:
            with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunctionSubclass():
                self.func(*args, **kwargs)
        except Exception:  # of any class
            return False
        return True

    def answered(self, scaled: int | None) -> Outcome | None:
        """Returns the outcome, or None if unknown; `scaled`: the number of the leaf that is a size of the slice."""
        (first, *others) = [of for of in self.types if of is not None]
        axes = [letter.axis for letter in first.sharding]
        if any([letter.axis for letter in of.sharding] != axes for of in others):
            return None
        shapes = [None if of is None else of.whole for of in self.types]
        levels, found = list[Level](), list[_Found]()
        try:
            for number, axis in enumerate(axes):
                layouts = [I if of is None else of.sharding[number].layout for of in self.types]
                levels.append(Level(axis.size, self.place[axis.name], levels[-1].taken_apart if levels else ()))
                found.append(self._run(levels[-1], layouts, shapes, scaled))
                pairs = zip(shapes, layouts, strict=True)
                shapes = [shape and levels[-1].local_shape(shape, layout) for shape, layout in pairs]
            levels.append(Level(1, 0, levels[-1].taken_apart))
            self._run(levels[-1], [I] * len(shapes), shapes)
            is_alike = all(a.agrees_with(b) for a, b in itertools.pairwise(levels))
        except Exception:  # on meta tensors, or on other sizes, a function may raise anything
            return None
        finally:
            self.draws |= any(level.draws for level in levels)
        is_size = scaled is None or levels[0].takes_sizes
        return self._joined(axes, found) if is_alike and is_size else None

    def _run(self, level: Level, layouts: Sequence[Layout], shapes: Shapes, scaled: int | None = None) -> _Found:
        """Runs the function on meta tensors with these layouts and shapes."""
        args, kwargs, tensors = self._called_with(shapes, scaled)
        for tensor, layout in zip(tensors, layouts, strict=True):
            level.note(tensor, layout)
        # `_AutoDispatchBelowAutograd`: else autograd splits composite ops before `level` sees them (PyTorch 2.13.0).
        with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunctionSubclass(), level:
            result = self.func(*args, **kwargs)
        made = tensors_in(result)
        return _Found(*([(level.layout(t), tuple(t.shape)) for t in several] for several in (made, tensors)))

    def _called_with(self, shapes: Shapes, scaled: int | None = None) -> tuple[Args, Kwargs, list[Tensor]]:
        """Returns the arguments with meta tensors of these shapes, and those tensors."""
        shape_of, given, tensors = iter(shapes), list[object](), list[Tensor]()
        ratio = self._ratio(shapes)
        for number, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                shape = next(shape_of)
                tensors.append(torch.empty(leaf.shape if shape is None else shape, dtype=leaf.dtype, device="meta"))
                given.append(tensors[-1])
            elif number == scaled and isinstance(leaf, int):
                given.append(_whole_number(leaf * ratio))
            else:
                given.append("meta" if isinstance(leaf, torch.device) else leaf)
        return *pytree.tree_unflatten(given, self.structure), tensors

    def _ratio(self, shapes: Shapes) -> float:
        """Returns a slice's number of elements at these shapes, divided by this rank's."""
        of_leaves = (leaf.numel() for leaf in self.leaves if isinstance(leaf, Tensor))
        whole, own = next((math.prod(s), n) for s, n in zip(shapes, of_leaves, strict=True) if s is not None)
        return whole / own if own else 1.0

    def _joined(self, axes: Sequence[MeshAxis], found: Sequence[_Found]) -> Outcome | None:
        """Combines the types along all axes; None if this rank's results have different shapes."""
        if any(len(each.results) != len(self.shapes) for each in found):
            return None
        results = list[Followed]()
        for i, own in enumerate(self.shapes):
            joined = self._join(axes, [each.results[i] for each in found])
            if isinstance(joined, SliceType) and self._local(joined) != own:
                return None
            results.append(joined)
        written = dict[int, SliceType | Lost]()
        for i, before in enumerate(self.types):
            after = self._join(axes, [each.after[i] for each in found])
            if after is not None and (after != before or i not in self.held):
                written[i] = after
        return Outcome(tuple(results), written, [i for i, of in enumerate(self.types) if of is not None])

    def _join(self, axes: Sequence[MeshAxis], along: Sequence[tuple[Layout | Lost, tuple[int, ...]]]) -> Followed:
        layouts, (_, whole) = [layout for layout, _ in along], along[0]
        lost = next((layout for layout in layouts if isinstance(layout, Lost)), None)
        if lost is not None:
            return lost
        pairs = zip(axes, layouts, strict=True)
        letters = [Placement(axis, layout) for axis, layout in pairs if isinstance(layout, Shard)]
        if not letters:
            return None
        return SliceType(Sharding.of(*letters), whole) if len(letters) == len(axes) else Lost()

    def _local(self, of: SliceType) -> tuple[int, ...]:
        shape = of.whole
        for axis, layout in of.sharding:
            shape = local_shape(shape, layout, self.place[axis.name], axis.size)
        return tuple(shape)


class _Found(NamedTuple):
    """The layouts along one mesh axis after the function ran."""

    results: Sequence[tuple[Layout | Lost, tuple[int, ...]]]
    """The layout and shape of each result."""
    after: Sequence[tuple[Layout | Lost, tuple[int, ...]]]
    """The layout and shape of each tensor argument."""


def _whole_number(value: float) -> int:
    if not value.is_integer():
        raise ValueError(value)
    return int(value)
