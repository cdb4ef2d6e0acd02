"""The calls that the oracle runs: every op with a rule, in sizes that divide by the ranks and sizes that don't.

Sizes are 5, 7, 4, 6, 3, 2 and 1: with 2 and 3 ranks that is even, uneven, and ranks with nothing. `splits` are the
axes that a case's row allows to be split, as a person who knows the op would list them.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.oracle import Case, T
from torchshard.layouts import S

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


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


def case(target: Any, *args: Any, splits: str | None = None, hints: tuple[Any, ...] = (), **kwargs: Any) -> Case:
    return Case(target, args, kwargs, splits, hints)


LINEAR_ALGEBRA = [
    case(aten.mm.default, f(5, 7), f(7, 4)),
    case(aten.mm.default, f(1, 6), f(6, 1)),
    case(aten.bmm.default, f(4, 5, 2), f(4, 2, 7)),
    case(aten.mv.default, f(5, 7), f(7)),
    case(aten.dot.default, f(7), f(7)),
    case(aten.outer.default, f(5), f(4)),
    case(aten.linear.default, f(2, 5, 7), f(4, 7)),
    case(aten.linear.default, f(2, 5, 7), f(4, 7), f(4)),
    case(aten.linear.default, f(7), f(5, 7)),
    case(aten.linear.default, f(5, 56), f(4, 56), hints=((0, S(1, ((7, 8),))), (0, S(1, ((2, 8), (5, 8)))))),
    case(aten.matmul.default, f(5, 7), f(7, 4)),
    case(aten.matmul.default, f(7), f(7)),
    case(aten.matmul.default, f(7), f(3, 7, 5)),
    case(aten.matmul.default, f(3, 5, 7), f(7)),
    case(aten.matmul.default, f(2, 1, 5, 3), f(4, 3, 2)),
    case(aten.matmul.default, f(5, 3), f(4, 3, 2)),
    case(aten.matmul.default, f(1, 5, 3), f(4, 3, 1)),
    case(aten.einsum.default, "bqd, bkd -> bqk", [f(3, 5, 2), f(3, 4, 2)]),
    case(aten.einsum.default, "ij->i", [f(5, 7)]),
    case(aten.einsum.default, "ij,j,jk->ki", [f(5, 3), f(3), f(3, 4)]),
    case(aten.einsum.default, "...i,ij->...j", [f(2, 5), f(5, 3)], splits="none"),
    case(aten.einsum.default, "ii->i", [f(5, 5)], splits="none"),
    case(aten.einsum.default, "ij,ij->ij", [f(5, 1), f(5, 3)], splits="none"),
]

CONVOLUTIONS = [
    case(aten.conv1d.default, f(3, 4, 7), f(5, 4, 3)),
    case(aten.conv1d.default, f(3, 4, 7), f(5, 4, 3), f(5), [2], [1]),
    case(aten.conv2d.default, f(2, 3, 5, 6), f(4, 3, 3, 3), None, [1, 2], [1, 0]),
    case(aten.conv2d.default, f(2, 6, 5, 5), f(9, 2, 3, 3), f(9), [1, 1], [1, 1], [1, 1], 3),
    case(aten.conv2d.default, f(2, 5, 4, 4), f(5, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 5),
    case(aten.conv3d.default, f(2, 3, 3, 4, 3), f(4, 3, 2, 2, 2)),
    case(aten.conv1d.padding, f(3, 4, 7), f(5, 4, 3), f(5), [1], "same"),
    case(aten.conv2d.padding, f(2, 4, 5, 5), f(4, 2, 3, 3), None, [1, 1], "same", [2, 1], 2),
    case(aten.conv3d.padding, f(2, 2, 3, 3, 3), f(5, 2, 2, 2, 2), None, [1, 1, 1], "valid"),
    case(aten.conv2d.default, f(3, 5, 5), f(4, 3, 3, 3), splits="none"),
    case(aten.max_pool1d.default, apart(2, 5, 7), [2]),
    case(aten.max_pool2d.default, apart(2, 5, 6, 6), [2, 3], [1, 2], [1, 1]),
    case(aten.max_pool3d.default, apart(2, 3, 4, 4, 4), [2, 2, 2]),
    case(aten.max_pool2d.default, apart(5, 6, 6), [2, 2]),
    case(aten.avg_pool1d.default, f(2, 5, 7), [3], [2], [1]),
    case(aten.avg_pool2d.default, f(2, 5, 6, 6), [2, 2], [2, 2], [1, 1], False, False),
    case(aten.avg_pool3d.default, f(2, 3, 4, 4, 4), [2, 2, 2]),
    case(aten.adaptive_avg_pool1d.default, f(2, 5, 7), [3]),
    case(aten.adaptive_avg_pool2d.default, f(2, 5, 6, 7), [3, 1]),
    case(aten.adaptive_avg_pool3d.default, f(2, 3, 4, 4, 4), [1, 2, 3]),
]

CREATION = [
    case(aten.arange.default, 5),
    case(aten.arange.start, 2, 7),
    case(aten.arange.start_step, 1, 9, 3, dtype=torch.float64),
    case(aten.zeros.default, [5, 2]),
    case(aten.ones.default, [5], dtype=torch.float64),
    case(aten.full.default, [3, 4], 2.5, dtype=torch.float64),
    Case(aten.empty.memory_format, ([5, 2],), values=False),
    case(aten.scalar_tensor.default, 2.0, dtype=torch.float64),
    case(aten.eye.default, 5, dtype=torch.float64),
    case(aten.eye.m, 5, 3, dtype=torch.float64),
    case(aten.linspace.default, 0, 1, 5, dtype=torch.float64),
    case(aten.rand.default, [5, 2], dtype=torch.float64),
    case(aten.randn.default, [5, 2], dtype=torch.float64),
    case(aten.randint.default, 9, [5, 2]),
    case(aten.randint.low, 3, 9, [5]),
]

INDEXING = [
    case(aten.embedding.default, f(7, 4), ids(7, 3, 5)),
    case(aten.embedding.default, f(5, 4), ids(5, 6), 3),
    case(aten.embedding.default, f(5, 3), ids(5, 7), 0),
    case(aten.embedding.default, f(5, 3), ids(5), 4),
    case(aten.embedding.default, f(1, 3), ids(1, 4)),
    case(aten.embedding.default, f(5, 3), ids(3, 7), -1, True),
    case(aten.index_select.default, f(5, 7), 0, ids(5, 3)),
    case(aten.index_select.default, f(4, 2, 7), -1, ids(7, 5)),
    case(aten.index_select.default, f(2, 5), 1, ids(5)),
    case(aten.index_select.default, ids(9, 5, 2), 0, ids(5, 3)),
    case(aten.gather.default, f(5, 7), 1, ids(7, 5, 3)),
    case(aten.gather.default, f(5, 7), 0, ids(5, 2, 4)),
    case(aten.gather.default, f(5, 4, 2), -2, ids(4, 5, 6, 2)),
    case(aten.gather.default, f(5), 0, ids(5)),
    case(aten.gather.default, f(1, 3), 0, ids(1, 4, 3)),
    case(aten.index.Tensor, f(5, 4, 3), [None, ids(4, 6)]),
    case(aten.index.Tensor, f(5, 4, 3), [ids(5, 2, 7), None, None]),
    case(aten.index.Tensor, f(5, 4, 3), [ids(5, 7, 1), ids(4, 6)]),
    case(aten.index.Tensor, f(5, 4, 3), [ids(5, 6), None, ids(3, 1)]),
]

NORMALIZATION = [
    case(aten.softmax.int, f(5, 7, 2), 1),
    case(aten.softmax.int, f(5, 1), -1),
    case(aten.softmax.int, ids(9, 4, 5), -1, torch.float64),
    case(aten.log_softmax.int, f(5, 7), -1),
    case(aten.log_softmax.int, f(2, 3), 0),
    case(aten.softmax.int, f(), 0),
    case(aten.layer_norm.default, f(2, 5, 4), [4], f(4), f(4)),
    case(aten.layer_norm.default, f(3, 5, 2), [5, 2]),
    case(aten.layer_norm.default, f(5, 7), [7], f(7), None, 1e-3),
    case(aten.rms_norm.default, f(2, 5, 4), [4], f(4)),
    case(aten.rms_norm.default, f(5, 7), [7]),
    case(aten.group_norm.default, f(2, 6, 5), 3, f(6), f(6)),
    case(aten.group_norm.default, f(3, 5, 2, 2), 5),
    case(aten.group_norm.default, f(3, 4), 2, f(4), f(4)),
    case(aten.batch_norm.default, f(5, 4, 3), f(4), f(4), None, None, True, 0.1, 1e-5, False),
    case(aten.batch_norm.default, f(5, 7), f(7), f(7), buffer("normal", 7), buffer("positive", 7), True, 0.1, 1e-5,
         False),
    case(aten.batch_norm.default, f(4, 2, 3, 2), None, None, buffer("normal", 2), buffer("positive", 2), True, 0.3, 1e-5,
         False),
    case(aten.batch_norm.default, f(5, 4, 3), f(4), f(4), buffer("normal", 4), buffer("positive", 4), False, 0.1, 1e-5,
         False),
]  # fmt: skip

LOSSES = [
    *(
        case(target, apart(5, 7), f(5, 7), reduction)
        for target in (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
        )
        for reduction in (NONE, MEAN, SUM)
    ),
    case(aten.mse_loss.default, f(7), f(7)),
    case(aten.mse_loss.default, f(3, 1), f(3, 4), splits="none"),
    case(aten.smooth_l1_loss.default, f(5, 3), f(5, 3), MEAN, 0.3),
    case(aten.huber_loss.default, f(5, 3), f(5, 3), MEAN, 0.3),
    case(aten.binary_cross_entropy_with_logits.default, f(5, 3), pos(5, 3)),
    case(aten.binary_cross_entropy_with_logits.default, f(5, 3), pos(5, 3), plain(5, 3), None, NONE),
    case(aten.binary_cross_entropy_with_logits.default, f(5, 3), pos(5, 3), None, plain(5, 3), SUM),
    case(aten.binary_cross_entropy_with_logits.default, f(5, 3), pos(5, 3), None, plain(3), SUM, splits="none"),
    case(aten.cross_entropy_loss.default, f(5, 7), ids(7, 5)),
    case(aten.cross_entropy_loss.default, f(5, 7), ids(7, 5), None, NONE),
    case(aten.cross_entropy_loss.default, f(6, 4), ids(4, 6), plain(4), MEAN),
    case(aten.cross_entropy_loss.default, f(6, 4), ids(4, 6), None, SUM, 2, 0.1),
    case(aten.cross_entropy_loss.default, f(6, 4), ids(4, 6), T((4,), "positive", grad=False), MEAN, 2, 0.3),
    case(aten.cross_entropy_loss.default, f(6, 5), ids(5, 6), T((5,), "positive", grad=False), NONE, 0, 0.2),
    case(aten.cross_entropy_loss.default, f(6, 5), ids(5, 6), None, MEAN, -100, 0.2),
    case(aten.cross_entropy_loss.default, f(3, 5, 4), ids(5, 3, 4), None, MEAN, 1),
    case(aten.cross_entropy_loss.default, f(3, 5, 4), ids(5, 3, 4), T((5,), "positive", grad=False), NONE),
    case(aten.cross_entropy_loss.default, f(7), ids(7)),
    case(aten.cross_entropy_loss.default, f(5, 1), ids(1, 5)),
    case(aten.cross_entropy_loss.default, f(5, 4), pos(5, 4), splits="none"),
]

POINTWISE = [
    case(aten.add.Tensor, f(5, 7), f(5, 7)),
    case(aten.add.Tensor, f(5, 7), f(7)),
    case(aten.add.Tensor, f(5, 1), f(1, 4), alpha=2),
    case(aten.add.Tensor, f(5), 2.0),
    case(aten.sub.Tensor, f(5, 1), f(3, 1, 4), alpha=3),
    case(aten.mul.Tensor, f(2, 5, 1), f(4)),
    case(aten.mul.Tensor, f(5, 7), f()),
    case(aten.mul.Tensor, f(5), 3.0),
    case(aten.div.Tensor, f(5, 7), pos(7)),
    case(aten.div.Tensor_mode, f(5, 7), pos(7), rounding_mode="floor"),
    case(aten.mul.Scalar, f(5, 2), 3.0),
    case(aten.div.Scalar, f(5, 2), 3.0),
    case(aten.neg.default, f(5, 1)),
    case(aten.where.self, flags(5, 1), f(5, 7), f(7)),
    case(aten.where.ScalarOther, flags(5, 7), f(5, 7), 0.0),
    case(aten.where.ScalarSelf, flags(5, 7), 2.0, f(7)),
    case(aten.where.Scalar, flags(5, 7), 1.0, 0.0),
    case(aten.rsub.Tensor, f(5, 3), f(3)),
    case(aten.floor_divide.default, plain(5, 3), T((3,), "positive", grad=False)),
    case(aten.floor_divide.Scalar, ids(9, 5), 2),
    case(aten.hardswish.default, f(5, 3)),
    case(aten.log_sigmoid.default, f(5, 3)),
    case(aten.gelu.default, f(5, 7), approximate="tanh"),
    case(aten.silu.default, f(4, 6)),
    case(aten.relu.default, apart(5, 7)),
    case(aten.tanh.default, f(1)),
    case(aten.exp.default, f(2, 1, 5)),
    case(aten.rsqrt.default, pos(5)),
    case(aten.pow.Tensor_Scalar, f(5, 2), 3),
    case(aten.pow.Tensor_Tensor, pos(5, 2), f(2)),
    case(aten.clamp.default, f(5, 3), -0.5, 0.5),
    case(aten.masked_fill.Scalar, f(2, 5, 3), flags(5, 1), -1e9),
    case(aten.masked_fill.Tensor, f(5, 3), flags(5, 3), f()),
    case(aten.addcmul.default, f(5, 3), f(3), f(5, 1), value=2),
    case(aten.lerp.Tensor, f(5, 3), f(5, 3), pos(3)),
    case(aten.maximum.default, f(5, 3), f(3)),
    case(aten.eq.Tensor, ids(3, 5, 4), ids(3, 4)),
    case(aten.lt.Scalar, f(5), 0.0),
    case(aten.logical_not.default, flags(5, 3)),
    case(aten.bitwise_and.Tensor, flags(5, 3), flags(5, 3)),
    case(aten.sigmoid.default, f()),
    case(aten.clone.default, f(5, 7)),
    case(aten.clone.default, f(5, 2, 3, 3), memory_format=torch.channels_last),
    case(aten.contiguous.default, f(5, 1)),
    case(aten.alias.default, f(4, 3)),
    case(aten.lift_fresh_copy.default, f(5)),
    case(aten.detach.default, f(5, 7)),
    case(aten.detach_.default, plain(5, 7)),
    case(aten.to.dtype, f(5, 3), torch.float32),
    case(aten.to.dtype, ids(9, 5), torch.float64),
    case(aten.to.device, f(5, 3), torch.device("cpu"), torch.float32, False, True),
    case(aten.to.dtype_layout, f(5, 3), dtype=torch.float32),
    case(aten.to.other, f(5, 3), T((5, 3), grad=False)),
    case(aten.to.other, f(5, 3), ids(3, 4)),
    case(aten._to_copy.default, f(5, 1), dtype=torch.float32),
    case(aten.type_as.default, ids(9, 5, 3), plain(5, 3)),
    case(aten.type_as.default, ids(9, 5, 3), plain()),
    case(aten.type_as.default, ids(9, 5, 3), plain(7)),
    case(aten.bernoulli.default, T((5, 7), "positive", grad=False)),
    case(aten.zeros_like.default, f(5, 7)),
    case(aten.ones_like.default, f(5, 1), dtype=torch.float32),
    case(aten.full_like.default, f(4, 3), 2.5),
    Case(aten.empty_like.default, (f(5, 7),), values=False),
]

RANDOM = [
    case(aten.dropout.default, f(5, 7, 2), 0.4, True),
    case(aten.dropout.default, f(4, 6), 0.4, True, hints=((0, S(1, ((1, 2), (2, 2)))),)),
    case(aten.dropout.default, f(5, 7), 0.4, False),
    case(aten.dropout.default, f(5, 1), 0.0, True),
]

REDUCTIONS = [
    case(aten.sum.default, f(5, 7)),
    case(aten.sum.default, flags(5, 7)),
    case(aten.sum.dim_IntList, f(2, 5, 7), [1]),
    case(aten.sum.dim_IntList, f(5, 4), [-1], True),
    case(aten.sum.dim_IntList, f(5, 4), []),
    case(aten.sum.dim_IntList, f(5, 1), None, dtype=torch.float64),
    case(aten.mean.default, f(5, 7)),
    case(aten.mean.default, f()),
    case(aten.mean.dim, f(2, 5, 7), [1, 2]),
    case(aten.mean.dim, f(5, 4), [-1], True),
    case(aten.mean.dim, f(5, 4), []),
    case(aten.mean.dim, ids(9, 5, 4), [0], dtype=torch.float64),
    case(aten.amax.default, apart(5, 7), [0]),
    case(aten.amax.default, apart(5, 7), []),
    case(aten.amin.default, apart(2, 5, 3), [0, -1], True),
    case(aten.max.dim, apart(5, 7), -1),
    case(aten.min.dim, apart(5, 7), 0, True),
    case(aten.max.default, apart(5, 7)),
    case(aten.min.default, apart(7)),
    case(aten.argmax.default, apart(5, 7), 1),
    case(aten.argmax.default, apart(5, 7)),
    case(aten.argmin.default, apart(5, 7), -2, True),
    case(aten.any.dim, flags(5, 7), 1),
    case(aten.all.dim, flags(5, 7), 0, True),
    case(aten.any.default, flags(5, 7)),
    case(aten.all.default, flags(7)),
    case(aten.any.dims, flags(5, 2, 3), [0, 2]),
    case(aten.all.dims, flags(5, 2, 3), [-1]),
    case(aten.any.dims, flags(5, 3), []),
    case(aten.all.dims, flags(5, 3), None, True),
    case(aten.prod.dim_int, f(5, 4), 1),
    case(aten.prod.default, f(5)),
    case(aten.var.correction, f(5, 4), [1], correction=0),
    case(aten.var.correction, plain(5, 4), []),
    case(aten.std.correction, f(5, 4), None, keepdim=True),
    case(aten.var.dim, f(5, 4), [0], False, True),
    case(aten.std.dim, f(5, 4, 2), [1, 2]),
    case(aten.var_mean.correction, f(5, 4), [1], correction=1, keepdim=True),
    case(aten.logsumexp.default, f(5, 4), [1]),
    case(aten.logsumexp.default, f(5, 4), []),
    case(aten.linalg_vector_norm.default, f(5, 4), 2, [-1], True),
    case(aten.linalg_vector_norm.default, f(5, 4), 3),
    case(aten.norm.ScalarOpt_dim, f(5, 4), 2, [1]),
    case(aten.norm.ScalarOpt_dim, f(5, 4), 2, []),
    case(aten.cumsum.default, f(5, 7), 1),
    case(aten.cumprod.default, f(4, 7), -2),
    case(aten.sort.default, apart(5, 7), 0, True),
    case(aten.sort.stable, apart(5, 7), stable=True, dim=1, descending=False),
    case(aten.argsort.default, apart(5, 7)),
    case(aten.argsort.stable, apart(5, 7), stable=True, dim=0),
    case(aten.cummax.default, apart(5, 7), 1),
    case(aten.cummin.default, apart(5, 4), -2),
    case(aten.logcumsumexp.default, f(5, 4), 1),
    case(aten.cumsum.default, f(), 0),
    case(aten.topk.default, apart(5, 7), 3),
    case(aten.topk.default, apart(5, 7), 2, 0, False),
]

SHAPES = [
    case(aten.view.default, f(2, 5, 12), [2, 5, 3, 4]),
    case(aten.view.default, f(2, 5, 14), [-1, 7, 2], hints=((0, S(2, ((7, 2),))), (0, S(2, ((2, 2), (5, 2)))))),
    case(aten.view.default, f(7, 4, 1), [28, 1]),
    case(aten.reshape.default, f(5, 4, 3), [5, 12]),
    case(aten.reshape.default, f(6, 4), [3, 8]),
    case(aten.reshape.default, f(5, 3), [3, 5]),
    case(aten.reshape.default, f(1, 5), [5]),
    case(aten.reshape.default, f(1, 1), []),
    case(aten._unsafe_view.default, f(5, 6), [5, 2, 3]),
    case(aten.view.default, f(2, 9, 4), [2, 9, 2, 2], hints=((0, S(1, ((4, 1), (3, 1), (2, 1)))),)),
    case(aten.unsqueeze.default, f(5, 4), 1),
    case(aten.unsqueeze.default, f(5), -1),
    case(aten.squeeze.default, f(5, 1, 4)),
    case(aten.squeeze.dim, f(5, 1, 4), 1),
    case(aten.squeeze.dim, f(5, 2), 1),
    case(aten.squeeze.dims, f(3, 1, 2, 1), [1, -1, 0]),
    case(aten.flatten.using_ints, f(2, 5, 4), 1, 2),
    case(aten.flatten.using_ints, f(5, 3)),
    case(aten.unflatten.int, f(2, 12), 1, [3, -1]),
    case(aten.unflatten.int, f(10, 3), 0, [5, 2]),
    case(aten.permute.default, f(2, 5, 4), [2, 0, -2]),
    case(aten.transpose.int, f(2, 5, 4), -1, 1),
    case(aten.transpose.int, f(), 0, -1),
    case(aten.t.default, f(5, 4)),
    case(aten.t.default, f(5)),
    case(aten.mT.default, f(2, 5, 4)),
    case(aten.numpy_T.default, f(5, 4, 3)),
    case(aten.movedim.int, f(2, 5, 4), 0, -1),
    case(aten.movedim.intlist, f(2, 5, 4), [2, 0], [0, 1]),
    case(aten.expand.default, f(2, 1, 4), [2, 5, -1]),
    case(aten.expand.default, f(5), [3, 5]),
    case(aten.expand.default, f(1, 1), [1, 7]),
    case(aten.expand_as.default, f(1, 4), plain(5, 4)),
    case(aten.expand_as.default, f(4), plain(5, 4)),
    case(aten.repeat.default, f(5, 4), [1, 3]),
    case(aten.repeat.default, f(5, 4), [2, 3, 1]),
    case(aten.repeat.default, f(5, 1), [1, 3]),
    case(aten.repeat_interleave.self_int, f(5, 4), 3, 1),
    case(aten.repeat_interleave.self_int, f(3, 5), 2, 0),
    case(aten.repeat_interleave.self_int, f(3, 5), 2, splits="none"),
    case(aten.slice.Tensor, f(5, 9), 1, 3, 6),
    case(aten.slice.Tensor, f(5, 9), 1, 0, 4),
    case(aten.slice.Tensor, f(5, 9), -1, -4, 100),
    case(aten.slice.Tensor, f(7, 2), 0, 0, 7),
    case(aten.slice.Tensor, f(7, 2), 0, 1, 7, 2),
    case(aten.slice.Tensor, f(7, 2), 0, 3, 3),
    case(aten.slice.Tensor, f(5, 9)),
    case(aten.select.int, f(3, 5, 4), 1, -1),
    case(aten.select.int, f(5), 0, 2),
    case(aten.unbind.int, f(3, 5), 0),
    case(aten.unbind.int, f(5, 2), -1),
    case(aten.split.Tensor, f(5, 7), 3, 1),
    case(aten.split.Tensor, f(6, 4), 2),
    case(aten.split_with_sizes.default, f(5, 9), [2, 3, 4], -1),
    case(aten.split_with_sizes.default, f(5, 3), [3, 0], 1),
    case(aten.split.sizes, f(9, 2), [4, 5]),
    case(aten.chunk.default, f(5, 8), 2, 1),
    case(aten.chunk.default, f(7, 2), 3),
    case(aten.cat.default, [f(5, 3), f(5, 4)], 1),
    case(aten.cat.default, [f(5, 3), f(1, 3), f(2, 3)]),
    case(aten.cat.default, [f(0), f(5, 3)], 1, splits="none"),
    case(aten.stack.default, [f(5, 4), f(5, 4)], 1),
    case(aten.stack.default, [f(5), f(5), f(5)], -1),
    case(aten.roll.default, f(5, 4), [2], [1]),
    case(aten.roll.default, f(5, 4), [3]),
    case(aten.flip.default, f(5, 4), [-1]),
    case(aten.tril.default, f(3, 5, 4)),
    case(aten.tril.default, f(1, 4, 4), -1),
    case(aten.triu.default, f(5, 5), 1),
]

ATTENTION = [
    case(aten.scaled_dot_product_attention.default, f(3, 4, 5, 2), f(3, 4, 7, 2), f(3, 4, 7, 3)),
    case(aten.scaled_dot_product_attention.default, f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), None, 0.0, True),
    case(aten.scaled_dot_product_attention.default, f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), plain(4, 4)),
    case(aten.scaled_dot_product_attention.default, f(2, 5, 4, 2), f(2, 5, 3, 2), f(2, 5, 3, 2), f(2, 1, 4, 3)),
    case(aten.scaled_dot_product_attention.default, f(2, 5, 4, 2), f(2, 5, 3, 2), f(2, 5, 3, 2), f(1, 5, 4, 3)),
    case(aten.scaled_dot_product_attention.default, f(5, 4, 2), f(5, 3, 2), f(5, 3, 2), scale=0.3),
    case(aten.scaled_dot_product_attention.default, f(2, 6, 4, 2), f(2, 3, 4, 2), f(2, 3, 4, 2), enable_gqa=True),
    case(aten.scaled_dot_product_attention.default, f(2, 4, 3, 2), f(2, 1, 3, 2), f(2, 1, 3, 2), enable_gqa=True),
    case(aten.scaled_dot_product_attention.default, f(2, 4, 3, 2), f(2, 2, 3, 2), f(2, 2, 3, 2), plain(1, 4, 3, 3),
         enable_gqa=True),
    case(aten.scaled_dot_product_attention.default, f(3, 4, 5, 2), f(3, 4, 7, 2), f(3, 4, 7, 3), None, 0.3),
    case(aten.scaled_dot_product_attention.default, f(2, 3, 4, 2), f(2, 3, 4, 2), f(2, 3, 4, 2), None, 0.3, True),
    case(aten.scaled_dot_product_attention.default, f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), plain(4, 4), 0.3,
         scale=0.7),
    case(aten.scaled_dot_product_attention.default, f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), flags(2, 1, 4, 4), 0.3),
    case(aten.scaled_dot_product_attention.default, f(2, 6, 4, 2), f(2, 3, 4, 2), f(2, 3, 4, 2), None, 0.3,
         enable_gqa=True),
    case(aten.scaled_dot_product_attention.default, f(4, 2), f(3, 2), f(3, 2), None, 0.3),
]  # fmt: skip

CASES = [
    *LINEAR_ALGEBRA, *CONVOLUTIONS, *CREATION, *INDEXING, *NORMALIZATION, *LOSSES, *POINTWISE, *RANDOM, *REDUCTIONS,
    *SHAPES, *ATTENTION,
]  # fmt: skip
"""All cases."""
