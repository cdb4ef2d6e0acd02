"""Writes two shapes of the same elements as products of common factors, for the row of a reshape.

The shapes (2, 64, 5) and (2, 4, 16, 5) have the factors 2, 4, 16 and 5: `a (b c) d -> a b c d`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import sympy

from torchshard.core.layouts import Size


def _prefix_products(shape: Sequence[Size]) -> list[Size]:
    return [math.prod(shape[:i]) for i in range(len(shape) + 1)]


def equal_runs(left: Sequence[int], right: Sequence[int]) -> list[tuple[range, range]] | None:
    """Returns the shortest runs of dims with equal products on both sides, or None if the shapes don't match.

    (2, 64, 5) -> (2, 4, 16, 5) has the runs (2) -> (2), (64) -> (4, 16) and (5) -> (5).
    """
    a, b = _prefix_products(left), _prefix_products(right)
    runs, i, j = [], 0, 0
    while i < len(left) or j < len(right):
        pairs = ((k, m) for k in range(i + 1, len(a)) for m in range(j + 1, len(b)))
        end = next(((k, m) for k, m in pairs if a[k] == b[m]), None)
        if end is None:
            return None
        runs.append((range(i, end[0]), range(j, end[1])))
        i, j = end
    return runs


Refined = tuple[list[list[str]], list[list[str]]]
"""The factors of each dim, on both sides of a run."""


def refine(left: list[Size], right: list[Size], names: list[str], sizes: dict[str, Size]) -> Refined | None:
    """Returns both sides of one run as products of common factors, or None if that is impossible.

    2, 12 -> 8, 3 is a; b c -> a b; c. 6, 4 -> 3, 8 has no common factors.

    Args:
        names: unused factor names; used ones are removed.
        sizes: extended by the sizes of the new factors.
    """
    if len(left) == 1 or len(right) == 1:
        # a single dim is the product of the other side's dims, even where a dynamic size has no
        # factors
        many = right if len(left) == 1 else left
        factors = []
        for size in many:
            factors.append(names.pop(0))
            sizes[factors[-1]] = size
        split = [[factor] for factor in factors]
        return ([factors], split) if len(left) == 1 else (split, [factors])
    return _refine_products(left, right, names, sizes)


def _refine_products(left: list[Size], right: list[Size], names: list[str], sizes: dict[str, Size]) -> Refined | None:
    """Repeatedly splits off the greatest common factor of both sides' current dims as a factor."""
    factors: Refined = ([[] for _ in left], [[] for _ in right])
    found: dict[str, Size] = {}  # added to sizes only on success: a failed run must leave no factor behind
    i = j = 0
    a, b = left[0], right[0]
    while i < len(left) and j < len(right):
        step = _common_factor(a, b)
        if step == 1 and a != 1 and b != 1:
            return None
        if step != 1:
            factor = names.pop(0)
            found[factor] = step
            factors[0][i].append(factor)
            factors[1][j].append(factor)
        a, b = _divided(a, step), _divided(b, step)
        if a == 1:
            i += 1
            a = left[i] if i < len(left) else 1
        if b == 1:
            j += 1
            b = right[j] if j < len(right) else 1
    sizes |= found
    return factors


def _common_factor(a: Size, b: Size) -> Size:
    """Returns the greatest common divisor of products with dynamic sizes: `s` for `s` and `4*s`."""
    if isinstance(a, int) and isinstance(b, int):
        return math.gcd(a, b)
    (c, symbols), (d, others) = (_factors(size) for size in (a, b))
    return _plain(math.gcd(c, d) * sympy.Mul(*(symbols & others).elements()))


def _divided(a: Size, b: Size) -> Size:
    return a // b if isinstance(a, int) else _plain(a / b)


def _factors(size: Size) -> tuple[int, Counter[sympy.Expr]]:
    """Returns a product as its number and the multiset of its other factors."""
    if isinstance(size, int):
        return size, Counter()
    number, rest = size.as_coeff_Mul()
    return int(number), Counter({base: int(times) for base, times in rest.as_powers_dict().items()})


def _plain(size: sympy.Expr) -> Size:
    """Returns the expression, as an int if it is one."""
    return int(size) if size.is_Integer else size
