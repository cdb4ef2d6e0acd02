"""Ranks that hold nothing of a split dim, for ops that refuse empty tensors (convolutions, pooling, norms).

    before    conv1d(x, weight)                               weight f32[0,3,3]: refused by PyTorch
    after     slice(conv1d(x, pad(weight)), 1, 0, 0)          f32[2,0,7]

The op runs on zeros, which are cut off its result again. All its operands stay in the graph: their collectives must
run on every rank, forward and backward.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchshard.layouts import Shard
from torchshard.notation import Local, LocalFn
from torchshard.rules.registry import Call

aten = torch.ops.aten


def filled(x: Any, dim: int, ndim: int, width: int = 1) -> Any:
    """`x` with `width` zeros behind along `dim`; None stays None."""
    return x if x is None else aten.constant_pad_nd.default(x, [0, 0] * (ndim - 1 - dim) + [0, width], 0.0)


def emptied(x: Any, dim: int) -> Any:
    """Nothing of `x` along `dim`."""
    return aten.slice.Tensor(x, dim, 0, 0)


def where_not_empty(call: Call) -> LocalFn:
    """Runs an op of one tensor, and for a rank without any of it on zeros that are cut off again."""
    ndim = len(call.tensors[0].shape)

    def local(ctx: Local, x: Any, *args: Any, **kwargs: Any) -> Any:
        source, target = ctx.choice.operands[0], ctx.choice.results[0]
        assert isinstance(source, Shard) and isinstance(target, Shard)
        if ctx.size(ctx.choice.axes[0][0]):
            return call.target(x, *args, **kwargs)
        made = call.target(filled(x, source.dim, ndim), *args, **kwargs)
        if len(call.results) == 1:
            return emptied(made, target.dim)
        return [emptied(operator.getitem(made, i), target.dim) for i in range(len(call.results))]

    return local
