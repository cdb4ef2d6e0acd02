"""Matrix products: an axis that only the operands have is summed, so splitting it is row parallel."""

from __future__ import annotations

import torch

from torchshard.notation import Row
from torchshard.rules.registry import Call, letters, rule, spaced

aten = torch.ops.aten
BOTH = ({0}, {1})

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

    def batch(shape: tuple[int, ...], other: tuple[int, ...]) -> list[str]:
        own, others = shape[:-2], other[:-2]
        names = lead[len(lead) - len(own) :]
        wide = [*[1] * (len(own) - len(others)), *others][-len(own) :] if own else []
        return [n if size == o or size != 1 else "1" for n, size, o in zip(names, own, wide, strict=True)]

    left = [*batch(a, b), *(["m"] if len(a) > 1 else []), "k"]
    right = [*batch(b, a), "k", *(["n"] if len(b) > 1 else [])]
    out = [*lead, *(["m"] if len(a) > 1 else []), *(["n"] if len(b) > 1 else [])]
    return call.row(f"{spaced(left, right)} -> {spaced(out)}", linear=BOTH)


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
