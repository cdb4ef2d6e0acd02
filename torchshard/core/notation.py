"""Rows: how one op may be split, written as one line of einsum-like factors.

    linear      ... k, n k -> ... n          split n: column parallel; split k: row parallel, the result is Partial
    view        a b (c d) -> a b c d         a merged dim, major factor first; splitting c deals units of d
    split       a b+c -> a b, a c            a dim that is a concatenation; its factors are split together
    sort        a !b -> a !b                 b is unsplittable
    expand      1 -> a                       1 is a dim of size one that no split touches

A row is a sharding rule. It names the factors of every dim, as einops does, and the names alone
determine all legal layouts of the op. The same letter is the same
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

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypedDict, Unpack

import sympy

from torchshard.core.errors import RuleError
from torchshard.core.layouts import Size
from torchshard.core.rows import Dim, LocalFn, Row, RowOptions, Term, dim_size


class _PlainKeywords(TypedDict, total=False):
    local: Mapping[str, LocalFn]
    by_size: bool
    fills_ranks: bool
    contiguous: bool
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
                why="a dim is a factor a or !a, merged factors (a b), a concatenation a+b, 1, or (once) '...'",
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
    strangers = known.keys() - {factor for dims in bound for dim in dims for term in dim for factor in term}
    if strangers:
        raise RuleError(f"factor {min(strangers)} is in no tensor", where=text, why="sizes= has a size for it")
    n, row_options = len(operands), _row_options(**options)
    named = {*row_options.local, *row_options.reduced, *row_options.together}
    unknown = sorted(named - known.keys() - {"*"})
    if unknown:
        raise RuleError(f"factor {unknown[0]} is in no tensor", where=text, why="the rule's options name it")
    for factor, function in row_options.local.items():
        if not callable(function):
            raise RuleError(f"local={{{factor!r}: ...}} is no function", where=text, why=f"it is {function!r:.80}")
    bound = _with_factors(bound, known, unsplittable | named, multiples)
    equal = frozenset(_equal_factors(known, row_options, multiples))
    return Row(text, tuple(bound[:n]), tuple(bound[n:]), known, frozenset(unsplittable), equal, row_options)


def _equal_factors(sizes: Mapping[str, Size], options: RowOptions, multiples: Collection[Size]) -> Iterator[str]:
    """Yields the splittable factors of dynamic size that are multiples of the number of ranks."""
    for factor, size in sizes.items():
        replaced = not {factor, "*"}.isdisjoint(options.local)
        fits = not replaced or not {factor, "*"}.isdisjoint(options.any_size)
        if fits and dynamic_factor(size, multiples) is not None:
            yield factor


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
                _check_size(f"factor {dim[0][0]}", known[dim[0][0]], size, text)
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
    parted: dict[str, tuple[str, str]] = {}
    for factor, size in list(sizes.items()):
        multiple = dynamic_factor(size, multiples) or 1
        number = 1 if isinstance(size, int) or factor in whole else int((size / multiple).as_coeff_Mul()[0])
        if number > 1:
            parted[factor] = (factor, f"{factor}*")
            sizes[factor], sizes[f"{factor}*"] = size / number, number

    def refine(term: Term) -> Term:
        return tuple(part for factor in term for part in parted.get(factor, (factor,)))

    if not parted:
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
            missing = [factor for term in dim for factor in term if factor not in known]
            if missing:
                raise RuleError(f"factor {missing[0]} has no size", where=text, attempt="pass it in sizes=")
            _check_size(f"dim ({'+'.join(map(' '.join, dim))})", dim_size(dim, known), size, text)
