"""Calls of ops that read or write at indices."""

from __future__ import annotations

import torch

from tests.op_cases.notation import case, f, flags, ids, plain
from tests.oracle import T

aten = torch.ops.aten

INDEXING = [
    case(
        aten.embedding_bag.padding_idx, "e", f(7, 5), ids(7, 6), T((2,), "int", 1), False, 0, False, None, False, None
    ),
    case(aten.embedding_bag.padding_idx, "e", f(7, 5), ids(7, 6), T((2,), "int", 1), False, 1, False, None, False, 3),
    case(
        aten.embedding_bag.padding_idx, "e", f(7, 5), ids(7, 6), T((2,), "int", 1), False, 2, False, None, False, None
    ),
    case(aten.index_put.default, "a c", f(3, 5, 4), [None, T((2,), "int", 1)], f(3, 2, 4), True),
    case(aten.index_put.default, "b c", f(3, 5, 4), [T((1,), "int", 3)], f(4)),
    case(aten.index_put.default, "b", f(3, 5, 4), [T((1, 2), "int", 3), None, T((2,), "int", 4)], f(1, 2, 5), True),
    case(aten.index_put.default, None, f(3, 5), [flags(3)], f()),
    case(aten.index_add.default, "a", f(5, 4), 1, ids(4, 3), f(5, 3), alpha=2),
    case(aten.index_copy.default, "b", f(4, 5), 0, T((1,), "int", 4), f(1, 5)),
    case(aten.index_fill.int_Scalar, "a", f(5, 4), 1, ids(4, 3), 2.0),
    case(aten.index_fill.int_Tensor, "a", f(5, 4), 1, ids(4, 3), f()),
    case(aten.index_reduce.default, "a", f(5, 4), 1, ids(4, 3), f(5, 3), "amax"),
    case(aten.scatter.src, "a", f(5, 4), 1, ids(4, 5, 1), plain(5, 3)),
    case(aten.scatter.src, "", f(5, 4), 1, ids(4, 3, 1), plain(5, 3)),
    case(aten.scatter.value, "a", f(5, 4), 1, ids(4, 5, 3), 2.0),
    case(aten.scatter.reduce, "a", plain(5, 4), 1, ids(4, 5, 3), plain(5, 3), reduce="add"),
    case(aten.scatter.value_reduce, "b", plain(4, 5), 0, ids(4, 3, 5), 2.0, reduce="multiply"),
    case(aten.scatter_add.default, "a", f(5, 4), 1, ids(4, 5, 3), f(5, 3)),
    case(aten.scatter_add.default, "", f(5, 4), 1, ids(4, 5, 3), plain(6, 3)),
    case(aten.scatter_reduce.two, "a", f(5, 4), -1, ids(4, 5, 3), f(5, 3), "sum"),
    case(aten.searchsorted.Tensor, "_0 v", plain(5, 4), plain(5, 3)),
    case(aten.searchsorted.Tensor, "_1 _0", plain(4), plain(5, 3)),
    case(aten.searchsorted.Scalar, "", plain(4), 0.3),
    case(aten.searchsorted.Tensor, "_0 v", plain(5, 4), plain(5, 3), sorter=ids(4, 5, 4)),
    case(aten.isin.Tensor_Tensor, "a b", ids(9, 5, 3), ids(9, 2, 2)),
    case(aten.bucketize.Tensor, "_1 _0", plain(5, 3), plain(4)),
    case(aten.embedding.default, "v e a b", f(7, 4), ids(7, 3, 5)),
    case(aten.embedding.default, "v e a", f(5, 4), ids(5, 6), 3),
    case(aten.embedding.default, "v e a", f(5, 3), ids(5, 7), 0),
    case(aten.embedding.default, "v e", f(5, 3), ids(5), 4),
    case(aten.embedding.default, "v e a", f(1, 3), ids(1, 4)),
    case(aten.embedding.default, "e", f(5, 3), ids(3, 7), -1, True),
    case(aten.index_select.default, "v b i", f(5, 7), 0, ids(5, 3)),
    case(aten.index_select.default, "a b v i", f(4, 2, 7), -1, ids(7, 5)),
    case(aten.index_select.default, None, f(2, 5), 1, ids(5)),
    case(aten.index_select.default, "v b i", ids(9, 5, 2), 0, ids(5, 3)),
    case(aten.gather.default, "a v i", f(5, 7), 1, ids(7, 5, 3)),
    case(aten.gather.default, "v i", f(5, 7), 0, ids(5, 2, 4)),
    case(aten.gather.default, "a v c i", f(5, 4, 2), -2, ids(4, 5, 6, 2)),
    case(aten.gather.default, None, f(5), 0, ids(5)),
    case(aten.gather.default, "v b i", f(1, 3), 0, ids(1, 4, 3)),
    case(aten.index.Tensor, "a c x0", f(5, 4, 3), [None, ids(4, 6)]),
    case(aten.index.Tensor, "b c x0 x1", f(5, 4, 3), [ids(5, 2, 7), None, None]),
    case(aten.index.Tensor, "c x0 x1", f(5, 4, 3), [ids(5, 7, 1), ids(4, 6)]),
    case(aten.index.Tensor, "b x0", f(5, 4, 3), [ids(5, 6), None, ids(3, 1)]),
]
