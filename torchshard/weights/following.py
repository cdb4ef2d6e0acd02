"""Infers whether f(slice) is the slice of f(full tensor), from the rows of the ops that f calls.

    p            f32[8@tp,4]
    p.mul(2)     f32[8@tp,4]       ... -> ...          a slice
    p.t()        f32[4,8@tp]       a b -> b a          a slice, of other dims
    p[:, 0]      f32[8@tp]         a !b -> a           a slice
    p.sum(1)     f32[8@tp]         a b -> a            a slice
    p.sum()      lost              a b ->              a partial sum
    p.sort(0)    lost              !a b -> !a b        a rank can't sort its rows separately

The function runs on meta tensors of the full shapes. Each op that it calls has a row, as in the
planner: if one of its choices accepts the layouts of the operands, that choice gives the layouts of
the results. A choice with a replacement does not count, because the function ran the op itself. Mesh
axes are followed one by one, each on the local shapes that the previous axis leaves.

Finally the function runs on meta tensors of the slice's shape. It must call the same ops with the
same numbers, and return the shapes that the rows predict. A function that computes with the sizes of
its operands, such as `channel_shuffle`, may call different ops and then can't be followed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.core.choices import choices, local_replacement
from torchshard.core.layouts import I, Layout, Shard, is_whole, local_shape
from torchshard.core.mesh import MeshAxis, Place
from torchshard.core.overloads import functional_overload
from torchshard.core.rows import Choice, Row
from torchshard.core.sharding import Placement, Sharding
from torchshard.rules import Call, TensorType, has_rule, is_random, row_of
from torchshard.rules.pointwise import pointwise

aten = torch.ops.aten
Function = Callable[..., object]


class SliceType(NamedTuple):
    """The sharding and global shape of a rank's slice."""

    sharding: Sharding
    whole: tuple[int, ...]
    """The global shape."""


class Lost(NamedTuple):
    """Marks a tensor that depends on slices but is not a slice itself."""

    draws: bool = False
    """Whether it depends on random numbers."""


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
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    types = [held.get(i) for i in range(len(tensors))]
    shapes = [tuple(t.shape) for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
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
        """Returns the outcome, or None if the function can't be followed.

        Args:
            scaled: the number of the leaf that is a size of the slice.
        """
        (first, *others) = [of for of in self.types if of is not None]
        axes = [letter.axis for letter in first.sharding]
        if any([letter.axis for letter in of.sharding] != axes for of in others):
            return None
        shapes = [None if of is None else of.whole for of in self.types]
        levels, found = list[_Level](), list[_Found]()
        try:
            for number, axis in enumerate(axes):
                layouts = [I if of is None else of.sharding[number].layout for of in self.types]
                levels.append(_Level(axis.size, self.place[axis.name], levels[-1].taken_apart if levels else ()))
                found.append(self._run(levels[-1], layouts, shapes, scaled))
                pairs = zip(shapes, layouts, strict=True)
                shapes = [shape and levels[-1].local_shape(shape, layout) for shape, layout in pairs]
            levels.append(_Level(1, 0, levels[-1].taken_apart))
            self._run(levels[-1], [I] * len(shapes), shapes)
            is_alike = all(a.agrees_with(b) for a, b in itertools.pairwise(levels))
        except Exception:  # on meta tensors, or on other sizes, a function may raise anything
            return None
        finally:
            self.draws |= any(level.draws for level in levels)
        is_size = scaled is None or levels[0].takes_sizes
        return self._joined(axes, found) if is_alike and is_size else None

    def _run(
        self,
        level: _Level,
        layouts: Sequence[Layout],
        shapes: Sequence[tuple[int, ...] | None],
        scaled: int | None = None,
    ) -> _Found:
        """Runs the function on meta tensors with these layouts and shapes; None means a tensor's own shape."""
        args, kwargs, tensors = self._called_with(shapes, scaled)
        for tensor, layout in zip(tensors, layouts, strict=True):
            level.note(tensor, layout)
        with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunctionSubclass(), level:
            result = self.func(*args, **kwargs)
        made = _tensors(result)
        return _Found(*([(level.layout(t), tuple(t.shape)) for t in several] for several in (made, tensors)))

    def _called_with(
        self, shapes: Sequence[tuple[int, ...] | None], scaled: int | None = None
    ) -> tuple[Sequence[Any], Mapping[str, Any], list[Tensor]]:
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

    def _ratio(self, shapes: Sequence[tuple[int, ...] | None]) -> float:
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


class _Step(NamedTuple):
    """One call of an op."""

    op: object
    numbers: Mapping[str, object]
    """Its arguments without tensors, except sizes of the result."""
    shapes: Sequence[tuple[int, ...]]
    """The shapes of its results."""
    local: Sequence[tuple[int, ...] | None]
    """The shape of this rank's slice of each result; None if the result is lost or repeats along a dim."""


class _Level(TorchDispatchMode):
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

    def agrees_with(self, local: _Level) -> bool:
        """Returns whether a run on the slices' shapes called the same ops with the predicted shapes."""
        if len(self._steps) != len(local._steps):
            return False
        return all(
            (a.op, a.numbers) == (b.op, b.numbers)
            and all(own in (None, other) for own, other in zip(a.local, b.shapes, strict=True))
            for a, b in zip(self._steps, local._steps, strict=True)
        )

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an op and records the layouts of its results."""
        kwargs = {name: "meta" if isinstance(v, torch.device) else v for name, v in (kwargs or {}).items()}
        number, self._calls = self._calls, self._calls + 1
        given = [self.layout(tensor) for tensor in _tensors((args, kwargs))]
        each = _of_one(func)
        if each is not None:
            with self:
                made = _for_each(each, args, kwargs)
            return made if func._schema.returns else None
        if number in self.taken_apart:
            return self._in_parts(func, args, kwargs)
        result = func(*args, **kwargs)
        made = _tensors(result)
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

    def _step(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor] = ()) -> _Step:
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
        self,
        func: Any,
        given: Sequence[Layout | Lost],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Sequence[Tensor],
    ) -> Sequence[Layout | Lost] | None:
        """Returns the layouts of an op's results; None if its row does not determine them."""
        if all(layout == I for layout in given):
            return [I] * len(made)
        lost = next((layout for layout in given if isinstance(layout, Lost)), None)
        return [lost] * len(made) if lost is not None else self._planned(func, args, kwargs, made)

    def _note_results(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Sequence[Tensor],
        layouts: Sequence[Layout | Lost],
    ) -> None:
        if not made:
            raise NotImplementedError(func)  # it returns no tensor
        named = bound(func, args, kwargs)
        written = [named[a.name] for a in func._schema.arguments if a.name in named and _is_written(a)]
        for tensor, layout in zip(made, layouts, strict=True):
            if not any(tensor is target for target in written):
                self.note(tensor, layout)
        for target in written:
            self._write(target, layouts[0])

    def _parts(self, func: Any) -> Callable[..., Any] | None:
        """Returns PyTorch's decomposition of an op, if it has one that may run."""
        if func in self._inside or func._schema.is_mutable or is_random(func):
            return None
        return decomposition_table.get(func) or (func.decompose if func._can_decompose() else None)

    def _in_parts(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
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
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]
    ) -> list[Layout | Lost] | None:
        """Returns the layouts of an op's results by its row; None if no choice is legal without a replacement."""
        target, named = _without_writes(func, args, kwargs)
        call = call_of(target, named, made)
        operands = [t for t in pytree.tree_leaves(list(named.values())) if isinstance(t, Tensor)]
        found = planned(call, [_held(t, self.layout(t)) for t in operands], self._size, func.tags)
        if found is None:
            return None
        row, choice = found
        # a replacement that only substitutes the rank's sizes equals the call that this rank made
        takes_sizes = any(a.name in _SIZES for a in func._schema.arguments)
        if local_replacement(row, choice) is not None and not takes_sizes:
            return None
        return [layout if isinstance(layout, Shard) else Lost() for layout in choice.results]


def _held(tensor: Tensor, layout: Any) -> list[Layout]:
    """Returns the layouts that a tensor fits: slices of a dim with stride 0 have the same values at any size."""
    repeated = [dim for dim, step in enumerate(tensor.stride()) if not step] if layout == I else []
    return [layout, *(Shard(dim) for dim in repeated)]


_SIZES = ("size", "shape", "sizes")
"""The names that PyTorch's ops use for the argument with the result's shape."""


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def planned(
    call: Call, given: Sequence[Collection[Layout]], size: int, tags: Sequence[torch.Tag] = ()
) -> tuple[Row, Choice] | None:
    """Returns an op's row and the choice that accepts the operands' layouts; None if no choice does.

    Args:
        given: the layouts that each operand fits.
        size: the number of ranks.
        tags: the tags of the called op; the target of `call` may be its functional overload.
    """
    row = row_of(call)
    if row is None and torch.Tag.pointwise in tags and not is_random(call.target):
        row = pointwise(call)
    if row is None:
        return None
    hints = [(i, layout) for i, layouts in enumerate(given) for layout in layouts if isinstance(layout, Shard)]
    for choice in choices(row, size, hints):
        wanted = (I if is_whole(layout) else layout for layout in choice.operands)
        if all(layout in layouts for layout, layouts in zip(wanted, given, strict=True)):
            return row, choice
    return None


def call_of(target: OpOverload[..., Any], named: Mapping[str, Any], made: object) -> Call:
    """Returns the `Call` of an op for its rule.

    Args:
        named: the arguments by name; defaults are added.
    """
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    bound = {**defaults, **named}
    typed = pytree.tree_map_only(Tensor, lambda t: TensorType(tuple(t.shape), t.dtype), bound)
    results = tuple(TensorType(tuple(t.shape), t.dtype) for t in pytree.tree_leaves(made) if isinstance(t, Tensor))
    return Call(target, {a.name: typed[a.name] for a in target._schema.arguments if a.name in typed}, results)


def bound(target: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an op's call by their names."""
    return {**dict(zip((a.name for a in target._schema.arguments), args, strict=False)), **kwargs}


def _without_writes(
    func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpOverload[..., Any], dict[str, Any]]:
    """Returns the functional overload of an op without a rule, or the op itself, and the arguments by name."""
    named = bound(func, args, kwargs)
    functional = functional_overload(func) if func._schema.is_mutable and not has_rule(func) else None
    if functional is None:
        return func, named
    values = [named[a.name] for a in func._schema.arguments if a.name in named and not a.is_out]
    names = [a.name for a in func._schema.arguments if a.name in named and not a.is_out]
    # the first argument has another name in some pairs: dropout_ calls it `self`, dropout calls it `input`
    return functional, dict(zip((functional._schema.arguments[0].name, *names[1:]), values, strict=True))


_FOREACH = "_foreach_"


def _of_one(func: OpOverload[..., Any]) -> Callable[..., Any] | None:
    """Returns the single-tensor op of an op on lists: `mul_` for `_foreach_mul_`."""
    name = func._schema.name.split("::")[1]
    return getattr(aten, name.removeprefix(_FOREACH), None) if name.startswith(_FOREACH) else None


def _for_each(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    # _foreach_addcdiv_ takes its last argument by position, addcdiv_ takes it by name
    schema = getattr(op, op.overloads()[0])._schema.arguments
    positional, named = sum(not a.kwarg_only for a in schema), [a.name for a in schema if a.kwarg_only]
    kwargs = {**dict(zip(named, args[positional:], strict=False)), **kwargs}

    def item(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    return [
        op(*(item(a, i) for a in args[:positional]), **{name: item(a, i) for name, a in kwargs.items()})
        for i in range(len(args[0]))
    ]
