"""Replacements for ops that reject empty tensors (convolutions, pooling, norms), on empty slices.

    before    conv1d(x, weight)                               weight f32[0,3,3]: rejected by PyTorch
    after     slice(conv1d(x, pad(weight)), 1, 0, 0)          f32[2,0,7]

The op runs on zeros, which are then sliced off its result. A constant empty result would be
simpler, but the operands must stay in the graph: other ranks wait for their collectives, forward
and backward.
"""

from __future__ import annotations

import math
import operator
from typing import TypedDict

import torch

from torchshard.core.layouts import Layout, Shard, Size
from torchshard.core.rows import Dim, Local, LocalFn
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.rules.registry import Call, TensorType

aten = torch.ops.aten


def append_zeros(x: Traced, dim: int, ndim: int, width: int = 1) -> Traced:
    """Appends `width` zeros to `x` along `dim`."""
    return aten.constant_pad_nd.default(x, [0, 0] * (ndim - 1 - dim) + [0, width], 0.0)


def cut_to_empty(x: Traced, dim: int) -> Traced:
    """Returns an empty slice of `x` along `dim`."""
    return aten.slice.Tensor(x, dim, 0, 0)


def padded_if_empty(call: Call) -> LocalFn:
    """Returns a replacement that runs the op itself, but on zeros if the rank's slice is empty."""

    def local(ctx: Local, *args: Argument, **kwargs: Argument) -> Traced | list[Traced]:
        factor = ctx.choice.factors[0][0]
        if factor in ctx.row.equal or ctx.size(factor):
            return call.target(*args, **kwargs)
        names = [name for name, tensor in call.args.items() if isinstance(tensor, TensorType)]
        operands = zip(names, ctx.choice.operands, ctx.row.operands, strict=False)
        sharded = [
            (name, x.dim, _width(ctx, factor, dims[x.dim])) for name, x, dims in operands if isinstance(x, Shard)
        ]
        if not all(isinstance(width, int) for _, _, width in sharded):
            return call.target(*args, **kwargs)
        bound = call.bound(args, kwargs)
        for name, dim, width in sharded:
            bound[name] = append_zeros(bound[name], dim, len(call.args[name].shape), width)
        result, layouts = call.target(**bound), ctx.choice.results
        if len(layouts) == 1:
            return _cut(result, layouts[0])
        return [_cut(operator.getitem(result, i), layout) for i, layout in enumerate(layouts)]

    return local


class Anywhere(TypedDict):
    """Some of the options of a row."""

    local: dict[str, LocalFn]
    any_size: str


def anywhere(call: Call) -> Anywhere:
    """Returns options for an op that runs unchanged on slices of any size; empty ones are padded."""
    return {"local": {"*": padded_if_empty(call)}, "any_size": "*"}


def _width(ctx: Local, factor: str, dim: Dim) -> Size:
    """Returns the elements of a dim per element of a factor: the product of factors merged with it."""
    return math.prod(ctx.row.sizes[a] for term in dim if factor in term for a in term if a != factor)


def _cut(x: Traced, layout: Layout) -> Traced:
    return cut_to_empty(x, layout.dim) if isinstance(layout, Shard) else x
