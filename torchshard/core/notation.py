"""Rows: how one op may be split, written as one line of einsum-like factors.

    linear      ... k, n k -> ... n          split n: column parallel; split k: row parallel, the result is Partial
    view        a b (c d) -> a b c d         a merged dim, major axis first; splitting c deals units of d
    split       a b+c -> a b, a c            a dim that is a concatenation; its axes are split together
    sort        a !b -> a !b                 b is unsplittable
    expand      1 -> a                       1 is a dim of size one that no split touches

A row is a sharding rule. It names the factors of every dim, as einops does, and the names alone
determine all legal layouts of the op. The code calls a factor `axis`. The same letter is the same
factor. A factor that appears in no result is summed, so splitting it gives Partial results. An
operand without the split factor is Replicate. `...` stands for leading factors, aligned from the
right.

`bind` combines a text and the shapes of an op into a `Row`; `core.choices` derives from a row the
legal ways to run the op.

Sizes are ints, or sympy expressions if they are dynamic. A factor of dynamic size is split only if
its size is known to be a multiple of the number of ranks, and then into equal slices. A factor of
size `4*s` becomes two factors, `s` and 4; the second splits like any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypedDict, Unpack

import sympy

from torchshard.core.errors import RuleError
from torchshard.core.layouts import (
    EQUAL,
    Layout,
    Part,
    Shard,
    Size,
    local_extent,
    local_size,
    ranges,
)
from torchshard.core.mesh import Coordinate

Term = tuple[str, ...]
"""A product of factors, major first; the empty product is a dim of size one."""
Dim = tuple[Term, ...]
"""A concatenation of terms; nearly always a single term."""
AxisParts = Mapping[str, tuple[Part, ...]]
"""The factors that are split together -> the parts that each is split into."""
LocalFn = Callable[..., Any]
"""A replacement, (local: Local, *args, **kwargs) -> result: run by a rank if a split changes the op.

fx calls it with Proxies to record the rank's graph; eager collectives call it with tensors.
"""

MAX_PARTS = 64
"""A merged dim is unsplittable if its split would need more parts than this."""


@dataclass(frozen=True, eq=False)
class Row:
    """The factors of one op, bound to its global sizes.

    Rows hash by identity (`eq=False`): `choices` is cached by row, and a row's mappings are
    unhashable.
    """

    text: str
    """The row's text as the rule wrote it, for messages."""
    operands: tuple[tuple[Dim, ...], ...]
    """The dims of each tensor operand, in the order of the op's arguments."""
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, Size]
    """The size of each factor."""
    unsplittable: frozenset[str] = frozenset()
    """Factors that must not be split, written !a."""
    equal: frozenset[str] = frozenset()
    """Factors of dynamic size that may be split, into equal slices."""
    options: RowOptions = field(default_factory=lambda: RowOptions())


@dataclass(frozen=True)
class RowOptions:
    """The properties of an op that its factors do not express."""

    linear: tuple[frozenset[int], ...] = ()
    """Sets of operands in which the op is jointly linear: if one set is P and the rest R, results
    are P."""
    local: Mapping[str, LocalFn] = field(default_factory=dict)
    """Factor -> replacement, if splitting the factor changes the local op; '*': any factor."""
    reduced: frozenset[str] = frozenset()
    """Factors that the replacement sums over: results without one are Invariant, not Partial."""
    by_size: bool = False
    """Whether the replacements read only sizes, not starts, so a factor may have several parts.

    A replacement of '*' must always work with several parts, whatever this field says.
    """
    fills_ranks: bool = False
    """Whether repeated parts must leave no rank empty: the op infers the full size from its slice."""
    aligned: Mapping[str, int] = field(default_factory=dict)
    """Factor -> a number that must divide each rank's size, because kernels read that many at once."""
    mutates: frozenset[int] = frozenset()
    """Operands that the op writes to, used as stored: a conversion would write to a copy."""
    any_size: frozenset[str] = frozenset()
    """Factors whose replacement works for any size, even a dynamic one; '*': all factors."""
    together: frozenset[str] = frozenset()
    """Factors that are split together or not at all."""


class _PlainKeywords(TypedDict, total=False):
    local: Mapping[str, LocalFn]
    by_size: bool
    fills_ranks: bool
    aligned: Mapping[str, int]


class RowKeywords(_PlainKeywords, total=False):
    """The fields of RowOptions as keyword arguments of `bind`, which freezes the collections."""

    linear: Iterable[Iterable[int]]
    reduced: Iterable[str]
    mutates: Iterable[int]
    any_size: Iterable[str]
    together: Iterable[str]


def _row_options(
    *,
    linear: Iterable[Iterable[int]] = (),
    reduced: Iterable[str] = (),
    mutates: Iterable[int] = (),
    any_size: Iterable[str] = (),
    together: Iterable[str] = (),
    **others: Unpack[_PlainKeywords],
) -> RowOptions:
    sets = tuple(frozenset(operands) for operands in linear)
    return RowOptions(
        linear=sets,
        reduced=frozenset(reduced),
        mutates=frozenset(mutates),
        any_size=frozenset(any_size),
        together=frozenset(together),
        **others,
    )


@dataclass(frozen=True)
class Choice:
    """One legal way to run one op."""

    name: str
    """'I', 'R', 'P', or the split factors: 'split n'."""
    operands: tuple[Layout, ...]
    """The layout that each tensor operand must have."""
    results: tuple[Layout, ...]
    """The layout of each result."""
    axes: tuple[tuple[str, tuple[Part, ...]], ...] = ()
    """The split factors with their parts."""

    @property
    def splits_dynamic(self) -> bool:
        """Whether a factor of dynamic size is split, into equal slices."""
        return any(parts == EQUAL for _, parts in self.axes)


@dataclass(frozen=True)
class Local:
    """The row, choice and coordinate that a replacement may read on its rank."""

    row: Row
    choice: Choice
    coordinate: Coordinate

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.coordinate.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.coordinate.axis.size

    @property
    def group(self) -> str:
        """The name under which collectives find the process group."""
        return self.coordinate.group

    def parts(self, axis: str) -> tuple[Part, ...] | None:
        """Returns the parts that a factor is split into; None if it is not split."""
        return dict(self.choice.axes).get(axis)

    def size(self, axis: str) -> Size:
        """Returns this rank's size of a factor."""
        parts, size = self.parts(axis), self.row.sizes[axis]
        if parts is None:
            return size
        return size / self.world if parts == EQUAL else local_size(parts, self.rank, self.world)

    def sizes(self, axis: str) -> list[int]:
        """Returns each rank's size of a split factor of static size."""
        return [local_size(self.parts(axis) or (), rank, self.world) for rank in range(self.world)]

    def start(self, axis: str) -> int:
        """Returns the start of this rank's slice of a split factor of static size.

        Raises:
            RuleError: the factor is split into several parts, so a rank has several slices.
        """
        parts = self.parts(axis) or ()
        if len(parts) != 1:
            raise RuleError(f"axis {axis} has no single start", where=self.row.text, why=f"it is split as {parts}")
        return ranges(parts, self.rank, self.world)[0][0]

    def resize(self, sizes: Sequence[Size]) -> list[Size]:
        """Returns this rank's sizes of the first result, from the global sizes among the arguments.

        A dynamic size comes from the arguments: there it is an fx.Proxy, or -1 to be inferred.
        """
        layout, whole = self.choice.results[0], self.whole_shape()
        local = [size if isinstance(size, int) else argument for size, argument in zip(whole, sizes, strict=True)]
        if isinstance(layout, Shard):
            size = local[layout.dim]
            inferred = isinstance(size, int) and size == -1
            local[layout.dim] = size if inferred else local_extent(size, layout, self.rank, self.world)
        return local

    def whole_shape(self) -> list[Size]:
        """Returns the global shape of the first result."""
        return [dim_size(dim, self.row.sizes) for dim in self.row.results[0]]


# --- parse -----------------------------------------------------------------------------------------------------------


_TERM = r"(?:!?\w+|\((?:!?\w+(?: !?\w+)*)?\))"
_DIM = re.compile(rf"\.\.\.|{_TERM}(?:\+{_TERM})*")


def _tokens(side: str) -> Iterator[str]:
    depth, word = 0, ""
    for char in side:
        depth += (char == "(") - (char == ")")
        if char == " " and depth == 0:
            if word:
                yield word
            word = ""
        else:
            word += char
    if word:
        yield word


def _parse_dim(token: str) -> tuple[Dim, frozenset[str]]:
    """Returns a dim's terms and unsplittable factors: `(a !b)+c` is ((a, b), (c,)) and {b}."""
    terms, unsplittable = [], set()
    for segment in token.split("+"):
        names = segment.strip("()").split()
        unsplittable |= {n[1:] for n in names if n.startswith("!")}
        terms.append(tuple(n.lstrip("!") for n in names if n != "1"))
    return tuple(terms), frozenset(unsplittable)


@cache
def _parse(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the dims of each operand and of each result, as texts."""
    if text.count("->") != 1:
        raise RuleError(f"the row {text!r} needs one '->'", where=text, attempt="'... k, n k -> ... n'")
    left, right = ([list(_tokens(group)) for group in side.split(",")] for side in text.split("->"))
    for tokens in (*left, *right):
        wrong = [token for token in tokens if not _DIM.fullmatch(token)]
        if wrong or tokens.count("...") > 1:
            raise RuleError(
                f"invalid dim {wrong[0]!r}" if wrong else "a tensor has two '...'",
                where=text,
                why="a dim is an axis a or !a, merged axes (a b), a concatenation a+b, 1, or (once) '...'",
                attempt="'... (h !d) -> ... h !d'",
            )
    return left, right


def _expand(tokens: list[str], ndim: int, where: str) -> list[str]:
    """Returns the dims with `...` spelled out: `... k` for a tensor of 3 dims is `_1 _0 k`.

    The leading factors are numbered from the right, which aligns operands of different ndim as
    PyTorch broadcasts.
    """
    if "..." not in tokens:
        if len(tokens) != ndim:
            dims = " ".join(tokens)
            raise RuleError(f"the row has {len(tokens)} dims, the tensor {ndim}", where=where, why=f"dims: {dims}")
        return tokens
    position, leading = tokens.index("..."), ndim - len(tokens) + 1
    if leading < 0:
        raise RuleError(f"the row has {len(tokens) - 1} dims or more, the tensor {ndim}", where=where)
    return [*tokens[:position], *(f"_{i}" for i in reversed(range(leading))), *tokens[position + 1 :]]


def bind(
    text: str,
    operands: Sequence[Sequence[Size]],
    results: Sequence[Sequence[Size]],
    sizes: Mapping[str, Size] | None = None,
    multiples: Collection[Size] = (),
    **options: Unpack[RowKeywords],
) -> Row:
    """Binds a row's text to the global shapes of its op.

    Args:
        operands, results: global shapes, one per tensor.
        sizes: sizes of factors that occur only in merged or concatenated dims, which no shape
            determines.
        multiples: the dynamic sizes that are multiples of the number of ranks.
        options: fields of RowOptions.

    Raises:
        RuleError: the text does not fit the shapes.
    """
    left, right = _parse(text)
    # an empty side of the text is one scalar or no tensor at all; the shapes distinguish the two
    left = [] if left == [[]] and not operands else left
    right = [] if right == [[]] and not results else right
    if len(left) != len(operands) or len(right) != len(results):
        raise RuleError(
            f"the row has {len(left)} operands and {len(right)} results, "
            f"the op {len(operands)} tensors and {len(results)} results",
            where=text,
        )
    known: dict[str, Size] = dict(sizes or {})
    shapes = [*operands, *results]
    bound, unsplittable = _bind_dims(text, left + right, shapes, known)
    _check_dims(bound, shapes, known, text)
    strangers = known.keys() - {axis for dims in bound for dim in dims for term in dim for axis in term}
    if strangers:
        raise RuleError(f"axis {min(strangers)} is in no tensor", where=text, why="sizes= has a size for it")
    n, row_options = len(operands), _row_options(**options)
    named = {*row_options.local, *row_options.reduced, *row_options.together}
    unknown = sorted(named - known.keys() - {"*"})
    if unknown:
        raise RuleError(f"axis {unknown[0]} is in no tensor", where=text, why="the rule's options name it")
    for axis, function in row_options.local.items():
        if not callable(function):
            raise RuleError(f"local={{{axis!r}: ...}} is no function", where=text, why=f"it is {function!r:.80}")
    bound = _with_factors(bound, known, unsplittable | named, multiples)
    equal = frozenset(_equal_axes(known, row_options, multiples))
    return Row(text, tuple(bound[:n]), tuple(bound[n:]), known, frozenset(unsplittable), equal, row_options)


def _equal_axes(sizes: Mapping[str, Size], options: RowOptions, multiples: Collection[Size]) -> Iterator[str]:
    """Yields the splittable factors of dynamic size that are multiples of the number of ranks."""
    for axis, size in sizes.items():
        replaced = not {axis, "*"}.isdisjoint(options.local)
        fits = not replaced or not {axis, "*"}.isdisjoint(options.any_size)
        if fits and dynamic_factor(size, multiples) is not None:
            yield axis


def dynamic_factor(size: Size, factors: Collection[Size]) -> Size | None:
    """Returns the element of `factors` that divides a dynamic size (`2*s` for `6*s*t`), if any.

    If several divide it, returns the one with the largest numeric coefficient.
    """
    if isinstance(size, int):
        return None
    exprs = map(sympy.sympify, factors)
    found = [factor for factor in exprs if (size / factor).as_numer_denom()[1] == 1]
    return max(found, key=lambda factor: factor.as_coeff_Mul()[0], default=None)


def _bind_dims(
    text: str, tensors: list[list[str]], shapes: Sequence[Sequence[Size]], known: dict[str, Size]
) -> tuple[list[tuple[Dim, ...]], set[str]]:
    """Returns each tensor's dims, and unsplittable factors; adds plain factors' sizes to `known`."""
    unsplittable: set[str] = set()
    bound: list[tuple[Dim, ...]] = []
    for tokens, shape in zip(tensors, shapes, strict=True):
        dims = []
        for token, size in zip(_expand(tokens, len(shape), text), shape, strict=True):
            # a leading dim of size one broadcasts against the others, so it is not the same factor
            dim, marked = _parse_dim("1" if token.startswith("_") and size == 1 else token)
            unsplittable |= marked
            if len(dim) == 1 and len(dim[0]) == 1:
                known.setdefault(dim[0][0], size)
                _check_size(f"axis {dim[0][0]}", known[dim[0][0]], size, text)
            dims.append(dim)
        bound.append(tuple(dims))
    return bound, unsplittable


def _with_factors(
    bound: list[tuple[Dim, ...]], sizes: dict[str, Size], whole: set[str], multiples: Collection[Size]
) -> list[tuple[Dim, ...]]:
    """Replaces a factor of size `4*s` with a product of two, `s` and 4, so the second can be split.

    Args:
        sizes: the sizes of the factors, modified in place.
        whole: factors to keep as one, because they are unsplittable or the row's options name them.
        multiples: sizes to keep as one, because they are split into equal parts.
    """
    factors: dict[str, tuple[str, str]] = {}
    for axis, size in list(sizes.items()):
        multiple = dynamic_factor(size, multiples) or 1
        factor = 1 if isinstance(size, int) or axis in whole else int((size / multiple).as_coeff_Mul()[0])
        if factor > 1:
            factors[axis] = (axis, f"{axis}*")
            sizes[axis], sizes[f"{axis}*"] = size / factor, factor

    def refine(term: Term) -> Term:
        return tuple(factor for axis in term for factor in factors.get(axis, (axis,)))

    if not factors:
        return bound
    return [tuple(tuple(map(refine, dim)) for dim in dims) for dims in bound]


def _check_size(what: str, known: Size, size: Size, text: str) -> None:
    if isinstance(known, int) and isinstance(size, int) and known != size:
        raise RuleError(f"{what} has two sizes", where=text, why=f"{known} and {size}")


def _check_dims(
    bound: Sequence[Sequence[Dim]], shapes: Sequence[Sequence[Size]], known: Mapping[str, Size], text: str
) -> None:
    for dims, shape in zip(bound, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            missing = [axis for term in dim for axis in term if axis not in known]
            if missing:
                raise RuleError(f"axis {missing[0]} has no size", where=text, attempt="pass it in sizes=")
            _check_size(f"dim ({'+'.join(map(' '.join, dim))})", dim_size(dim, known), size, text)


def dim_size(dim: Dim, sizes: Mapping[str, Size]) -> Size:
    """Returns the size of a dim from the sizes of its factors."""
    return sum(math.prod(sizes[axis] for axis in term) for term in dim)
