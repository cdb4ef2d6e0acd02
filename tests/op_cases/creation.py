"""Calls of ops that create tensors from sizes and numbers."""

from __future__ import annotations

import torch

from tests.op_cases.notation import case
from tests.oracle import Case

aten = torch.ops.aten

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
