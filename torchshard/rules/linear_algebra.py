"""Matrix products: an axis that only the operands have is summed, so splitting it is row parallel."""

from __future__ import annotations

from typing import Any

import torch

from torchshard.core.notation import Local, Row
from torchshard.rules.empty import filled
from torchshard.rules.registry import Call, broadcast, letters, rule, spaced

aten = torch.ops.aten
BOTH = ({0}, {1})
GROUPED = (aten._grouped_mm.default, "transformers.grouped_mm_fallback.default")
"""Products of rows in groups with a matrix for each."""

rule(aten.mm.default, row="m k, k n -> m n", linear=BOTH)
rule(aten.bmm.default, row="b m k, b k n -> b m n", linear=BOTH)
rule(aten.mv.default, row="m k, k -> m", linear=BOTH)
rule(aten.dot.default, row="k, k -> ", linear=BOTH)
rule(aten.outer.default, row="m, n -> m n", linear=BOTH)


@rule(aten.linear.default)
def linear(call: Call) -> Row:
    """`f32[2,8,16], f32[32,16] -> f32[2,8,32]     ... k, n k -> ... n`; a bias is to be added once, so k is closed."""
    if call["bias"] is not None:
        return call.row("... !k, n !k, n -> ... n")
    return call.row("... k, n k -> ... n", linear=BOTH)


@rule(aten.matmul.default)
def matmul(call: Call) -> Row:
    """`f32[2,4,8,16], f32[4,16,8] -> f32[2,4,8,8]     a b m k, b k n -> a b m n`, as numpy broadcasts."""
    a, b = (t.shape for t in call.tensors)
    lead = letters(max(len(a), len(b), 2) - 2, used="kmn")
    batch = call.results[0].shape[: len(lead)]
    left = [*broadcast(lead, a[:-2], batch), *(["m"] if len(a) > 1 else []), "k"]
    right = [*broadcast(lead, b[:-2], batch), "k", *(["n"] if len(b) > 1 else [])]
    out = [*lead, *(["m"] if len(a) > 1 else []), *(["n"] if len(b) > 1 else [])]
    return call.row(f"{spaced(left, right)} -> {spaced(out)}", linear=BOTH)


@rule(*GROUPED)
def grouped_mm(call: Call) -> Row | None:
    """`f32[9,8], f32[3,8,16], i32[3] -> f32[9,16]     !t k, e k n, !o -> !t n`: rows in groups, a matrix for each.

    The rows of a group follow each other up to its offset. Splitting e, a rank multiplies the rows of its own groups
    and gives zeros elsewhere.
    """
    if len(call.tensors) != 3 or [len(t.shape) for t in call.tensors] != [2, 3, 1]:
        return None
    total = call.tensors[0].shape[0]

    def local(ctx: Local, x: Any, weight: Any, offs: Any, *rest: Any, **named: Any) -> Any:
        first, count = ctx.start("e"), ctx.size("e")
        rows = aten.sym_size.int(x, 0) if not isinstance(total, int) else total
        at = aten.sub.Scalar(aten.cumsum.default(aten.new_ones.default(offs, [rows]), 0), 1)
        none = aten.new_zeros.default(offs, [1])
        start = aten.slice.Tensor(offs, 0, first - 1, first) if first else none
        own = aten.sub.Tensor(aten.slice.Tensor(offs, 0, first, first + count), start) if count else none
        mine = aten.unsqueeze.default(aten.lt.Tensor(at, aten.slice.Tensor(own, 0, -1)), 1)
        turned = aten.index.Tensor(x, [aten.remainder.Scalar(aten.add.Tensor(at, start), rows)])
        turned = aten.masked_fill.Scalar(turned, aten.logical_not.default(mine), 0.0)
        made = call.target(turned, weight if count else filled(weight, 0, 3), own, *rest, **named)
        made = aten.masked_fill.Scalar(made, aten.logical_not.default(mine), 0.0)
        return aten.index.Tensor(made, [aten.remainder.Scalar(aten.sub.Tensor(at, start), rows)])

    return call.row("!t k, e k n, !o -> !t n", linear=BOTH, local={"e": local})


@rule(aten.einsum.default)
def einsum(call: Call) -> Row | None:
    """`einsum("bqd,bkd->bqk", x, y)     b q d, b k d -> b q k`: the equation is a row already."""
    operands, right = _equation(call)
    if any(len(set(o)) != len(o) for o in operands):
        return None  # a diagonal
    sizes = [t.shape for t in call.tensors]
    ones = {c for o, s in zip(operands, sizes, strict=True) for c, n in zip(o, s, strict=True) if n == 1}
    mixed = {c for o, s in zip(operands, sizes, strict=True) for c, n in zip(o, s, strict=True) if n != 1} & ones
    if mixed:
        return None
    each = [{i} for i in range(len(operands))]
    return call.row(f"{spaced(*operands)} -> {spaced(right)}", linear=each)


def _equation(call: Call) -> tuple[list[list[str]], list[str]]:
    """The axes of each operand and of the result: `...` spelled out, a result that is not said found."""
    left, arrow, right = str(call["equation"]).replace(" ", "").partition("->")
    terms, ndims = left.split(","), [len(t.shape) for t in call.tensors]
    said = left.replace(",", "").replace(".", "")
    hidden = [
        ndim - len(term.replace("...", "")) if "..." in term else 0 for term, ndim in zip(terms, ndims, strict=True)
    ]
    lead = letters(max(hidden), used=said)
    if not arrow:
        right = "..." * any(hidden) + "".join(sorted(name for name in set(said) if said.count(name) == 1))

    def axes(term: str, count: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(lead[len(lead) - count :] if dots else []), *after]

    return [axes(term, count) for term, count in zip(terms, hidden, strict=True)], axes(right, len(lead))
