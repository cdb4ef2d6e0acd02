"""Calls of ops that compute each element by itself."""

from __future__ import annotations

import re

import torch

from tests.op_cases.notation import apart, case, f, flags, ids, plain, pos
from tests.oracle import Case, T

aten = torch.ops.aten
_SPECIAL = [name for name in dir(aten) if name.startswith("special_")]
UNTAGGED = [getattr(aten, name).default for name in _SPECIAL if re.search("polynomial|bessel|airy", name)]
"""Special functions that PyTorch does not tag as pointwise."""

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
