"""Calls of convolutions and pooling."""

from __future__ import annotations

import torch

from tests.op_cases.notation import apart, case, f

aten = torch.ops.aten

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
