"""Rows, the choices that they allow, and the facts that a replacement may read on its rank.

    Row       the factors of each operand and result of one op, with their sizes
    Choice    one legal way to run the op: the layout of each operand and result
    Local     a row, a choice and a rank, for a function that the rank runs instead of the op

`core.notation` reads a row from a text and the op's shapes; `core.choices` derives the choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchshard.core.errors import RuleError
from torchshard.core.layouts import (
    EQUAL,
    Blocks,
    Layout,
    Part,
    Parts,
    Shard,
    Size,
    is_dynamic,
    local_extent,
    local_size,
    ranges,
)
from torchshard.core.mesh import Coordinate

Term = tuple[str, ...]
"""A product of factors, major first; the empty product is a dim of size one."""
Dim = tuple[Term, ...]
"""A concatenation of terms; nearly always a single term."""
AxisParts = Mapping[str, Parts]
"""The factors that are split together -> the parts that each is split into."""
LocalFn = Callable[..., Any]
"""A replacement, (local: Local, *args, **kwargs) -> result: run by a rank if a split changes the op.

fx calls it with Proxies to record the rank's graph; eager collectives call it with tensors.
"""


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
    """Sets of operands in which the op is jointly linear: if one set is P and the rest R, results are P."""
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
    contiguous: bool = False
    """Whether the replacement needs a rank's slice of a dynamic size in one piece, so blocks won't do."""
    aligned: Mapping[str, int] = field(default_factory=dict)
    """Factor -> a number that must divide each rank's size, because kernels read that many at once."""
    mutates: frozenset[int] = frozenset()
    """Operands that the op writes to, used as stored: a conversion would write to a copy."""
    any_size: frozenset[str] = frozenset()
    """Factors whose replacement works for any size, even a dynamic one; '*': all factors."""
    together: frozenset[str] = frozenset()
    """Factors that are split together or not at all."""


@dataclass(frozen=True)
class Choice:
    """One legal way to run one op."""

    name: str
    """'I', 'R', 'P', or the split factors: 'split n'."""
    operands: tuple[Layout, ...]
    """The layout that each tensor operand must have."""
    results: tuple[Layout, ...]
    """The layout of each result."""
    factors: tuple[tuple[str, Parts], ...] = ()
    """The split factors with their parts."""

    @property
    def splits_dynamic(self) -> bool:
        """Whether a factor of dynamic size is split, into equal slices."""
        return any(is_dynamic(parts) for _, parts in self.factors)


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

    def parts(self, factor: str) -> tuple[Part, ...] | None:
        """Returns the parts that a factor is split into; None if it is not split."""
        parts = dict(self.choice.factors).get(factor)
        return EQUAL if isinstance(parts, Blocks) else parts

    def size(self, factor: str) -> Size:
        """Returns this rank's size of a factor."""
        parts, size = self.parts(factor), self.row.sizes[factor]
        if parts is None:
            return size
        return size / self.world if parts == EQUAL else local_size(parts, self.rank, self.world)

    def sizes(self, factor: str) -> list[int]:
        """Returns each rank's size of a split factor of static size."""
        return [local_size(self.parts(factor) or (), rank, self.world) for rank in range(self.world)]

    def start(self, factor: str) -> int:
        """Returns the start of this rank's slice of a split factor of static size.

        Raises:
            RuleError: the factor is split into several parts, so a rank has several slices.
        """
        parts = self.parts(factor) or ()
        if len(parts) != 1:
            raise RuleError(f"factor {factor} has no single start", where=self.row.text, why=f"it is split as {parts}")
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


def dim_size(dim: Dim, sizes: Mapping[str, Size]) -> Size:
    """Returns the size of a dim from the sizes of its factors."""
    return sum(math.prod(sizes[factor] for factor in term) for term in dim)
