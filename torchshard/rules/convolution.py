"""Convolutions and pooling: batch and channels are splittable.

Spatial dims are not: a rank would need the edges of its neighbours' slices (a halo exchange).
"""

from __future__ import annotations

import torch

from torchshard.core.rows import Local, LocalFn, Row
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.rules.empty import anywhere, append_zeros, cut_to_empty, padded_if_empty
from torchshard.rules.registry import Call, rule, spaced

aten = torch.ops.aten


CONVOLUTIONS = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
)  # fmt: skip
"""Convolutions that are not transposed."""


@rule(*CONVOLUTIONS, aten.convolution.default)
def convolution(call: Call) -> Row | None:
    """`f32[2,3,9,9], f32[8,3,3,3] -> f32[2,8,7,7]     n c !h0 !h1, o c !k0 !k1 -> n o !z0 !z1`; groups split too.

    A transposed convolution has its weight's dims swapped: `c o !k0 !k1`. With a bias c is
    unsplittable, because each rank would add the whole bias to its partial sum.
    """
    x, weight, groups = call["input"].shape, call["weight"].shape, call["groups"]
    space = len(weight) - 2
    biased, transposed = call.args.get("bias") is not None, call.target is aten.convolution.default
    # aten.convolution's rule is only for transposed convolutions; others are captured as conv1d,
    # conv2d, conv3d
    if not all(isinstance(s, int) for s in weight) or transposed != bool(call.args.get("transposed")):
        return None
    batch = ["n"] if len(x) == len(weight) else []
    hs, ks, zs = ([f"!{c}{i}" for i in range(space)] for c in "hkz")
    if groups == 1:
        sizes, channel, out = {}, "!c" if biased else "c", "o"
        kernel = [channel, out] if transposed else [out, channel]
    else:
        sizes = {"g": groups, "i": x[len(batch)] // groups, "o": call.results[0].shape[len(batch)] // groups}
        channel, out = "(g !i)", "(g !o)"
        kernel = [channel, "!o"] if transposed else [out, "!i"]
    operands = [[*batch, channel, *hs], [*kernel, *ks], *([[out]] if biased else [])]
    local = padded_if_empty(call) if groups == 1 else _own_groups(call, len(batch))
    return call.row(
        f"{spaced(*operands)} -> {spaced([*batch, out, *zs])}",
        sizes=sizes,
        linear=() if biased else ({0}, {1}),
        local={"*": local},
        any_size=batch,
    )


def _own_groups(call: Call, channel: int) -> LocalFn:
    """Returns a replacement that convolves this rank's groups: their number is an argument of the op.

    A rank without groups convolves zeros.

    Args:
        channel: the dim of the channels in the input and in the result.
    """
    dims = {"input": channel, "weight": 0, "bias": 0}
    shapes = {name: call.args[name].shape for name in dims if call.args.get(name) is not None}

    def local(ctx: Local, *args: Argument, **kwargs: Argument) -> Traced:
        bound, own_groups = call.bound(args, kwargs), ctx.size("g")
        if own_groups:
            return call.target(**bound | {"groups": own_groups})
        for name, shape in shapes.items():
            width = shape[dims[name]] // call["groups"]
            bound[name] = append_zeros(bound[name], dims[name], len(shape), width)
        return cut_to_empty(call.target(**bound | {"groups": 1}), channel)

    return local


@rule(
    aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default,
    aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
)  # fmt: skip
def pooling(call: Call) -> Row:
    """`f32[2,8,9,9] -> f32[2,8,4,4]     a b !h0 !h1 -> a b !z0 !z1`."""
    ndim = len(call.tensors[0].shape)
    space = int(str(call.target).split("pool")[1][0])  # aten.max_pool2d: 2
    lead = list("ab")[: ndim - space]
    hs, os = ([f"!{c}{i}" for i in range(space)] for c in "hz")
    return call.row(f"{spaced([*lead, *hs])} -> {spaced([*lead, *os])}", **anywhere(call))
