"""The calls that the oracle runs: every op with a rule, in sizes that split evenly and sizes that don't.

Sizes are 5, 7, 4, 6, 3, 2 and 1: on 2 and 3 ranks they make even, uneven and empty shards. `splits` lists the
factors that a case's row allows to split, written from knowledge of the op, not copied from the rule.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 - registers its grouped product

from tests.oracle import Case, T
from torchshard import S

aten = torch.ops.aten
sdpa = aten.scaled_dot_product_attention.default
grouped = torch.ops.transformers.grouped_mm_fallback.default
ctc = torch.ops.torchshard.ctc_losses.default
native, instance = aten.native_batch_norm.default, aten.instance_norm.default
NONE, MEAN, SUM = 0, 1, 2
_SPECIAL = [name for name in dir(aten) if name.startswith("special_")]
UNTAGGED = [getattr(aten, name).default for name in _SPECIAL if re.search("polynomial|bessel|airy", name)]
"""Special functions that PyTorch does not tag as pointwise."""


def f(*shape: int) -> T:
    """Normal floats with a gradient."""
    return T(shape)


def pos(*shape: int) -> T:
    """Positive floats with a gradient."""
    return T(shape, "positive")


def apart(*shape: int) -> T:
    """Floats that are all different, with a gradient."""
    return T(shape, "apart")


def ids(high: int, *shape: int) -> T:
    """Integers from 0 to high - 1."""
    return T(shape, "int", high)


def flags(*shape: int) -> T:
    """Booleans."""
    return T(shape, "bool")


def buffer(kind: str, *shape: int) -> T:
    """A buffer of the model."""
    return T(shape, kind, buffer=True)


def plain(*shape: int) -> T:
    """Floats without a gradient."""
    return T(shape, grad=False)


def spd(*shape: int) -> T:
    """Symmetric positive definite matrices."""
    return T(shape, "definite")


def c(*shape: int) -> T:
    """Complex numbers with a gradient."""
    return T(shape, "complex")


def case(target: Any, splits: str | None, *args: Any, hints: tuple[Any, ...] = (), **kwargs: Any) -> Case:
    """A call; `splits`: the factors that its row can split, '+' joins factors that split together, None: no row."""
    return Case(target, splits, args, kwargs, hints)


def batch_norm(splits: str, *args: Any) -> Case:
    """Input, weight, bias, running mean and variance, whether in training."""
    return case(aten.batch_norm.default, splits, *args, 0.3, 1e-5, False)


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

CONVOLUTIONS = [
    case(aten.convolution.default, "n c o", f(2, 5, 4), f(5, 3, 2), None, [2], [0], [1], True, [0], 1),
    case(aten.convolution.default, "n o", f(2, 5, 4, 3), f(5, 2, 2, 2), f(2), [1, 1], [1, 0], [1, 1], True, [0, 0], 1),
    case(aten.convolution.default, "g n", f(2, 4, 4), f(4, 3, 2), None, [2], [0], [1], True, [0], 2),
    case(aten.conv1d.default, "n c o", f(3, 4, 7), f(5, 4, 3)),
    case(aten.conv1d.default, "n o", f(3, 4, 7), f(5, 4, 3), f(5), [2], [1]),
    case(aten.conv2d.default, "n c o", f(2, 3, 5, 6), f(4, 3, 3, 3), None, [1, 2], [1, 0]),
    case(aten.conv2d.default, "g n", f(2, 6, 5, 5), f(9, 2, 3, 3), f(9), [1, 1], [1, 1], [1, 1], 3),
    case(aten.conv2d.default, "g n", f(2, 5, 4, 4), f(5, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 5),
    case(aten.conv3d.default, "n c o", f(2, 3, 3, 4, 3), f(4, 3, 2, 2, 2)),
    case(aten.conv1d.padding, "n o", f(3, 4, 7), f(5, 4, 3), f(5), [1], "same"),
    case(aten.conv2d.padding, "g n", f(2, 4, 5, 5), f(4, 2, 3, 3), None, [1, 1], "same", [2, 1], 2),
    case(aten.conv3d.padding, "n c o", f(2, 2, 3, 3, 3), f(5, 2, 2, 2, 2), None, [1, 1, 1], "valid"),
    case(aten.conv2d.default, "c o", f(3, 5, 5), f(4, 3, 3, 3)),
    case(aten.conv1d.default, "g", f(6, 5), f(3, 2, 3), f(3), [1], [1], [1], 3),
    case(aten.convolution.default, "g n", f(2, 6, 3), f(6, 2, 2), f(6), [1], [0], [1], True, [0], 3),
    case(aten.max_pool1d.default, "a b", apart(2, 5, 7), [2]),
    case(aten.max_pool2d.default, "a b", apart(2, 5, 6, 6), [2, 3], [1, 2], [1, 1]),
    case(aten.max_pool3d.default, "a b", apart(2, 3, 4, 4, 4), [2, 2, 2]),
    case(aten.max_pool2d.default, "a", apart(5, 6, 6), [2, 2]),
    case(aten.avg_pool1d.default, "a b", f(2, 5, 7), [3], [2], [1]),
    case(aten.avg_pool2d.default, "a b", f(2, 5, 6, 6), [2, 2], [2, 2], [1, 1], False, False),
    case(aten.avg_pool3d.default, "a b", f(2, 3, 4, 4, 4), [2, 2, 2]),
    case(aten.adaptive_avg_pool1d.default, "a b", f(2, 5, 7), [3]),
    case(aten.adaptive_avg_pool2d.default, "a b", f(2, 5, 6, 7), [3, 1]),
    case(aten.adaptive_avg_pool3d.default, "a b", f(2, 3, 4, 4, 4), [1, 2, 3]),
]

CREATION = [
    case(aten.arange.default, "", 5),
    case(aten.arange.start, "", 2, 7),
    case(aten.arange.start_step, "", 1, 9, 3, dtype=torch.float64),
    case(aten.zeros.default, "", [5, 2]),
    case(aten.ones.default, "", [5], dtype=torch.float64),
    case(aten.full.default, "", [3, 4], 2.5, dtype=torch.float64),
    Case(aten.empty.memory_format, "", ([5, 2],), values=False),
    case(aten.scalar_tensor.default, "", 2.0, dtype=torch.float64),
    case(aten.eye.default, "", 5, dtype=torch.float64),
    case(aten.eye.m, "", 5, 3, dtype=torch.float64),
    case(aten.linspace.default, "", 0, 1, 5, dtype=torch.float64),
    case(aten.rand.default, "", [5, 2], dtype=torch.float64),
    case(aten.randn.default, "", [5, 2], dtype=torch.float64),
    case(aten.randint.default, "", 9, [5, 2]),
    case(aten.randint.low, "", 3, 9, [5]),
]

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

NORMALIZATION = [
    case(aten.native_layer_norm.default, "a b", f(3, 5, 4), [4], f(4), f(4), 1e-5),
    case(aten.native_layer_norm.default, "a", f(5, 3, 4), [3, 4], None, None, 1e-5),
    case(aten.softmax.int, "a b c", f(5, 7, 2), 1),
    case(aten.softmax.int, "a b", f(5, 1), -1),
    case(aten.softmax.int, "a b", ids(9, 4, 5), -1, torch.float64),
    case(aten.log_softmax.int, "a b", f(5, 7), -1),
    case(aten.log_softmax.int, "a b", f(2, 3), 0),
    case(aten.softmax.int, "", f(), 0),
    case(aten.layer_norm.default, "a b c", f(2, 5, 4), [4], f(4), f(4)),
    case(aten.layer_norm.default, "a b c", f(3, 5, 2), [5, 2]),
    case(aten.layer_norm.default, "a b c", f(2, 4, 3), [4, 3], f(4, 3), f(4, 3)),
    case(aten.rms_norm.default, "a b c", f(3, 5, 2), [5, 2], f(5, 2), 1e-3),
    case(aten.layer_norm.default, "a b", f(5, 7), [7], f(7), None, 1e-3),
    case(aten.rms_norm.default, "a b c", f(2, 5, 4), [4], f(4)),
    case(aten.rms_norm.default, "a b", f(5, 7), [7]),
    case(aten.group_norm.default, "g n", f(2, 6, 5), 3, f(6), f(6)),
    case(aten.group_norm.default, "g n", f(3, 5, 2, 2), 5),
    case(aten.group_norm.default, "g n", f(3, 4), 2, f(4), f(4)),
    batch_norm("c", f(5, 4, 3), f(4), f(4), None, None, True),
    batch_norm("c", f(5, 7), f(7), f(7), buffer("normal", 7), buffer("positive", 7), True),
    batch_norm("c", f(4, 2, 3, 2), None, None, buffer("normal", 2), buffer("positive", 2), True),
    case(aten.broadcast_tensors.default, "a b", [f(5, 4), f(4)]),
    case(aten.broadcast_tensors.default, "a c b", [f(5, 1, 4), f(3, 1), f(5, 3, 4)]),
    case(aten.copy_.default, "a b", buffer("normal", 5, 4), plain(5, 4)),
    batch_norm("n c s0", f(5, 4, 3), f(4), f(4), buffer("normal", 4), buffer("positive", 4), False),
    case(native, "", f(5, 4, 3), f(4), f(4), buffer("normal", 4), buffer("positive", 4), True, 0.3, 1e-5),
    case(instance, "n c", f(5, 4, 3), f(4), f(4), None, None, True, 0.3, 1e-5, False),
    case(instance, "c", f(5, 4, 3), None, None, buffer("normal", 4), buffer("positive", 4), True, 0.3, 1e-5, False),
    case(
        instance, "n c s0", f(5, 4, 3), f(4), f(4), buffer("normal", 4), buffer("positive", 4), False, 0.3, 1e-5, False
    ),
]

LOSSES = [
    case(aten.binary_cross_entropy.default, "a b", pos(5, 3), T((5, 3), "positive", grad=False), None, SUM),
    case(aten.binary_cross_entropy.default, "a b", pos(5, 3), T((5, 3), "positive", grad=False)),
    case(aten.soft_margin_loss.default, "a b", f(5, 3), plain(5, 3)),
    *(
        case(target, "a b", apart(5, 7), f(5, 7), reduction)
        for target in (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
        )
        for reduction in (NONE, MEAN, SUM)
    ),
    case(aten.mse_loss.default, "a", f(7), f(7)),
    case(aten.mse_loss.default, None, plain(3, 1), plain(3, 4)),
    case(aten.smooth_l1_loss.default, "a b", f(5, 3), f(5, 3), MEAN, 0.3),
    case(aten.huber_loss.default, "a b", f(5, 3), f(5, 3), MEAN, 0.3),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3)),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3), plain(5, 3), None, NONE),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3), None, plain(5, 3), SUM),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3), None, plain(3), SUM),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3), plain(5, 1), plain(3)),
    case(ctc, "n", f(5, 3, 7), ids(7, 3, 2), ids(6, 3), ids(3, 3), 0, True),
    case(aten.cross_entropy_loss.default, "n v", f(5, 7), ids(7, 5)),
    case(aten.cross_entropy_loss.default, "n v", f(5, 7), ids(7, 5), None, NONE),
    case(aten.cross_entropy_loss.default, "n v", f(6, 4), ids(4, 6), plain(4), MEAN),
    case(aten.cross_entropy_loss.default, "n v", f(6, 4), ids(4, 6), None, SUM, 2, 0.1),
    case(aten.cross_entropy_loss.default, "n v", f(6, 4), ids(4, 6), T((4,), "positive", grad=False), MEAN, 2, 0.3),
    case(aten.cross_entropy_loss.default, "n v", f(6, 5), ids(5, 6), T((5,), "positive", grad=False), NONE, 0, 0.2),
    case(aten.cross_entropy_loss.default, "n v", f(6, 5), ids(5, 6), None, MEAN, -100, 0.2),
    case(aten.cross_entropy_loss.default, "n v s0", f(3, 5, 4), ids(5, 3, 4), None, MEAN, 1),
    case(aten.cross_entropy_loss.default, "n v s0", f(3, 5, 4), ids(5, 3, 4), T((5,), "positive", grad=False), NONE),
    case(aten.cross_entropy_loss.default, "v", f(7), ids(7)),
    case(aten.cross_entropy_loss.default, "n v", f(5, 1), ids(1, 5)),
    case(aten.cross_entropy_loss.default, "n v", f(5, 4), ids(4, 5), plain(4), SUM, 2),
    case(aten.cross_entropy_loss.default, "n", f(5, 4), pos(5, 4)),
    case(aten.cross_entropy_loss.default, "n", f(5, 4), pos(5, 4), T((4,), "positive", grad=False), MEAN, -100, 0.2),
    case(aten.cross_entropy_loss.default, "n s0", f(5, 4, 3), pos(5, 4, 3), None, SUM),
    case(aten.cross_entropy_loss.default, "", f(4), pos(4)),
    case(aten.nll_loss_nd.default, "n", f(5, 4), ids(4, 5)),
    case(aten.nll_loss_nd.default, "n", f(5, 4), ids(4, 5), T((4,), "positive", grad=False), MEAN, 2),
    case(aten.nll_loss_nd.default, "n s0", f(2, 4, 5), ids(4, 2, 5), None, NONE),
    case(aten.nll_loss_nd.default, "n", f(6, 4), ids(4, 6), None, SUM, 1),
]

POINTWISE = [
    case(aten.angle.default, "a b", f(5, 3)),
    case(aten._prelu_kernel.default, "a b", f(5, 3), f(1, 3)),
    case(aten._prelu_kernel.default, "a b", f(5, 3), f(1, 1)),
    case(aten.complex.default, "a b", f(5, 3), f(5, 3)),
    case(aten.polar.default, "a b", pos(5, 3), f(1, 3)),
    case(aten.polygamma.default, "a b", 1, pos(5, 3)),
    *(
        case(op, "a b", *([pos(5, 3)] if "polynomial" not in str(op) else [plain(5, 3), T((5, 3), "int", 3)]))
        for op in UNTAGGED
    ),
    case(aten.add.Tensor, "a b", f(5, 7), f(5, 7)),
    case(aten.add.Tensor, "a b", f(5, 7), f(7)),
    case(aten.add.Tensor, "a b", f(5, 1), f(1, 4), alpha=2),
    case(aten.add.Tensor, "a", f(5), 2.0),
    case(aten.sub.Tensor, "b a c", f(5, 1), f(3, 1, 4), alpha=3),
    case(aten.mul.Tensor, "a b c", f(2, 5, 1), f(4)),
    case(aten.mul.Tensor, "a b", f(5, 7), f()),
    case(aten.mul.Tensor, "a", f(5), 3.0),
    case(aten.div.Tensor, "a b", f(5, 7), pos(7)),
    case(aten.div.Tensor_mode, "a b", f(5, 7), pos(7), rounding_mode="floor"),
    case(aten.mul.Scalar, "a b", f(5, 2), 3.0),
    case(aten.div.Scalar, "a b", f(5, 2), 3.0),
    case(aten.neg.default, "a b", f(5, 1)),
    case(aten.where.self, "a b", flags(5, 1), f(5, 7), f(7)),
    case(aten.where.ScalarOther, "a b", flags(5, 7), f(5, 7), 0.0),
    case(aten.where.ScalarSelf, "a b", flags(5, 7), 2.0, f(7)),
    case(aten.where.Scalar, "a b", flags(5, 7), 1.0, 0.0),
    case(aten.rsub.Tensor, "a b", f(5, 3), f(3)),
    case(aten.floor_divide.default, "a b", plain(5, 3), T((3,), "positive", grad=False)),
    case(aten.floor_divide.Scalar, "a", ids(9, 5), 2),
    case(aten.hardswish.default, "a b", f(5, 3)),
    case(aten.log_sigmoid.default, "a b", f(5, 3)),
    case(aten.gelu.default, "a b", f(5, 7), approximate="tanh"),
    case(aten.silu.default, "a b", f(4, 6)),
    case(aten.relu.default, "a b", apart(5, 7)),
    case(aten.tanh.default, "a", f(1)),
    case(aten.exp.default, "a b c", f(2, 1, 5)),
    case(aten.rsqrt.default, "a", pos(5)),
    case(aten.pow.Tensor_Scalar, "a b", f(5, 2), 3),
    case(aten.pow.Tensor_Tensor, "a b", pos(5, 2), f(2)),
    case(aten.clamp.default, "a b", f(5, 3), -0.5, 0.5),
    case(aten.masked_fill.Scalar, "a b c", f(2, 5, 3), flags(5, 1), -1e9),
    case(aten.masked_fill.Tensor, "a b", f(5, 3), flags(5, 3), f()),
    case(aten.addcmul.default, "a b", f(5, 3), f(3), f(5, 1), value=2),
    case(aten.lerp.Tensor, "a b", f(5, 3), f(5, 3), pos(3)),
    case(aten.maximum.default, "a b", f(5, 3), f(3)),
    case(aten.eq.Tensor, "a b", ids(3, 5, 4), ids(3, 4)),
    case(aten.lt.Scalar, "a", f(5), 0.0),
    case(aten.logical_not.default, "a b", flags(5, 3)),
    case(aten.bitwise_and.Tensor, "a b", flags(5, 3), flags(5, 3)),
    case(aten.sigmoid.default, "", f()),
    case(aten.sigmoid.default, "a", f(7)),
    case(aten.clone.default, "_1 _0", f(5, 7)),
    case(aten.clone.default, "_3 _2 _1 _0", f(5, 2, 3, 3), memory_format=torch.channels_last),
    case(aten.contiguous.default, "_1", f(5, 1)),
    case(aten.alias.default, "_1 _0", f(4, 3)),
    case(aten.lift_fresh_copy.default, "_0", f(5)),
    case(aten.detach.default, "_1 _0", f(5, 7)),
    case(aten.detach_.default, "_1 _0", plain(5, 7)),
    case(aten.to.dtype, "a b", f(5, 3), torch.float32),
    case(aten.to.dtype, "a", ids(9, 5), torch.float64),
    case(aten.to.device, "a b", f(5, 3), torch.device("cpu"), torch.float32, False, True),
    case(aten.to.dtype_layout, "a b", f(5, 3), dtype=torch.float32),
    case(aten.to.other, "a b", f(5, 3), T((5, 3), grad=False)),
    case(aten.to.other, "a b", f(5, 3), ids(3, 4)),
    case(aten._to_copy.default, "a b", f(5, 1), dtype=torch.float32),
    case(aten.type_as.default, "a b", ids(9, 5, 3), plain(5, 3)),
    case(aten.type_as.default, "a b", ids(9, 5, 3), plain()),
    case(aten.type_as.default, "a b", ids(9, 5, 3), plain(7)),
    case(aten.type_as.default, "a", ids(9, 5), plain(2, 3, 4)),
    case(aten.bernoulli.default, "", T((5, 7), "positive", grad=False)),
    case(aten.zeros_like.default, "a b", f(5, 7)),
    case(aten.ones_like.default, "a b", f(5, 1), dtype=torch.float32),
    case(aten.new_ones.default, "a b", f(5, 4), [3, 5, 4]),
    case(aten.new_zeros.default, "a", f(5, 7, 4), [5, 6], dtype=torch.int64),
    case(aten.new_zeros.default, "", f(5), [7]),
    case(aten.new_full.default, "b", f(5, 7), [7, 5], 1.5),
    case(aten.full_like.default, "a b", f(4, 3), 2.5),
    case(aten.zero.default, "a b", f(5, 7)),
    case(aten.fill.Scalar, "a b", f(5, 7), 2.5),
    case(aten.fill.Tensor, "a b", f(5, 7), f()),
    Case(aten.empty_like.default, "a b", (f(5, 7),), values=False),
]

RANDOM = [
    case(aten.dropout.default, "_2 _1 _0", f(5, 7, 2), 0.4, True),
    case(aten.dropout.default, "_1 _0", f(4, 6), 0.4, True, hints=((0, S(1, ((1, 2), (2, 2)))),)),
    case(aten.dropout.default, "_1 _0", f(5, 7), 0.4, False),
    case(aten.dropout.default, "_1", f(5, 1), 0.0, True),
    case(aten.feature_dropout.default, "a b c", f(4, 5, 3), 0.4, True),
    case(aten.feature_dropout.default, "a b", f(5, 4), 0.4, False),
    case(aten.feature_dropout.default, "a b c d", f(2, 6, 1, 3), 0.4, True, hints=((0, S(1, ((1, 2), (2, 2)))),)),
]

REDUCTIONS = [
    case(aten.norm.Scalar, "a b", f(5, 3)),
    case(aten.norm.ScalarOpt_dim_dtype, "a b", f(5, 3), 2, [1], False, dtype=torch.float64),
    case(aten.norm.ScalarOpt_dtype, "a b", f(5, 3), 2, dtype=torch.float64),
    case(aten.nansum.default, "a b", f(5, 3), [1]),
    case(aten.aminmax.default, "a", apart(5, 3), dim=1),
    case(aten.std_mean.correction, "a b", f(5, 3), [1]),
    case(aten.count_nonzero.dim_IntList, "a b", plain(5, 3), [1]),
    case(aten.count_nonzero.default, "a b", plain(5, 3), 1),
    case(aten.median.default, "", apart(5, 3)),
    case(aten.median.dim, "a", apart(5, 3), 1),
    case(aten.nanmedian.default, "", apart(5, 3)),
    case(aten.nanmedian.dim, "b", apart(3, 5), 0, True),
    case(aten.mode.default, "a", apart(5, 3)),
    case(aten.kthvalue.default, "a", apart(5, 3), 2),
    case(aten._safe_softmax.default, "a", f(5, 3), 1),
    case(aten.sum.default, "a b", f(5, 7)),
    case(aten.sum.default, "a b", flags(5, 7)),
    case(aten.sum.dim_IntList, "a b c", f(2, 5, 7), [1]),
    case(aten.sum.dim_IntList, "a b", f(5, 4), [-1], True),
    case(aten.sum.dim_IntList, "a b", f(5, 4), []),
    case(aten.sum.dim_IntList, "a b", f(5, 1), None, dtype=torch.float64),
    case(aten.mean.default, "a b", f(5, 7)),
    case(aten.mean.default, "", f()),
    case(aten.mean.dim, "a b c", f(2, 5, 7), [1, 2]),
    case(aten.mean.dim, "a b", f(5, 4), [-1], True),
    case(aten.mean.dim, "a b", f(5, 4), []),
    case(aten.mean.dim, "", f(), [0]),
    case(aten.squeeze.dim, "", f(), 0),
    case(aten.mean.dim, "a b", ids(9, 5, 4), [0], dtype=torch.float64),
    case(aten.amax.default, "a b", apart(5, 7), [0]),
    case(aten.amax.default, "a b", apart(5, 7), []),
    case(aten.amax.default, "a b", T((5, 7), "ties"), [1]),
    case(aten.amin.default, "a b", T((7, 5), "ties"), [0, 1], True),
    case(aten.max.default, "a b", ids(3, 5, 7)),
    case(aten.amin.default, "a b c", apart(2, 5, 3), [0, -1], True),
    case(aten.max.dim, "a", apart(5, 7), -1),
    case(aten.min.dim, "b", apart(5, 7), 0, True),
    case(aten.max.default, "a b", apart(5, 7)),
    case(aten.min.default, "a", apart(7)),
    case(aten.argmax.default, "a b", apart(5, 7), 1),
    case(aten.argmax.default, "", apart(5, 7)),
    case(aten.argmax.default, "a b", T((5, 7), "ties"), 0),
    case(aten.argmax.default, "a b c", apart(2, 3, 7), -1, True),
    case(aten.argmin.default, "a b", apart(5, 7), -2, True),
    case(aten.argmin.default, "a", ids(3, 5, 7), 1),
    case(aten.any.dim, "a b", flags(5, 7), 1),
    case(aten.all.dim, "a b", flags(5, 7), 0, True),
    case(aten.any.default, "a b", flags(5, 7)),
    case(aten.all.default, "a", flags(7)),
    case(aten.any.dims, "a b c", flags(5, 2, 3), [0, 2]),
    case(aten.all.dims, "a b c", flags(5, 2, 3), [-1]),
    case(aten.any.dims, "a b", flags(5, 3), []),
    case(aten.all.dims, "a b", flags(5, 3), None, True),
    case(aten.prod.dim_int, "a b", f(5, 4), 1),
    case(aten.prod.default, "a", f(5)),
    case(aten.var.correction, "a b", f(5, 4), [1], correction=0),
    case(aten.var.correction, "a b", plain(5, 4), []),
    case(aten.std.correction, "a b", f(5, 4), [-1], correction=2),
    case(aten.std.correction, "a b", f(5, 4), None, keepdim=True),
    case(aten.var.dim, "a b", f(5, 4), [0], False, True),
    case(aten.std.dim, "a b c", f(5, 4, 2), [1, 2]),
    case(aten.var_mean.correction, "a b", f(5, 4), [1], correction=1, keepdim=True),
    case(aten.std.correction, "a b", T((4, 5), "rows"), [1]),
    case(aten.var_mean.correction, "a b c", T((2, 5, 3), "rows"), [1, 2], correction=0),
    case(aten.logsumexp.default, "a b", f(5, 4), [1]),
    case(aten.logsumexp.default, "a b", T((4, 5), "masked"), [-1], True),
    case(aten.logsumexp.default, "b", f(5, 2, 4), [0, 2]),
    case(aten.quantile.scalar, "a", f(5, 4), 0.3, 1),
    case(aten.quantile.default, "a q", f(5, 4), T((3,), "positive", grad=False), -1, True),
    case(aten.nanquantile.scalar, "b", f(5, 4), 0.7, 0),
    case(aten.nanquantile.default, "a q", f(5, 4), T((2,), "positive", grad=False), 1, interpolation="lower"),
    case(aten.linalg_vector_norm.default, "a b", f(5, 4), 2, [-1], True),
    case(aten.linalg_vector_norm.default, "a b", f(5, 4), 3),
    case(aten.linalg_vector_norm.default, "a b c", f(5, 2, 3), 1, [0, 2]),
    case(aten.linalg_vector_norm.default, "a b", f(5, 4), float("inf"), [-1]),
    case(aten.linalg_vector_norm.default, "a b", T((5, 4), "ties"), float("-inf"), [-1], True),
    case(aten.linalg_vector_norm.default, "a", f(5, 4), 0, [-1]),
    case(aten.norm.ScalarOpt_dim, "a b", f(5, 4), 2, [1]),
    case(aten.norm.ScalarOpt_dim, "a b", f(5, 4), 2, []),
    case(aten.cumsum.default, "a", f(5, 7), 1),
    case(aten.cumprod.default, "b", f(4, 7), -2),
    case(aten.sort.default, "b", apart(5, 7), 0, True),
    case(aten.sort.stable, "a", apart(5, 7), stable=True, dim=1, descending=False),
    case(aten.argsort.default, "a", apart(5, 7)),
    case(aten.argsort.stable, "b", apart(5, 7), stable=True, dim=0),
    case(aten.cummax.default, "a", apart(5, 7), 1),
    case(aten.cummin.default, "b", apart(5, 4), -2),
    case(aten.logcumsumexp.default, "a", f(5, 4), 1),
    case(aten.cumsum.default, "", f(), 0),
    case(aten.topk.default, "a", apart(5, 7), 3),
    case(aten.topk.default, "b", apart(5, 7), 2, 0, False),
]

SHAPES = [
    case(aten.view.default, "a b c d", f(2, 5, 12), [2, 5, 3, 4]),
    case(aten.view.default, "a b c d", f(2, 5, 14), [-1, 7, 2], hints=((0, S(2, ((2, 2), (5, 2)))),)),
    case(aten.view.default, "a b", f(7, 4, 1), [28, 1]),
    case(aten.reshape.default, "a b c", f(5, 4, 3), [5, 12]),
    case(aten.reshape.default, "a b c", f(6, 4), [3, 8]),
    case(aten.reshape.default, "", f(5, 3), [3, 5]),
    case(aten.reshape.default, "", f(8, 5), [10, 4]),
    case(aten.reshape.default, "a", f(1, 5), [5]),
    case(aten.reshape.default, "", f(1, 1), []),
    case(aten._unsafe_view.default, "a b c", f(5, 6), [5, 2, 3]),
    case(aten.view.default, "a b c d", f(2, 9, 4), [2, 9, 2, 2], hints=((0, S(1, ((4, 1), (3, 1), (2, 1)))),)),
    case(aten.unsqueeze.default, "a b", f(5, 4), 1),
    case(aten.unsqueeze.default, "a", f(5), -1),
    case(aten.squeeze.default, "a b", f(5, 1, 4)),
    case(aten.squeeze.dim, "a b", f(5, 1, 4), 1),
    case(aten.squeeze.dim, "a b", f(5, 2), 1),
    case(aten.squeeze.dims, "a b", f(3, 1, 2, 1), [1, -1, 0]),
    case(aten.flatten.using_ints, "a b c", f(2, 5, 4), 1, 2),
    case(aten.flatten.using_ints, "a b", f(5, 3)),
    case(aten.unflatten.int, "a b c", f(2, 12), 1, [3, -1]),
    case(aten.unflatten.int, "a b c", f(10, 3), 0, [5, 2]),
    case(aten.permute.default, "a b c", f(2, 5, 4), [2, 0, -2]),
    case(aten.transpose.int, "a b c", f(2, 5, 4), -1, 1),
    case(aten.transpose.int, "", f(), 0, -1),
    case(aten.t.default, "a b", f(5, 4)),
    case(aten.t.default, "a", f(5)),
    case(aten.mT.default, "a b c", f(2, 5, 4)),
    case(aten.numpy_T.default, "a b c", f(5, 4, 3)),
    case(aten.movedim.int, "a b c", f(2, 5, 4), 0, -1),
    case(aten.movedim.intlist, "a b c", f(2, 5, 4), [2, 0], [0, 1]),
    case(aten.expand.default, "a c b", f(2, 1, 4), [2, 5, -1]),
    case(aten.expand.default, "b a", f(5), [3, 5]),
    case(aten.expand.default, "a b", f(1, 1), [1, 7]),
    case(aten.expand_as.default, "b a", f(1, 4), plain(5, 4)),
    case(aten.expand_as.default, "b a", f(4), plain(5, 4)),
    case(aten.repeat.default, "a b", f(5, 4), [1, 3]),
    case(aten.repeat.default, "a b", f(5, 4), [2, 3, 1]),
    case(aten.repeat.default, "a b", f(5, 1), [1, 3]),
    case(aten.repeat_interleave.self_int, "a b", f(5, 4), 3, 1),
    case(aten.repeat_interleave.self_int, "a b", f(3, 5), 2, 0),
    case(aten.repeat_interleave.self_int, None, f(3, 5), 2),
    case(aten.slice.Tensor, "p+q+r a", f(5, 9), 1, 3, 6),
    case(aten.slice.Tensor, "q+r a", f(5, 9), 1, 0, 4),
    case(aten.slice.Tensor, "p+q a", f(5, 9), -1, -4, 100),
    case(aten.slice.Tensor, "a b", f(7, 2), 0, 0, 7),
    case(aten.slice.Tensor, "b", f(7, 2), 0, 1, 7, 2),
    case(aten.slice.Tensor, "b", f(7, 2), 0, 3, 3),
    case(aten.slice.Tensor, "a b", f(5, 9)),
    case(aten.slice_scatter.default, "p+q+r a", f(5, 9), f(5, 3), 1, 3, 6),
    case(aten.slice_scatter.default, "p+q a", f(5, 9), f(5, 4), -1, -4, 100),
    case(aten.slice_scatter.default, "a b", f(7, 2), f(7, 2), 0, 0, 7),
    case(aten.slice_scatter.default, "b", f(7, 2), f(3, 2), 0, 1, 7, 2),
    case(aten.select_scatter.default, "a c", f(3, 5, 4), f(3, 4), 1, -1),
    case(aten.constant_pad_nd.default, "a c", f(3, 5, 4), [0, 0, 1, 2]),
    case(aten.constant_pad_nd.default, "a", f(3, 5, 4), [2, -1, 1, 0], 1.5),
    case(aten.pad.default, "a b", f(3, 5, 4), [2, -1]),
    case(aten.pad.default, "a b", f(3, 5, 4), [2, 1], "reflect"),
    case(aten.pad.default, "a b", f(3, 5, 4), [1, 1], "constant", 2.0),
    case(aten.reflection_pad2d.default, "a b", f(3, 2, 5, 4), [1, 2, 0, 1]),
    case(aten.reflection_pad1d.default, "a", f(5, 4), [2, 1]),
    case(aten.reflection_pad3d.default, "a", f(5, 3, 2, 4), [1, 2, 0, 1, 1, 1]),
    case(aten.replication_pad1d.default, "a b", f(3, 5, 4), [2, 1]),
    case(aten.replication_pad2d.default, "a b", f(2, 5, 3, 2), [1, 0, 0, 2]),
    case(aten.replication_pad3d.default, "a b", f(1, 5, 2, 3, 2), [1, 0, 0, 2, 1, 1]),
    case(aten.select.int, "a c", f(3, 5, 4), 1, -1),
    case(aten.select.int, "", f(5), 0, 2),
    case(aten.unbind.int, "b", f(3, 5), 0),
    case(aten.unbind.int, "a", f(5, 2), -1),
    case(aten.split.Tensor, "x0+x1+x2 a", f(5, 7), 3, 1),
    case(aten.split.Tensor, "x0+x1+x2 b", f(6, 4), 2),
    case(aten.split_with_sizes.default, "x0+x1+x2 a", f(5, 9), [2, 3, 4], -1),
    case(aten.split_with_sizes.default, "a", f(5, 3), [3, 0], 1),
    case(aten.split.sizes, "x0+x1 b", f(9, 2), [4, 5]),
    case(aten.chunk.default, "x0+x1 a", f(5, 8), 2, 1),
    case(aten.chunk.default, "x0+x1+x2 b", f(7, 2), 3),
    case(aten.unsafe_split.Tensor, "x0+x1 a", f(5, 8), 4, 1),
    case(aten.unsafe_split_with_sizes.default, "x0+x1 b", f(7, 2), [4, 3]),
    case(aten.cat.default, "a x0+x1", [f(5, 3), f(5, 4)], 1),
    case(aten.cat.default, "x0+x1+x2 b", [f(5, 3), f(1, 3), f(2, 3)]),
    case(aten.cat.default, None, [f(0), f(5, 3)], 1),
    case(aten.stack.default, "a b", [f(5, 4), f(5, 4)], 1),
    case(aten.stack.default, "a", [f(5), f(5), f(5)], -1),
    case(aten.roll.default, "a", f(5, 4), [2], [1]),
    case(aten.roll.default, "", f(5, 4), [3]),
    case(aten.flip.default, "a", f(5, 4), [-1]),
    case(aten.flip.default, "a b", f(5, 4), []),
    case(aten.unfold.default, "a c", f(2, 5, 4), 1, 2, 2),
    case(aten.diagonal.default, "b", f(4, 5, 3), 0, 0, 2),
    case(aten.diagonal.default, "a", f(5, 4, 4), 1, -2, -1),
    case(aten.diagonal_scatter.default, "a", f(5, 4, 4), f(5, 3), 1, -2, -1),
    case(aten.diag_embed.default, "a", f(5, 3)),
    case(aten.diag_embed.default, "a b", f(5, 2, 3), 1, 0, 2),
    case(aten.view_as_real.default, "_1 _0", c(5, 3)),
    case(aten.view_as_complex.default, "_1 _0", f(5, 3, 2)),
    case(aten.unfold.default, "", f(), 0, 1, 1),
    case(aten.tril.default, "_0 a b", f(3, 5, 4)),
    case(aten.tril.default, "a b", f(1, 4, 4), -1),
    case(aten.triu.default, "_0 a b", f(5, 3, 3), 1),
]

ATTENTION = [
    case(sdpa, "a g l v", f(3, 4, 5, 2), f(3, 4, 7, 2), f(3, 4, 7, 3)),
    case(sdpa, "a g v", f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), None, 0.0, True),
    case(sdpa, "a g l v", f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), plain(4, 4)),
    case(sdpa, "a g l v", f(2, 5, 4, 2), f(2, 5, 3, 2), f(2, 5, 3, 2), f(2, 1, 4, 3)),
    case(sdpa, "a g l v", f(2, 5, 4, 2), f(2, 5, 3, 2), f(2, 5, 3, 2), f(1, 5, 4, 3)),
    case(sdpa, "a g l v", f(2, 4, 4, 2), f(2, 4, 3, 2), f(2, 4, 3, 2), f(1, 4, 4, 3)),
    case(sdpa, "g r a l v", f(2, 4, 3, 2), f(2, 1, 3, 2), f(2, 1, 3, 2), f(4, 1, 3), enable_gqa=True),
    case(sdpa, "g l v", f(5, 4, 2), f(5, 3, 2), f(5, 3, 2), scale=0.3),
    case(sdpa, "g r a l v", f(2, 6, 4, 2), f(2, 3, 4, 2), f(2, 3, 4, 2), enable_gqa=True),
    case(sdpa, "g r a l v", f(2, 4, 3, 2), f(2, 1, 3, 2), f(2, 1, 3, 2), enable_gqa=True),
    case(sdpa, "g r a l v", f(2, 4, 3, 2), f(2, 2, 3, 2), f(2, 2, 3, 2), plain(1, 4, 3, 3), enable_gqa=True),
    case(sdpa, "a g l v", f(3, 4, 5, 2), f(3, 4, 7, 2), f(3, 4, 7, 3), None, 0.3),
    case(sdpa, "a g v", f(2, 3, 4, 2), f(2, 3, 4, 2), f(2, 3, 4, 2), None, 0.3, True),
    case(sdpa, "a g l v", f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), plain(4, 4), 0.3, scale=0.7),
    case(sdpa, "a g l v", f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), flags(2, 1, 4, 4), 0.3),
    case(sdpa, "g r a l v", f(2, 6, 4, 2), f(2, 3, 4, 2), f(2, 3, 4, 2), None, 0.3, enable_gqa=True),
    case(sdpa, "l v", f(4, 2), f(3, 2), f(3, 2), None, 0.3),
    case(sdpa, "g l v", f(3, 4, 2), f(3, 4, 2), f(3, 4, 2), None, 0.3, scale=-0.7),
    case(sdpa, "a g l v", f(2, 4, 3, 2), f(1, 4, 3, 2), f(1, 4, 3, 2)),
    case(sdpa, "a g l v", f(2, 4, 3, 2), f(2, 4, 3, 2), f(1, 4, 3, 2)),
    case(sdpa, "g l a v", f(4, 3, 2), f(2, 4, 5, 2), f(2, 1, 5, 3)),
    case(sdpa, None, f(4, 3, 2), f(2, 4, 5, 2), f(2, 1, 5, 3), None, 0.3),
]

BATCHED = [
    case(aten.linalg_cholesky_ex.default, "a", spd(5, 3, 3)),
    case(aten.linalg_cholesky_ex.default, "", spd(3, 3)),
    case(aten.cholesky.default, "a b", spd(2, 5, 3, 3)),
    case(aten.linalg_inv_ex.default, "a", spd(5, 3, 3)),
    case(aten.linalg_lu.default, "a", f(5, 3, 3)),
    case(aten.linalg_lu_factor_ex.default, "a", f(5, 3, 3)),
    case(aten.linalg_ldl_factor_ex.default, "a", plain(5, 3, 3)),
    case(aten.linalg_qr.default, "a b", f(2, 5, 4, 3)),
    case(aten.geqrf.default, "a", plain(5, 4, 3)),
    case(aten.linalg_eig.default, "a", plain(5, 3, 3)),
    case(aten._linalg_eigh.default, "a", spd(5, 3, 3)),
    case(aten._linalg_svd.default, "a", f(5, 4, 3)),
    case(aten._linalg_det.default, "a", f(5, 3, 3)),
    case(aten._linalg_slogdet.default, "a", f(5, 3, 3)),
    case(aten.linalg_matrix_exp.default, "a", f(5, 3, 3)),
    case(aten._linalg_solve_ex.default, "a", spd(5, 3, 3), f(5, 3, 4)),
    case(aten._linalg_solve_ex.default, "a", spd(5, 3, 3), f(5, 3)),
    case(aten.linalg_solve_triangular.default, "b a c", spd(5, 3, 3), f(4, 1, 3, 5), upper=True),
    case(aten.linalg_solve_triangular.default, "a c", spd(5, 3, 3), f(5, 2, 3), upper=True, left=False),
    case(aten.triangular_solve.default, "a", f(5, 3, 2), spd(5, 3, 3)),
    case(aten.cholesky_solve.default, "a c", f(5, 3, 2), spd(5, 3, 3)),
    case(aten.cholesky_solve.default, "a c", f(5, 4, 3), spd(4, 4)),
    case(aten.linalg_lu_solve.default, "a c", spd(5, 3, 3), T((5, 3), "pivots"), f(5, 3, 2)),
    case(aten.linalg_lu_solve.default, "a c", spd(5, 3, 3), T((5, 3), "pivots"), f(5, 2, 3), left=False),
    case(aten.linalg_ldl_solve.default, "a", plain(5, 2, 2), T((5, 2), "pivots"), plain(5, 2, 2)),
    case(aten.linalg_householder_product.default, "a", f(5, 4, 3), f(5, 3)),
    case(aten.ormqr.default, "a c", f(5, 4, 3), f(5, 3), f(5, 4, 2)),
    case(aten.lu_unpack.default, "a", f(5, 3, 3), T((5, 3), "pivots")),
    case(aten.linalg_pinv.atol_rtol_tensor, "a", f(5, 4, 3)),
    case(aten.cdist.default, "_0 m n", f(3, 5, 2), f(3, 4, 2)),
    case(aten.cdist.default, "m n", f(5, 2), f(4, 2), 1.0),
    case(aten.linalg_cross.default, "a", f(5, 3), f(1, 3)),
    *(
        case(getattr(aten, f"upsample_{how}1d").default, "a b", f(2, 5, 4), *said)
        for how, said in (("nearest", ([6],)), ("linear", ([6], True)))
    ),
    *(
        case(getattr(aten, f"upsample_{how}1d").vec, "a b", f(2, 5, 4), *said, [1.5])
        for how, said in (("nearest", (None,)), ("linear", (None, True)))
    ),
    *(
        case(getattr(aten, f"_upsample_nearest_exact{n}d").default, "a b", f(3, 5, *[4] * n), [6] * n)
        for n in (1, 2, 3)
    ),
    *(
        case(getattr(aten, f"_upsample_nearest_exact{n}d").vec, "a b", f(3, 5, *[2] * n), None, [2.0] * n)
        for n in (1, 2, 3)
    ),
    *(case(getattr(aten, f"upsample_nearest{n}d").default, "a b", f(3, 5, *[2] * n), [3] * n) for n in (2, 3)),
    *(case(getattr(aten, f"upsample_nearest{n}d").vec, "a b", f(3, 5, *[2] * n), None, [2.0] * n) for n in (2, 3)),
    *(
        case(getattr(aten, f"{how}2d{tail}").default, "a b", f(3, 5, 4, 2), [3, 3], False)
        for how in ("upsample_bilinear", "upsample_bicubic")
        for tail in ("",)
    ),
    *(
        case(getattr(aten, how).default, "a b", f(3, 5, 4, 2), [3, 3], False)
        for how in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    ),
    *(
        case(getattr(aten, how).vec, "a b", f(3, 5, 4, 2), [3, 3], False, None)
        for how in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    ),
    case(aten.upsample_trilinear3d.default, "a b", f(3, 5, 2, 2, 2), [3, 3, 3], True),
    case(aten.upsample_trilinear3d.vec, "a b", f(3, 5, 2, 2, 2), [3, 3, 3], True, None),
    case(aten.max_pool2d_with_indices.default, "a b", f(3, 5, 4, 4), [2, 2]),
    case(aten.max_pool2d_with_indices.default, "a", f(5, 4, 4), [2, 2]),
    case(aten.max_pool3d_with_indices.default, "a b", f(2, 5, 2, 4, 4), [2, 2, 2]),
    case(aten.adaptive_max_pool2d.default, "a b", f(3, 5, 5, 4), [2, 3]),
    case(aten.adaptive_max_pool3d.default, "a", f(5, 3, 4, 4), [2, 2, 3]),
    case(aten.max_unpool2d.default, "a b", f(2, 5, 1, 1), T((2, 5, 1, 1), "int", 4), [2, 2]),
    case(
        aten.max_unpool3d.default,
        "a b",
        f(3, 5, 1, 1, 1),
        T((3, 5, 1, 1, 1), "int", 8),
        [2, 2, 2],
        [2, 2, 2],
        [0, 0, 0],
    ),
    case(
        aten.fractional_max_pool2d.default, "a b", f(3, 5, 6, 6), [2, 2], [3, 3], T((3, 5, 2), "positive", grad=False)
    ),
    case(
        aten.fractional_max_pool3d.default,
        "a b",
        f(2, 5, 4, 4, 4),
        [2] * 3,
        [2] * 3,
        T((2, 5, 3), "positive", grad=False),
    ),
    case(aten.grid_sampler_2d.default, "n c", f(3, 5, 4, 4), f(3, 2, 3, 2), 0, 0, False),
    case(aten.grid_sampler_3d.default, "n c", f(2, 5, 3, 4, 4), f(2, 2, 3, 2, 3), 0, 1, True),
    case(aten.im2col.default, "c n", f(3, 5, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    case(aten.im2col.default, "c", f(5, 4, 4), [2, 2], [1, 1], [1, 0], [2, 2]),
    case(aten.col2im.default, "c n", f(3, 20, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    case(aten._fft_r2c.default, "a c", f(5, 8, 3), [1], 0, True),
    case(aten._fft_c2c.default, "a", c(5, 4, 3), [1, 2], 1, False),
    case(aten._fft_c2r.default, "a", c(5, 4), [1], 0, 6),
]

CASES = [
    *BATCHED, *LINEAR_ALGEBRA, *CONVOLUTIONS, *CREATION, *INDEXING, *NORMALIZATION, *LOSSES, *POINTWISE, *RANDOM,
    *REDUCTIONS, *SHAPES, *ATTENTION,
]  # fmt: skip
"""All cases."""
