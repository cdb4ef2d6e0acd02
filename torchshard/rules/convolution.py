"""Convolutions and pooling: batch and channels split, space stays whole (a split would need its neighbours' edges)."""

from __future__ import annotations

from typing import Any

import torch

from torchshard.notation import Local, Row
from torchshard.rules.empty import emptied, filled, where_not_empty
from torchshard.rules.registry import Call, rule, spaced

aten = torch.ops.aten


@rule(
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
)  # fmt: skip
def convolution(call: Call) -> Row | None:
    """`f32[2,3,9,9], f32[8,3,3,3] -> f32[2,8,7,7]     n c !h0 !h1, o c !k0 !k1 -> n o !o0 !o1`; groups split too."""
    x, weight, groups = call["input"].shape, call["weight"].shape, call["groups"]
    space = len(weight) - 2
    if len(x) != len(weight) or not all(isinstance(s, int) for s in weight):
        return None
    hs, ks, os = ([f"!{c}{i}" for i in range(space)] for c in "hkz")
    biased = call.args.get("bias") is not None
    if groups == 1:
        channel = "!c" if biased else "c"
        operands = [["n", channel, *hs], ["o", channel, *ks], *([["o"]] if biased else [])]
        linear = () if biased else ({0}, {1})
        text = f"{spaced(*operands)} -> {spaced(['n', 'o', *os])}"
        return call.row(text, linear=linear, local={"*": _local_convolution(call)})
    sizes = {"g": groups, "i": x[1] // groups, "o": weight[0] // groups}
    operands = [["n", "(g !i)", *hs], ["(g !o)", "!i", *ks], *([["(g !o)"]] if biased else [])]
    text = f"{spaced(*operands)} -> {spaced(['n', '(g !o)', *os])}"
    return call.row(text, sizes=sizes, local={"*": _local_convolution(call)})


@rule(aten.convolution.default)
def transposed_convolution(call: Call) -> Row | None:
    """`f32[2,8,4,4], f32[8,3,3,3] -> f32[2,3,6,6]     n c !h0 !h1, c o !k0 !k1 -> n o !z0 !z1`, of one group."""
    x, weight = call["input"].shape, call["weight"].shape
    if not call["transposed"] or call["groups"] != 1 or len(x) != len(weight):
        return None
    biased = call["bias"] is not None
    hs, ks, zs = ([f"!{c}{i}" for i in range(len(weight) - 2)] for c in "hkz")
    channel, out = "!c" if biased else "c", "o"
    operands = [["n", channel, *hs], [channel, out, *ks], *([[out]] if biased else [])]
    linear = () if biased else ({0}, {1})
    text = f"{spaced(*operands)} -> {spaced(['n', out, *zs])}"
    return call.row(text, linear=linear, local={"*": where_not_empty(call)})


def _local_convolution(call: Call) -> Any:
    """This rank's groups; a rank without channels (or groups of them) convolves zeros."""
    groups, weight_shape = call["groups"], call["weight"].shape
    ndim, own_out, own_in = len(weight_shape), weight_shape[0] // groups, weight_shape[1]

    def local(ctx: Local, x: Any, weight: Any, bias: Any = None, *_: Any, **__: Any) -> Any:
        axis, rest = ctx.choice.axes[0][0], (call["stride"], call["padding"], call["dilation"])
        if axis == "n" or ctx.size(axis):
            return call.target(x, weight, bias, *rest, ctx.size("g") if groups > 1 else 1)
        if axis == "c":
            return call.target(filled(x, 1, ndim), filled(weight, 1, ndim), bias, *rest, 1)
        x = filled(x, 1, ndim, own_in) if axis == "g" else x
        weight, bias = filled(weight, 0, ndim, own_out), filled(bias, 0, 1, own_out)
        return emptied(call.target(x, weight, bias, *rest, 1), 1)

    return local


@rule(
    aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default,
    aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
)  # fmt: skip
def pooling(call: Call) -> Row:
    """`f32[2,8,9,9] -> f32[2,8,4,4]     a b !h0 !h1 -> a b !z0 !z1`."""
    ndim = len(call.tensors[0].shape)
    space = int(str(call.target).split("pool")[1][0])
    lead = list("ab")[: ndim - space]
    hs, os = ([f"!{c}{i}" for i in range(space)] for c in "hz")
    return call.row(f"{spaced([*lead, *hs])} -> {spaced([*lead, *os])}", local={"*": where_not_empty(call)})
