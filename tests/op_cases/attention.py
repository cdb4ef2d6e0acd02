"""Calls of attention, with masks, dropout and grouped heads."""

from __future__ import annotations

import torch

from tests.op_cases.notation import case, f, flags, plain

aten = torch.ops.aten
sdpa = aten.scaled_dot_product_attention.default
ATTENTION = [
    case(sdpa, "a g l v", f(3, 4, 5, 2), f(3, 4, 7, 2), f(3, 4, 7, 3)),
    case(sdpa, "a g l v", f(2, 5, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), None, 0.0, True),
    case(sdpa, "a g l v", f(2, 5, 4, 2), f(2, 5, 7, 2), f(2, 5, 7, 3), None, 0.0, True),
    case(sdpa, "g r a l v", f(2, 4, 7, 2), f(2, 2, 5, 2), f(2, 2, 5, 2), None, 0.0, True, enable_gqa=True),
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
