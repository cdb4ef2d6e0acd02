"""Ranks that hold nothing of a split dim, for ops that refuse empty tensors (convolutions, pooling, norms).

    before    conv1d(x, weight)                               weight f32[0,3,3]: refused by PyTorch
    after     slice(conv1d(x, pad(weight)), 1, 0, 0)          f32[2,0,7]

The op runs on zeros, which are cut off its result again. All its operands stay in the graph: their collectives must
run on every rank, forward and backward.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from torchshard.core.layouts import Shard
from torchshard.core.notation import Dim, Local, LocalFn
from torchshard.rules.registry import Call, TensorType

aten = torch.ops.aten


def filled(x: Any, dim: int, ndim: int, width: int = 1) -> Any:
    """`x` with `width` zeros behind along `dim`; None stays None."""
    return x if x is None else aten.constant_pad_nd.default(x, [0, 0] * (ndim - 1 - dim) + [0, width], 0.0)


def emptied(x: Any, dim: int) -> Any:
    """Nothing of `x` along `dim`."""
    return aten.slice.Tensor(x, dim, 0, 0)


def where_not_empty(call: Call) -> LocalFn:
    """Runs an op, and for a rank without any of what is split on zeros that are cut off again."""

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        axis = ctx.choice.axes[0][0]
        if ctx.size(axis):
            return call.target(*args, **kwargs)
        names = [name for name, tensor in call.args.items() if isinstance(tensor, TensorType)]
        held = zip(names, ctx.choice.operands, ctx.row.operands, strict=False)
        widths = {name: (layout.dim, _width(ctx, axis, dims[layout.dim])) for name, layout, dims in held
                  if isinstance(layout, Shard)}  # fmt: skip
        if not all(isinstance(width, int) for _, width in widths.values()):
            return call.target(*args, **kwargs)
        bound = call.bound(args, kwargs)
        for name, (dim, width) in widths.items():
            bound[name] = filled(bound[name], dim, len(call.args[name].shape), width)
        made = call.target(**bound)
        cut = [r.dim if isinstance(r, Shard) else None for r in ctx.choice.results]
        if len(cut) == 1:
            return _cut(made, cut[0])
        return [_cut(operator.getitem(made, i), dim) for i, dim in enumerate(cut)]

    return local


def _width(ctx: Local, axis: str, dim: Dim) -> Any:
    """What one element of an axis is in a dim: the product of the axes that are merged with it."""
    return math.prod(ctx.row.sizes[a] for term in dim if axis in term for a in term if a != axis)


def _cut(made: Any, dim: int | None) -> Any:
    return made if dim is None else emptied(made, dim)
