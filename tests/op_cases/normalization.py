"""Calls of softmax, norms of layers, groups and batches."""

from __future__ import annotations

from typing import Any

import torch

from tests.op_cases.notation import buffer, case, f, ids, plain
from tests.oracle import Case

aten = torch.ops.aten
native, instance = aten.native_batch_norm.default, aten.instance_norm.default


def batch_norm(splits: str, *args: Any) -> Case:
    """Input, weight, bias, running mean and variance, whether in training."""
    return case(aten.batch_norm.default, splits, *args, 0.3, 1e-5, False)


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
