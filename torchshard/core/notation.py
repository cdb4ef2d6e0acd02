"""Rows: how one op may be split, as one line of einsum-like factors.

    linear      ... k, n k -> ... n          split n: column parallel; split k: row parallel, the result is Partial
    view        a b (c d) -> a b c d         a merged dim, major axis first; splitting c deals units of d
    split       a b+c -> a b, a c            a dim that is a concatenation; its axes are split together
    sort        a !b -> a !b                 b may not be split
    expand      1 -> a                       1 is a dim of size one that no split touches

The same letter is the same axis. An axis absent from the results is summed, so that splitting it gives Partial
results; an operand without the split axis is Replicate. `...` stands for leading axes, aligned at their last.

What turns into what: text and shapes become a `Row` (`bind`), a row and a world size become `Choice`s (`choices`),
each the layouts of all operands and results. Sizes are ints, or sympy expressions where a size is dynamic. An axis of
dynamic size is never split; one of four times a dynamic size is two, of which the minor, of size four, may be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from torchshard.core.errors import RuleError
from torchshard.core.layouts import (
    I,
    Layout,
    P,
    Part,
    R,
    Shard,
    canonical,
    local_extent,
    local_size,
    parts_of,
    parts_size,
    ranges,
)
from torchshard.core.mesh import Coordinate

Size = Any
"""An int, or a sympy expression for a dynamic size."""
Term = tuple[str, ...]
"""A product of axes, major first; the empty product is a dim of size one."""
Dim = tuple[Term, ...]
"""A concatenation of terms; nearly always of one."""
LocalFn = Callable[..., Any]
"""(local: Local, *args, **kwargs) -> result: what a rank computes where splitting an axis changes the op."""

MAX_PARTS = 64
"""A merged dim whose split would need more segments than this counts as not splittable."""


@dataclass(frozen=True, eq=False)
class Row:
    """The factors of one op, bound to its global sizes."""

    text: str
    """As written, for people."""
    operands: tuple[tuple[Dim, ...], ...]
    """The dims of each tensor operand, in the order of the op's arguments."""
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, Size]
    """The size of each axis."""
    blocked: frozenset[str] = frozenset()
    """Axes that may not be split."""
    options: RowOptions = field(default_factory=lambda: RowOptions())


class Inside(NamedTuple):
    """A collective inside a replacement."""

    name: str
    axes: tuple[str, ...] = ()
    """A rank gives as many numbers as the product of its sizes of these axes,"""
    numbers: int = 1
    """times so many;"""
    times: tuple[str, ...] = ()
    """and does so as often as the product of the sizes of these says."""


@dataclass(frozen=True)
class RowOptions:
    """What a row says beyond its factors."""

    linear: tuple[frozenset[int], ...] = ()
    """Sets of operands in which the op is jointly linear: all of a set Partial and the rest R gives Partial results."""
    local: Mapping[str, LocalFn] = field(default_factory=dict)
    """Axis -> replacement where splitting it changes the local computation; '*' for any axis."""
    comm: Mapping[str, tuple[Inside, ...]] = field(default_factory=dict)
    """Axis -> the collectives inside its replacement."""
    reduced: frozenset[str] = frozenset()
    """Axes whose replacement does its own reducing: results without the axis are then Invariant, not Partial."""
    by_size: bool = False
    """Whether the replacements ask for sizes alone, so that an axis may be split in several parts."""
    fills_ranks: bool = False
    """Whether a split in repeated parts must leave every rank some: what a rank has none of has no whole size."""
    mutates: frozenset[int] = frozenset()
    """Operands that the op writes to: they are taken as they are stored, never converted."""


@dataclass(frozen=True)
class Choice:
    """One legal way to run one op."""

    name: str
    """'I', 'R', 'P', or the split axes: 'split n'."""
    operands: tuple[Layout, ...]
    """What each tensor operand must be."""
    results: tuple[Layout, ...]
    """What each result then is."""
    axes: tuple[tuple[str, tuple[Part, ...]], ...] = ()
    """The split axes with their parts."""


@dataclass(frozen=True)
class Local:
    """What a replacement may ask about the rank that it runs on."""

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
        """How an axis is split; None where it is not."""
        return dict(self.choice.axes).get(axis)

    def size(self, axis: str) -> Any:
        """This rank's size of an axis."""
        parts = self.parts(axis)
        return self.row.sizes[axis] if parts is None else local_size(parts, self.rank, self.world)

    def sizes(self, axis: str) -> list[int]:
        """Each rank's size of a split axis."""
        return [local_size(self.parts(axis) or (), rank, self.world) for rank in range(self.world)]

    def start(self, axis: str) -> int:
        """Where this rank's run of a split axis begins; a split in several runs has no start."""
        parts = self.parts(axis) or ()
        if len(parts) != 1:
            raise RuleError(f"axis {axis} has no single start", where=self.row.text, why=f"it is split as {parts}")
        return ranges(parts, self.rank, self.world)[0][0]

    def resize(self, sizes: Sequence[Any], result: int = 0) -> list[Any]:
        """A list of global sizes of a result, with the split dim's replaced by this rank's; -1 only where dynamic."""
        layout, whole = self.choice.results[result], self.whole_shape(result)
        held = [size if isinstance(size, int) else given for size, given in zip(whole, sizes, strict=True)]
        if isinstance(layout, Shard):
            size = held[layout.dim]
            inferred = isinstance(size, int) and size == -1
            held[layout.dim] = size if inferred else local_extent(size, layout, self.rank, self.world)
        return held

    def whole_shape(self, result: int = 0) -> list[Any]:
        """The global shape of a result."""
        return [dim_size(dim, self.row.sizes) for dim in self.row.results[result]]


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
    terms, blocked = [], set()
    for segment in token.split("+"):
        names = segment.strip("()").split()
        blocked |= {n[1:] for n in names if n.startswith("!")}
        terms.append(tuple(n.lstrip("!") for n in names if n != "1"))
    return tuple(terms), frozenset(blocked)


@cache
def _parse(text: str) -> tuple[list[list[str]], list[list[str]]]:
    if text.count("->") != 1:
        raise RuleError(f"the row {text!r} needs one '->'", where=text, attempt="'... k, n k -> ... n'")
    left, right = ([list(_tokens(group)) for group in side.split(",")] for side in text.split("->"))
    for tokens in (*left, *right):
        wrong = [token for token in tokens if not _DIM.fullmatch(token)]
        if wrong or tokens.count("...") > 1:
            raise RuleError(
                f"{wrong[0]!r} is no dim" if wrong else "a tensor has two '...'",
                where=text,
                why="a dim is an axis a or !a, several merged (a b), a concatenation a+b, 1, or once '...'",
                attempt="'... (h !d) -> ... h !d'",
            )
    return left, right


def _expand(tokens: list[str], ndim: int, where: str) -> list[str]:
    """`... k` for a tensor of 3 dims is `_1 _0 k`: leading axes are numbered from their last."""
    if "..." not in tokens:
        if len(tokens) != ndim:
            raise RuleError(
                f"a row of {len(tokens)} dims met a tensor of {ndim}", where=where, why=f"dims: {' '.join(tokens)}"
            )
        return tokens
    at, extra = tokens.index("..."), ndim - len(tokens) + 1
    return [*tokens[:at], *(f"_{i}" for i in reversed(range(extra))), *tokens[at + 1 :]]


def bind(
    text: str,
    operands: Sequence[Sequence[Size]],
    results: Sequence[Sequence[Size]],
    sizes: Mapping[str, Size] | None = None,
    **options: Any,
) -> Row:
    """A row's text and the global shapes of its op become a Row.

    Args:
        operands, results: global shapes, one per tensor.
        sizes: sizes of axes that no plain dim tells.
        options: fields of RowOptions.

    Raises:
        RuleError: the text does not fit the shapes.
    """
    left, right = _parse(text)
    # an empty side is one scalar, or nothing
    left, right = ([] if not held and side == [[]] else side for held, side in ((operands, left), (results, right)))
    if len(left) != len(operands) or len(right) != len(results):
        raise RuleError(
            f"the row has {len(left)} operands and {len(right)} results, "
            f"the op {len(operands)} tensors and {len(results)} results",
            where=text,
        )
    known: dict[str, Size] = dict(sizes or {})
    blocked: set[str] = set()
    bound: list[tuple[Dim, ...]] = []
    for tokens, shape in zip(left + right, [*operands, *results], strict=True):
        dims = []
        for token, size in zip(_expand(tokens, len(shape), text), shape, strict=True):
            dim, closed = _parse_dim("1" if token.startswith("_") and size == 1 else token)
            blocked |= closed
            if len(dim) == 1 and len(dim[0]) == 1:
                known.setdefault(dim[0][0], size)
                _check_size(dim[0][0], known[dim[0][0]], size, text)
            dims.append(dim)
        bound.append(tuple(dims))
    _check_dims(bound, [*operands, *results], known, text)
    strangers = known.keys() - {axis for dims in bound for dim in dims for term in dim for axis in term}
    if strangers:
        raise RuleError(f"axis {min(strangers)} is in no tensor", where=text, why="a size is given for it in sizes=")
    n, said = len(operands), RowOptions(**options)
    bound = _with_factors(bound, known, blocked | {*said.local, *said.comm, *said.reduced})
    return Row(text, tuple(bound[:n]), tuple(bound[n:]), known, frozenset(blocked), said)


def _with_factors(bound: list[tuple[Dim, ...]], sizes: dict[str, Size], closed: set[str]) -> list[tuple[Dim, ...]]:
    """An axis of four times a dynamic size becomes a product of that and an axis of size four, which may be split."""
    factors: dict[str, tuple[str, str]] = {}
    for axis, size in list(sizes.items()):
        factor = 1 if isinstance(size, int) or axis in closed else int(size.as_coeff_Mul()[0])
        if factor > 1:
            factors[axis] = (axis, f"{axis}*")
            sizes[axis], sizes[f"{axis}*"] = size / factor, factor

    def refined(term: Term) -> Term:
        return tuple(part for axis in term for part in factors.get(axis, (axis,)))

    return [tuple(tuple(map(refined, dim)) for dim in dims) for dims in bound] if factors else bound


def _check_size(axis: str, known: Size, size: Size, text: str) -> None:
    if isinstance(known, int) and isinstance(size, int) and known != size:
        raise RuleError(f"axis {axis} has two sizes", where=text, why=f"{known} and {size}")


def _check_dims(bound: Sequence[Sequence[Dim]], shapes: Sequence[Sequence[Size]], known: Any, text: str) -> None:
    for dims, shape in zip(bound, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            missing = [a for term in dim for a in term if a not in known]
            if missing:
                raise RuleError(f"axis {missing[0]} has no size", where=text, attempt="pass it in sizes=")
            _check_size(str(dim), dim_size(dim, known), size, text)


def dim_size(dim: Dim, sizes: Mapping[str, Size]) -> Size:
    """The size of a dim from the sizes of its axes."""
    return sum(math.prod(sizes[a] for a in term) for term in dim)


# --- axes that are split together, and the layouts that a split gives ------------------------------------------------


def axis_groups(row: Row) -> list[tuple[str, ...]]:
    """The sets of axes that can be split: single ones, and those of a concatenation together."""
    group = {axis: frozenset([axis]) for axis in row.sizes}
    for dims in (*row.operands, *row.results):
        for dim in dims:
            if len(dim) > 1:
                union = frozenset[str]().union(*(group[a] for term in dim for a in term))
                group.update(dict.fromkeys(union, union))
    whole = {g for g in group.values() if all(_splittable(row, a) for a in g)}
    order = list(row.sizes)
    return sorted((tuple(sorted(g, key=order.index)) for g in whole), key=lambda g: order.index(g[0]))


def _splittable(row: Row, axis: str) -> bool:
    size = row.sizes[axis]
    return axis not in row.blocked and isinstance(size, int) and size > 0


class _Composed(NamedTuple):
    """How a dim is split."""

    parts: tuple[Part, ...]
    repeated: bool = False


def _compose_term(term: Term, axes: Mapping[str, tuple[Part, ...]], sizes: Mapping[str, Size]) -> _Composed | None:
    """The parts of a merged dim when one of its axes is split, or None where it can't be said."""
    split = [i for i, a in enumerate(term) if a in axes]
    if len(split) != 1:
        return None
    before = math.prod(sizes[a] for a in term[: split[0]])
    after = math.prod(sizes[a] for a in term[split[0] + 1 :])
    parts = axes[term[split[0]]]
    if not isinstance(after, int) or after == 0:
        return None
    scaled = tuple((count, unit * after) for count, unit in parts)
    if not isinstance(before, int):
        return _Composed(scaled, repeated=True)
    return _Composed(scaled * before) if before * len(parts) <= MAX_PARTS else None


def _dims_layout(dims: Sequence[Dim], axes: Any, sizes: Any, world: int, absent: Layout) -> Layout | None:
    """The layout of a tensor under a split, or None where the split can't be expressed."""
    touched = [i for i, dim in enumerate(dims) if any(a in axes for term in dim for a in term)]
    if not touched:
        return absent
    if len(touched) > 1:
        return None
    composed = [_compose_term(term, axes, sizes) for term in dims[touched[0]]]
    known = [found for found in composed if found is not None]
    repeated = any(found.repeated for found in known)
    if len(known) < len(composed) or (repeated and len(known) > 1):
        return None
    return canonical(touched[0], [part for found in known for part in found.parts], world, repeated=repeated)


def _extract(
    dim: Dim, parts: Sequence[Part], sizes: Mapping[str, Size], world: int, *, repeated: bool
) -> dict[str, tuple[Part, ...]]:
    """Which axes with which parts give a dim these parts; empty where none do."""
    if len(dim) > 1:
        return {} if repeated else _extract_sum(dim, parts, sizes)
    term, found = dim[0], {}
    if len(term) == 1:
        return {} if repeated else {term[0]: tuple(parts)}
    wanted = canonical(0, parts, world, repeated=repeated)
    for i, axis in enumerate(term):
        before, after = math.prod(sizes[a] for a in term[:i]), math.prod(sizes[a] for a in term[i + 1 :])
        before = 1 if repeated and not isinstance(before, int) else before
        if not isinstance(before, int) or not isinstance(after, int) or not isinstance(sizes[axis], int):
            continue
        plain: tuple[Part, ...] = ((sizes[axis], 1),)
        block = tuple((c * u // after, 1) for c, u in parts[: len(parts) // before]) if before and after else ()
        scaled = tuple((c, u // after) for c, u in parts[: len(parts) // before]) if before and after else ()
        for tried in (plain, scaled, block):
            fits = tried and all(u > 0 for _, u in tried) and parts_size(tried) == sizes[axis]
            composed = _compose_term(term, {axis: tried}, sizes) if fits else None
            if composed is not None and canonical(0, composed.parts, world, repeated=composed.repeated) == wanted:
                found[axis] = tried
                break
    return found


def _extract_sum(dim: Dim, parts: Sequence[Part], sizes: Mapping[str, Size]) -> dict[str, tuple[Part, ...]]:
    found, rest = {}, list(parts)
    for term in dim:
        if len(term) != 1 or not isinstance(sizes[term[0]], int):
            return {}
        taken: list[Part] = []
        while rest and parts_size(taken) < sizes[term[0]]:
            taken.append(rest.pop(0))
        if parts_size(taken) != sizes[term[0]]:
            return {}
        found[term[0]] = tuple(taken) or ((0, 1),)
    return found


Hint = tuple[int, Shard]
"""(position, layout): a Shard met on a tensor; positions count the operands, then the results."""


def _axis_parts(row: Row, world: int, hints: Iterable[Hint]) -> dict[str, list[tuple[Part, ...]]]:
    """For each axis the parts it may be split in: those that the hints say, then the plain ones."""
    tensors = (*row.operands, *row.results)
    known: dict[str, list[tuple[Part, ...]]] = {}
    for position, shard in hints:
        dim = tensors[position][shard.dim]
        size = dim_size(dim, row.sizes)
        if isinstance(size, int) is not shard.repeated and any(term for term in dim):
            held = parts_of(size, replace(shard, repeated=False))
            for axis, parts in _extract(dim, held, row.sizes, world, repeated=shard.repeated).items():
                known.setdefault(axis, []).append(parts)
    for axis, size in row.sizes.items():
        if isinstance(size, int):
            known.setdefault(axis, []).append(((size, 1),))
    return {axis: list(dict.fromkeys(options)) for axis, options in known.items()}


def choices(row: Row, world: int, hints: Iterable[Hint] = ()) -> list[Choice]:
    """All legal ways to run the op on `world` ranks: whole on I, whole on R, linear on P, or one axis split.

    `hints` are Shards met on operands or wanted of results; they say in which parts an axis may be split besides the
    plain ones.
    """
    return list(_choices(row, world, tuple(hints)))


@lru_cache(maxsize=1 << 14)
def _choices(row: Row, world: int, hints: tuple[Hint, ...]) -> tuple[Choice, ...]:
    n, m = len(row.operands), len(row.results)
    found = [Choice("I", (I,) * n, (I,) * m)]
    if row.options.mutates:
        whole = []
    else:
        whole = [Choice("R", (R,) * n, (R,) * m)] if n else []
        for together in row.options.linear:
            operands = tuple(P if i in together else R for i in range(n))
            whole.append(Choice("P", operands, (P,) * m))
    parts = _axis_parts(row, world, hints)
    splits = [c for group in axis_groups(row) for c in _split_choices(row, world, group, parts)]
    return tuple(dict.fromkeys([*found, *whole, *splits]))


def _parts_together(group: tuple[str, ...], parts: Any) -> Iterator[dict[str, tuple[Part, ...]]]:
    """In which parts the axes of a group are split: all in their first, all in their second, ..., and each that has
    several parts beside the others' plain ones (keys and values in one weight, beside queries)."""
    for option in range(max(len(parts[axis]) for axis in group)):
        yield {axis: parts[axis][min(option, len(parts[axis]) - 1)] for axis in group}
    plain = {axis: next(held for held in parts[axis] if len(held) == 1 and held[0][1] == 1) for axis in group}
    for axis in group:
        yield from (plain | {axis: held} for held in parts[axis] if len(held) > 1)


def _split_choices(row: Row, world: int, group: tuple[str, ...], parts: Any) -> Iterator[Choice]:
    for axes in _parts_together(group, parts):
        operands = [_dims_layout(dims, axes, row.sizes, world, R) for dims in row.operands]
        summed = I if set(axes) & row.options.reduced else P
        results = [_dims_layout(dims, axes, row.sizes, world, summed) for dims in row.results]
        needs_start = not row.options.by_size and any(a in row.options.local and len(p) > 1 for a, p in axes.items())
        if None in operands or None in results or needs_start:
            continue
        if row.options.fills_ranks and any(_leaves_a_rank_empty(x, world) for x in (*operands, *results)):
            continue
        if not all(isinstance(x, Shard) for x in operands) and row.options.mutates & {
            i for i, x in enumerate(operands) if not isinstance(x, Shard)
        }:
            continue
        yield Choice(f"split {' '.join(group)}", tuple(operands), tuple(results), tuple(axes.items()))  # type: ignore[arg-type]


def _leaves_a_rank_empty(layout: Layout | None, world: int) -> bool:
    """Whether the last rank holds nothing of a split in repeated parts."""
    return isinstance(layout, Shard) and layout.repeated and not local_size(layout.parts or (), world - 1, world)


def spread(row: Row, world: int, hints: Iterable[Hint]) -> Iterator[Hint]:
    """The Shards that a split of this op would give its other tensors, from those wanted of some.

    Used before planning to learn that a weight of 56 rows should be split as seven heads of eight.
    """
    hints = list(hints)
    for choice in choices(row, world, hints):
        for position, layout in enumerate((*choice.operands, *choice.results)):
            if isinstance(layout, Shard) and layout.parts is not None and (position, layout) not in hints:
                yield position, layout


def local_replacement(row: Row, choice: Choice) -> LocalFn | None:
    """The function that a rank runs in place of the op under this choice, or None: the op itself."""
    for axis, _ in choice.axes:
        if axis in row.options.local:
            return row.options.local[axis]
    return row.options.local.get("*") if choice.axes else None
