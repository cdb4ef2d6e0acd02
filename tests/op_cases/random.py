"""Calls of dropout."""

from __future__ import annotations

import torch

from tests.op_cases.notation import case, f
from torchshard import S

aten = torch.ops.aten

RANDOM = [
    case(aten.dropout.default, "_2 _1 _0", f(5, 7, 2), 0.4, True),
    case(aten.dropout.default, "_1 _0", f(4, 6), 0.4, True, hints=((0, S(1, ((1, 2), (2, 2)))),)),
    case(aten.dropout.default, "_1 _0", f(5, 7), 0.4, False),
    case(aten.dropout.default, "_1", f(5, 1), 0.0, True),
    case(aten.feature_dropout.default, "a b c", f(4, 5, 3), 0.4, True),
    case(aten.feature_dropout.default, "a b", f(5, 4), 0.4, False),
    case(aten.feature_dropout.default, "a b c d", f(2, 6, 1, 3), 0.4, True, hints=((0, S(1, ((1, 2), (2, 2)))),)),
]
