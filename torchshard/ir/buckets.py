"""Buckets for gradients: the dtype in which ranks sum them, and which ones share a message.

The gradient of a cast, such as autocast inserts for each weight, is summed in the parameter's
dtype if that is wider.

A parameter used on slices, such as a norm's weight on slices of a sequence, has a partial gradient
on each rank. Small messages are bound by latency, so a layer's small gradients are sent together
while backward runs the preceding layer (DDP's buckets; S. Li et al., PyTorch Distributed, 2020,
3.2.3). Likewise, slices of a layer's small weights are gathered together and their gradients
scattered together (unlike FSDP2, which groups large weights too).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import fx

from torchshard.core.layouts import I
from torchshard.core.paths import layer_of
from torchshard.ir.graph import before_casts, global_shape

BUCKETED_BYTES = 1 << 20
"""Gradients larger than this are bound by bandwidth, so they get their own message."""


class Bucket(NamedTuple):
    """The key that gradients of one message share."""

    layer: str
    """The path of the numbered module; '' outside of any."""
    dtype: torch.dtype
    """The dtype of the summed gradients."""
    gathered: torch.dtype | None = None
    """The dtype in which the parameters are gathered, if each rank stores slices of them."""


def summed_dtype(value: fx.Node) -> torch.dtype:
    """Returns the dtype in which the ranks sum the gradient of a value."""
    dtype: torch.dtype = value.meta["val"].dtype
    source = before_casts(value)
    if not _is_parameter(source) or not dtype.is_floating_point:
        return dtype
    return max(dtype, source.meta["val"].dtype, key=lambda each: each.itemsize)


def bucket_of(value: fx.Node) -> Bucket | None:
    """Returns the bucket of a parameter's gradient, or its cast's; None for a separate message."""
    source = before_casts(value)
    if not _is_parameter(source) or _whole_bytes(source) > BUCKETED_BYTES:
        return None
    layer, is_sliced = layer_of(source.meta["path"]) or "", source.meta.get("layouts", (I,)) != (I,)
    if is_sliced and not layer:  # one bucket would keep them gathered from the first op to the last
        return None
    return Bucket(layer, summed_dtype(value), value.meta["val"].dtype if is_sliced else None)


def _whole_bytes(source: fx.Node) -> int:
    return math.prod(global_shape(source)) * int(source.meta["val"].dtype.itemsize)


def _is_parameter(source: fx.Node) -> bool:
    return source.op == "placeholder" and bool(source.meta["kind"] == "parameter")
