"""Calls of products of matrices, einsum, grouped products."""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401 - registers its grouped product

from tests.op_cases.notation import case, f
from tests.oracle import T
from torchshard import S

aten = torch.ops.aten
grouped = torch.ops.transformers.grouped_mm_fallback.default
LINEAR_ALGEBRA = [
    case(grouped, "k e n", f(7, 5), f(3, 5, 4), T((3,), "offsets", 7)),
    case(torch.ops.torchshard.grouped_mm.default, "k e n", f(7, 5), f(3, 5, 4), T((3,), "offsets", 7)),
    case(grouped, "k e n", f(9, 4), f(5, 4, 6), T((5,), "offsets", 9)),
    case(grouped, "k e n", f(4, 2), f(1, 2, 3), T((1,), "offsets", 4)),
    case(aten.mm.default, "m k n", f(5, 7), f(7, 4)),
    case(aten.mm.default, "m k n", f(1, 6), f(6, 1)),
    case(aten.bmm.default, "b m k n", f(4, 5, 2), f(4, 2, 7)),
    case(aten.mv.default, "m k", f(5, 7), f(7)),
    case(aten.dot.default, "k", f(7), f(7)),
    case(aten.outer.default, "m n", f(5), f(4)),
    case(aten.linear.default, "_1 _0 k n", f(2, 5, 7), f(4, 7)),
    case(aten.linear.default, "_1 _0 n", f(2, 5, 7), f(4, 7), f(4)),
    case(aten.linear.default, "k n", f(7), f(5, 7)),
    case(aten.bilinear.default, "_1 _0 i j n", f(2, 5, 7), f(2, 5, 3), f(4, 7, 3)),
    case(aten.bilinear.default, "_0 n", f(5, 7), f(5, 3), f(4, 7, 3), f(4)),
    case(aten.linear.default, "_0 k n", f(5, 56), f(4, 56), hints=((0, S(1, ((7, 8),))), (0, S(1, ((2, 8), (5, 8)))))),
    case(aten.matmul.default, "m k n", f(5, 7), f(7, 4)),
    case(aten.matmul.default, "k", f(7), f(7)),
    case(aten.matmul.default, "k a n", f(7), f(3, 7, 5)),
    case(aten.matmul.default, "a m k", f(3, 5, 7), f(7)),
    case(aten.matmul.default, "a m k b n", f(2, 1, 5, 3), f(4, 3, 2)),
    case(aten.matmul.default, "m k a n", f(5, 3), f(4, 3, 2)),
    case(aten.matmul.default, "m k a n", f(1, 5, 3), f(4, 3, 1)),
    case(aten.einsum.default, "b q d k", "bqd, bkd -> bqk", [f(3, 5, 2), f(3, 4, 2)]),
    case(aten.einsum.default, "i j", "ij->i", [f(5, 7)]),
    case(aten.einsum.default, "i j k", "ij,j,jk->ki", [f(5, 3), f(3), f(3, 4)]),
    case(aten.einsum.default, "a i j", "...i,ij->...j", [f(2, 5), f(5, 3)]),
    case(aten.einsum.default, "a b i j", "...i,j...->...ij", [f(2, 5, 3), f(4, 2, 5)]),
    case(aten.einsum.default, "a b i j", "...i,ij", [f(2, 5, 3), f(3, 4)]),
    case(aten.einsum.default, "b c a", "bca,ca", [f(2, 5, 3), f(5, 3)]),
    case(aten.einsum.default, None, "ii->i", [f(5, 5)]),
    case(aten.einsum.default, None, "ij,ij->ij", [f(5, 1), f(5, 3)]),
]
