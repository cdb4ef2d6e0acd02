"""Convolutions and pooling: batch and channels split, space stays whole (a split would need its neighbours' edges)."""

from __future__ import annotations

from typing import Any

import torch

from torchshard.notation import Local, Row
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
        return call.row(f"{spaced(*operands)} -> {spaced(['n', 'o', *os])}", linear=linear)
    sizes = {"g": groups, "i": x[1] // groups, "o": weight[0] // groups}
    operands = [["n", "(g !i)", *hs], ["(g !o)", "!i", *ks], *([["(g !o)"]] if biased else [])]

    def local(ctx: Local, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
              dilation: Any = 1, groups: int = 1) -> Any:  # fmt: skip
        return call.target(x, weight, bias, stride, padding, dilation, ctx.size("g"))

    return call.row(f"{spaced(*operands)} -> {spaced(['n', '(g !o)', *os])}", sizes=sizes, local={"g": local})


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
    return call.row(f"{spaced([*lead, *hs])} -> {spaced([*lead, *os])}")
