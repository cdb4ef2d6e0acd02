"""The legal ways to run an op, from its row: unsharded, linear in partial sums, or factors split.

`choices` turns a row and a number of ranks into `Choice`s, which have the layouts of all operands
and results. A rule only states the factors of its op. The code here derives the legal splits and
their layouts for all ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from torchshard.core.layouts import (
    EQUAL,
    Blocks,
    I,
    Layout,
    P,
    Part,
    Parts,
    R,
    Shard,
    Size,
    canonical,
    has_blocks,
    local_size,
    parts_of,
    parts_size,
)
from torchshard.core.mesh import Coordinate
from torchshard.core.rows import AxisParts, Choice, Dim, Local, LocalFn, Row, Term, dim_size

MAX_PARTS = 64
"""A merged dim is unsplittable if its split would need more parts than this."""


def factor_groups(row: Row) -> list[tuple[str, ...]]:
    """Returns the splittable sets of factors: single ones, concatenations, and `together` sets.

    The factors of `a+b` are split together because a rank's slice of a dim has a piece of every
    part.
    """
    group = {factor: frozenset([factor]) for factor in row.sizes} | dict.fromkeys(
        row.options.together, row.options.together
    )
    for dims in (*row.operands, *row.results):
        for dim in dims:
            if len(dim) > 1:
                union = frozenset[str]().union(*(group[factor] for term in dim for factor in term))
                group.update(dict.fromkeys(union, union))
    splittable = {factors for factors in group.values() if all(_splittable(row, factor) for factor in factors)}
    order = list(row.sizes)
    return sorted((tuple(sorted(factors, key=order.index)) for factors in splittable), key=lambda g: order.index(g[0]))


def _splittable(row: Row, factor: str) -> bool:
    size = row.sizes[factor]
    return factor not in row.unsplittable and (factor in row.equal or (isinstance(size, int) and size > 0))


class _Composed(NamedTuple):
    """The parts that a dim is split into."""

    parts: Parts
    repeated: bool = False


def _compose_term(term: Term, factors: AxisParts, sizes: Mapping[str, Size]) -> _Composed | None:
    """Returns the parts of a merged dim with one split factor, or None if a Shard can't express them.

    In `(k c d)` with c split, the dim is k parts of c units of d elements.
    """
    split = [i for i, factor in enumerate(term) if factor in factors]
    if len(split) != 1:
        return None
    before = math.prod(sizes[factor] for factor in term[: split[0]])
    after = math.prod(sizes[factor] for factor in term[split[0] + 1 :])
    parts = factors[term[split[0]]]
    if parts == EQUAL and before == 1:  # equal slices of the major factor are equal slices of the dim
        return _Composed(EQUAL)
    if not isinstance(after, int) or after == 0:
        return None
    if parts == EQUAL:
        return _Composed(Blocks(str(sizes[term[split[0]]]), after), repeated=True)
    if isinstance(parts, Blocks):
        return _Composed(replace(parts, unit=parts.unit * after), repeated=True)
    scaled = tuple((count, unit * after) for count, unit in parts)
    if not isinstance(before, int):
        return _Composed(scaled, repeated=True)
    return _Composed(scaled * before) if before * len(parts) <= MAX_PARTS else None


def _dims_layout(
    dims: Sequence[Dim], factors: AxisParts, sizes: Mapping[str, Size], world: int, absent: Layout
) -> Layout | None:
    """Returns the layout of a tensor under a split, or None if no layout expresses it.

    Args:
        absent: the layout of a tensor without the split factors.
    """
    split = [i for i, dim in enumerate(dims) if any(factor in factors for term in dim for factor in term)]
    if not split:
        return absent
    if len(split) > 1:
        return None
    terms = [_compose_term(term, factors, sizes) for term in dims[split[0]]]
    composed = [term for term in terms if term is not None]
    repeated = any(term.repeated for term in composed)
    several = len(composed) > 1 and (repeated or not isinstance(dim_size(dims[split[0]], sizes), int))
    if len(composed) < len(terms) or several:
        return None
    found = list[Part]()
    for each in composed:
        if isinstance(each.parts, Blocks):
            return Shard(split[0], each.parts, repeated=True)
        found += each.parts
    return canonical(split[0], found, world, repeated=repeated)


def _extract_blocks(dim: Dim, blocks: Blocks, sizes: Mapping[str, Size]) -> dict[str, Blocks]:
    """Returns the first factor of a dim, with the parts that give the dim these blocks."""
    if len(dim) > 1 or not dim[0]:
        return {}
    after = math.prod(sizes[factor] for factor in dim[0][1:])
    if not isinstance(after, int) or not after or blocks.unit % after:
        return {}
    return {dim[0][0]: replace(blocks, unit=blocks.unit // after)}


def _extract(
    dim: Dim, parts: Sequence[Part], sizes: Mapping[str, Size], world: int, *, repeated: bool
) -> dict[str, tuple[Part, ...]]:
    """Inverts `_compose_term`: returns the factors and their parts that give a dim these parts."""
    if len(dim) > 1:
        return {} if repeated else _extract_sum(dim, parts, sizes)
    term = dim[0]
    if len(term) == 1:
        return {} if repeated else {term[0]: tuple(parts)}
    target = canonical(0, parts, world, repeated=repeated)
    extracted = {}
    for i, factor in enumerate(term):
        for candidate in _candidates(term, i, parts, sizes, repeated=repeated):
            composed = _compose_term(term, {factor: candidate}, sizes)
            if composed is None or isinstance(composed.parts, Blocks):
                continue
            if canonical(0, composed.parts, world, repeated=composed.repeated) == target:
                extracted[factor] = candidate
                break
    return extracted


def _candidates(
    term: Term, index: int, parts: Sequence[Part], sizes: Mapping[str, Size], *, repeated: bool
) -> list[tuple[Part, ...]]:
    """Returns parts of one factor that may give a merged dim these parts, the plain ones first."""
    size = sizes[term[index]]
    before, after = math.prod(sizes[a] for a in term[:index]), math.prod(sizes[a] for a in term[index + 1 :])
    before = 1 if repeated and not isinstance(before, int) else before
    if not isinstance(before, int) or not isinstance(after, int) or not isinstance(size, int):
        return []
    # the dim has the factor's parts `before` times, each with units scaled by `after` elements
    own = parts[: len(parts) // before] if before and after else ()
    scaled = tuple((count, unit // after) for count, unit in own)
    by_element = tuple((count * unit // after, 1) for count, unit in own)
    candidates = (((size, 1),), scaled, by_element)
    return [c for c in candidates if c and all(unit > 0 for _, unit in c) and parts_size(c) == size]


def _extract_sum(dim: Dim, parts: Sequence[Part], sizes: Mapping[str, Size]) -> dict[str, tuple[Part, ...]]:
    """Returns the parts of each factor of a concatenation, or {} if a part spans two factors."""
    extracted, rest = {}, list(parts)
    for term in dim:
        if len(term) != 1 or not isinstance(sizes[term[0]], int):
            return {}
        own: list[Part] = []
        while rest and parts_size(own) < sizes[term[0]]:
            own.append(rest.pop(0))
        if parts_size(own) != sizes[term[0]]:
            return {}
        extracted[term[0]] = tuple(own) or ((0, 1),)
    return extracted


Hint = tuple[int, Shard]
"""(position, layout): the Shard of a neighbouring op's tensor; positions count the operands, then the results."""


def _factor_parts(row: Row, world: int, hints: Iterable[Hint]) -> dict[str, list[Parts]]:
    """Returns the parts that each factor may be split into: those of hints, then single elements."""
    tensors = (*row.operands, *row.results)
    known: dict[str, list[Parts]] = {}
    for position, shard in hints:
        dim = tensors[position][shard.dim]
        size = dim_size(dim, row.sizes)
        if isinstance(shard.parts, Blocks):
            for factor, blocks in _extract_blocks(dim, shard.parts, row.sizes).items():
                if factor in row.equal:
                    known.setdefault(factor, []).append(blocks)
            continue
        if isinstance(size, int) is not shard.repeated and any(term for term in dim):
            hinted = parts_of(size, replace(shard, repeated=False))
            for factor, parts in _extract(dim, hinted, row.sizes, world, repeated=shard.repeated).items():
                known.setdefault(factor, []).append(parts)
    for factor, size in row.sizes.items():
        if isinstance(size, int):
            known.setdefault(factor, []).append(((size, 1),))
        elif factor in row.equal:
            known.setdefault(factor, []).append(EQUAL)
    return {factor: list(dict.fromkeys(options)) for factor, options in known.items()}


def choices(row: Row, world: int, hints: Iterable[Hint] = ()) -> list[Choice]:
    """Returns all legal ways to run the op on `world` ranks: all I, all R, linear on P, or split.

    Args:
        hints: Shards that neighbouring ops produce for operands or require of results. They add
            choices that split a factor into those parts, such as entire heads. Without hints a
            factor is split by element.
    """
    return list(_choices(row, world, tuple(hints)))


@lru_cache(maxsize=1 << 14)
def _choices(row: Row, world: int, hints: tuple[Hint, ...]) -> tuple[Choice, ...]:
    n, m = len(row.operands), len(row.results)
    whole = [Choice("I", (I,) * n, (I,) * m)]
    if not row.options.mutates:  # an op writes only to operands stored as I or Shard, never to R or P
        whole += [Choice("R", (R,) * n, (R,) * m)] if n else []
        for jointly in row.options.linear:
            operands = tuple(P if i in jointly else R for i in range(n))
            whole.append(Choice("P", operands, (P,) * m))
    parts = _factor_parts(row, world, hints)
    splits = [choice for group in factor_groups(row) for choice in _split_choices(row, world, group, parts)]
    return tuple(dict.fromkeys([*whole, *splits]))


def _parts_together(group: tuple[str, ...], parts: Mapping[str, list[Parts]]) -> Iterator[AxisParts]:
    """Yields combinations of parts for the factors of a group.

    The first combination has each factor's first parts, the second has the second parts, and so on.
    Then each factor that has several parts is combined with the plain parts of the others: keys and
    values in one weight, next to queries. All combinations would be too many: a factor has a few
    parts, and a group may have dozens of factors.
    """
    for option in range(max(len(parts[factor]) for factor in group)):
        yield {factor: parts[factor][min(option, len(parts[factor]) - 1)] for factor in group}
    plain = {factor: next(filter(_is_plain, parts[factor])) for factor in group}
    for factor in group:
        yield from (plain | {factor: several} for several in parts[factor] if _number(several) > 1)


def _is_plain(parts: Parts) -> bool:
    return parts == EQUAL or (not isinstance(parts, Blocks) and len(parts) == 1 and parts[0][1] == 1)


def _number(parts: Parts) -> int:
    """Returns the number of parts; of blocks, whose number is not known, 1."""
    return 1 if isinstance(parts, Blocks) else len(parts)


def _split_choices(row: Row, world: int, group: tuple[str, ...], parts: Mapping[str, list[Parts]]) -> Iterator[Choice]:
    for factors in _parts_together(group, parts):
        # a sum over a split factor is Partial, unless the replacement sums over the ranks itself
        summed = I if set(factors) & row.options.reduced else P
        operands = _layouts(row, row.operands, factors, world, R)
        results = _layouts(row, row.results, factors, world, summed)
        if operands is not None and results is not None and _is_legal(row, factors, operands, results, world):
            yield Choice(f"split {' '.join(group)}", operands, results, tuple(factors.items()))


def _layouts(
    row: Row, tensors: Sequence[Sequence[Dim]], factors: AxisParts, world: int, absent: Layout
) -> tuple[Layout, ...] | None:
    """Returns the layouts of operands or results under a split, or None if one can't be expressed."""
    layouts = [_dims_layout(dims, factors, row.sizes, world, absent) for dims in tensors]
    expressed = tuple(layout for layout in layouts if layout is not None)
    return expressed if len(expressed) == len(layouts) else None


def _is_legal(row: Row, factors: AxisParts, operands: Sequence[Layout], results: Sequence[Layout], world: int) -> bool:
    """Returns whether the op's options allow this split."""
    options = row.options
    several_starts = any(factor in options.local and _number(parts) > 1 for factor, parts in factors.items())
    if several_starts and not options.by_size:
        return False
    if options.fills_ranks and any(_leaves_a_rank_empty(layout, world) for layout in (*operands, *results)):
        return False
    if options.contiguous and any(isinstance(parts, Blocks) for parts in factors.values()):
        return False
    if not all(
        _is_aligned(factors[factor], number, world) for factor, number in options.aligned.items() if factor in factors
    ):
        return False
    return all(isinstance(layout, Shard) for i, layout in enumerate(operands) if i in options.mutates)


def _is_aligned(parts: Parts, number: int, world: int) -> bool:
    """Returns whether each rank's size is positive and a multiple of `number` elements."""
    if isinstance(parts, Blocks):
        return False
    sizes = [local_size(parts, rank, world) for rank in range(world)]
    return parts != EQUAL and all(sizes) and not any(size % number for size in sizes)


def _leaves_a_rank_empty(layout: Layout, world: int) -> bool:
    """Returns whether the last rank, which gets the fewest units, is empty with repeated parts."""
    if not isinstance(layout, Shard) or not layout.repeated or has_blocks(layout):
        return False
    return not local_size(layout.listed, world - 1, world)


def spread(row: Row, world: int, hints: Iterable[Hint]) -> Iterator[Hint]:
    """Yields the Shards that this op's splits would give its other tensors, from the hints of some.

    A sweep over the graph before planning uses it to learn, for example, that a weight of 56 rows
    should be split as seven heads of eight, although the op that needs the heads is several ops
    away.
    """
    hints = list(hints)
    for choice in choices(row, world, hints):
        for position, layout in enumerate((*choice.operands, *choice.results)):
            if isinstance(layout, Shard) and layout.parts is not None and (position, layout) not in hints:
                yield position, layout


def local_replacement(row: Row, choice: Choice) -> LocalFn | None:
    """Returns the function that a rank runs instead of the op under this choice, if any."""
    for factor, _ in choice.factors:
        if factor in row.options.local:
            return row.options.local[factor]
    return row.options.local.get("*") if choice.factors else None


def replacement_on(coordinate: Coordinate, row: Row | None, choice: Choice | None) -> LocalFn | None:
    """Returns the function that a rank calls with the op's arguments instead of the op, if any."""
    if row is None or choice is None or (replacement := local_replacement(row, choice)) is None:
        return None
    return partial(replacement, Local(row, choice, coordinate))
