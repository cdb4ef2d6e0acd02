"""Matrix products. A factor in operands only is summed, so splitting it is row parallel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchshard.core.rows import Local, Row
from torchshard.custom_ops.fx_types import Argument, Target, Traced
from torchshard.custom_ops.grouped import GROUPED_MM
from torchshard.custom_ops.whole import OpKey, entry
from torchshard.rules.empty import append_zeros
from torchshard.rules.registry import Call, broadcast, letters, rule, spaced

aten = torch.ops.aten
BOTH = ({0}, {1})
GROUPED = (aten._grouped_mm.default, GROUPED_MM, "transformers.grouped_mm_fallback.default")
"""Ops that multiply groups of rows, each by a matrix of its own, as mixtures of experts do."""
ALIGNED_BYTES = 16
"""The alignment, in bytes, at which PyTorch's own op reads each row."""
_IS_GROUPED: Mapping[OpKey, bool] = dict.fromkeys(GROUPED, True)


def is_grouped(target: Target | str) -> bool:
    """Returns whether an op is in GROUPED."""
    return entry(_IS_GROUPED, target) or False


rule(aten.mm.default, row="m k, k n -> m n", linear=BOTH)
rule(aten.bmm.default, row="b m k, b k n -> b m n", linear=BOTH)
rule(aten.mv.default, row="m k, k -> m", linear=BOTH)
rule(aten.dot.default, row="k, k -> ", linear=BOTH)
rule(aten.outer.default, row="m, n -> m n", linear=BOTH)


@rule(aten.linear.default)
def linear(call: Call) -> Row:
    """`f32[2,8,16], f32[32,16] -> f32[2,8,32]     ... k, n k -> ... n`.

    With a bias k is unsplittable: each rank would add the whole bias to its partial sum.
    """
    if call["bias"] is not None:
        return call.row("... !k, n !k, n -> ... n")
    return call.row("... k, n k -> ... n", linear=BOTH)


@rule(aten.bilinear.default)
def bilinear(call: Call) -> Row:
    """`f32[2,8], f32[2,16], f32[4,8,16] -> f32[2,4]     ... i, ... j, n i j -> ... n`.

    With a bias i and j are unsplittable: each rank would add the whole bias to its partial sum.
    """
    if call["bias"] is not None:
        return call.row("... !i, ... !j, n !i !j, n -> ... n")
    return call.row("... i, ... j, n i j -> ... n", linear=({0}, {1}, {2}))


@rule(aten.matmul.default)
def matmul(call: Call) -> Row:
    """`f32[2,4,8,16], f32[4,16,8] -> f32[2,4,8,8]     a b m k, b k n -> a b m n`; batch dims are broadcast."""
    # as in numpy, a vector operand lacks m or n
    a, b = (t.shape for t in call.tensors)
    lead = letters(max(len(a), len(b), 2) - 2, used="kmn")
    batch = call.results[0].shape[: len(lead)]
    left = [*broadcast(lead, a[:-2], batch), *(["m"] if len(a) > 1 else []), "k"]
    right = [*broadcast(lead, b[:-2], batch), "k", *(["n"] if len(b) > 1 else [])]
    out = [*lead, *(["m"] if len(a) > 1 else []), *(["n"] if len(b) > 1 else [])]
    return call.row(f"{spaced(left, right)} -> {spaced(out)}", linear=BOTH)


@rule(*GROUPED)
def grouped_mm(call: Call) -> Row | None:
    """`f32[9,8], f32[3,8,16], i32[3] -> f32[9,16]     !t k, e k n, !o -> !t n`: a matrix per group of rows.

    The rows of a group are contiguous and end at its offset. If e is split, a rank multiplies its
    own groups' rows and returns zeros for the others. PyTorch's own op reads 16 bytes at once, so
    row sizes of operands and of the result must be multiples of 16 bytes.
    """
    if len(call.tensors) != 3 or [len(t.shape) for t in call.tensors] != [2, 3, 1]:
        return None
    total = call.tensors[0].shape[0]

    def local(ctx: Local, x: Traced, weight: Traced, offs: Traced, *rest: Argument, **named: Argument) -> Traced:
        first, count = ctx.start("e"), ctx.size("e")
        rows = aten.sym_size.int(x, 0) if not isinstance(total, int) else total
        row_index = aten.sub.Scalar(aten.cumsum.default(aten.new_ones.default(offs, [rows]), 0), 1)
        zero = aten.new_zeros.default(offs, [1])
        start = aten.slice.Tensor(offs, 0, first - 1, first) if first else zero
        own_offs = aten.sub.Tensor(aten.slice.Tensor(offs, 0, first, first + count), start) if count else zero
        # the op requires its groups from row 0 on, and offsets are known only at the call: rotate
        # the rows, and mask other ranks' groups, instead of slicing by a data-dependent size
        is_own = aten.unsqueeze.default(aten.lt.Tensor(row_index, aten.slice.Tensor(own_offs, 0, -1)), 1)
        rotated = aten.index.Tensor(x, [aten.remainder.Scalar(aten.add.Tensor(row_index, start), rows)])
        rotated = aten.masked_fill.Scalar(rotated, aten.logical_not.default(is_own), 0.0)
        product = call.target(rotated, weight if count else append_zeros(weight, 0, 3), own_offs, *rest, **named)
        product = aten.masked_fill.Scalar(product, aten.logical_not.default(is_own), 0.0)
        return aten.index.Tensor(product, [aten.remainder.Scalar(aten.sub.Tensor(row_index, start), rows)])

    aligned = dict.fromkeys("kn", ALIGNED_BYTES // call.tensors[0].dtype.itemsize)
    of_pytorch = call.target is aten._grouped_mm.default
    row = "!t k, e k n, !o -> !t n"
    return call.row(row, linear=BOTH, local={"e": local}, aligned=aligned if of_pytorch else {})


@rule(aten.einsum.default)
def einsum(call: Call) -> Row | None:
    """`einsum("bqd,bkd->bqk", x, y)     b q d, b k d -> b q k`: the equation is already a row."""
    operands, right = _equation(call)
    if any(len(set(o)) != len(o) for o in operands):
        return None  # a diagonal
    shapes = [t.shape for t in call.tensors]
    sizes = {pair for factors, shape in zip(operands, shapes, strict=True) for pair in zip(factors, shape, strict=True)}
    broadcast_factors = {factor for factor, size in sizes if size == 1} & {
        factor for factor, size in sizes if size != 1
    }
    if broadcast_factors:  # a row can't express it: the same letter has one size
        return None
    linear = [{i} for i in range(len(operands))]
    return call.row(f"{spaced(*operands)} -> {spaced(right)}", linear=linear)


def _equation(call: Call) -> tuple[list[list[str]], list[str]]:
    """Returns all operands' and the result's factors, with `...` and an implicit result spelled out."""
    left, arrow, right = str(call["equation"]).replace(" ", "").partition("->")
    terms, ndims = left.split(","), [len(t.shape) for t in call.tensors]
    names = left.replace(",", "").replace(".", "")
    named_dims = [len(term.replace("...", "")) for term in terms]
    hidden = [n - named if "..." in t else 0 for t, n, named in zip(terms, ndims, named_dims, strict=True)]
    lead = letters(max(hidden), used=names)
    if not arrow:  # einsum's implicit result: letters that occur once, in alphabetical order
        right = "..." * any(hidden) + "".join(sorted(name for name in set(names) if names.count(name) == 1))

    def factors(term: str, count: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(lead[len(lead) - count :] if dots else []), *after]

    return [factors(term, count) for term, count in zip(terms, hidden, strict=True)], factors(right, len(lead))
