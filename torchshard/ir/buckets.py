"""How gradients of parameters are summed over the ranks: in which dtype, and which of them in one message.

The gradient of a cast, as autocast makes one of each weight, is summed in the parameter's own dtype if that is wider.

A parameter that is used on slices, as a norm's weight on slices of a sequence, gets a part of its gradient on each
rank. A message takes as long as its latency, so small parts of a layer are sent together, while the backward of the
layer before runs (DDP's buckets; S. Li et al., PyTorch Distributed, 2020, 3.2.3). So are slices of a layer's weights
gathered together, and their gradients scattered (FSDP2's groups, but for what is large).
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
"""What is larger takes its time by its bytes."""


class Bucket(NamedTuple):
    """What is summed in one message."""

    layer: str
    """The path of the numbered module; '' for what is in none."""
    dtype: torch.dtype
    """In which gradients are summed."""
    gathered: torch.dtype | None = None
    """In which the parameters are gathered, if each rank holds slices of them."""


def summed_dtype(value: fx.Node) -> torch.dtype:
    """The dtype in which the gradient of a value is summed over the ranks."""
    dtype: torch.dtype = value.meta["val"].dtype
    source = before_casts(value)
    if not _is_parameter(source) or not dtype.is_floating_point:
        return dtype
    return max(dtype, source.meta["val"].dtype, key=lambda each: each.itemsize)


def bucket_of(value: fx.Node) -> Bucket | None:
    """The bucket of the gradient of a parameter, or of a cast of one; None for a message of its own."""
    source = before_casts(value)
    if not _is_parameter(source) or _whole_bytes(source) > BUCKETED_BYTES:
        return None
    layer, is_sliced = layer_of(source.meta["path"]) or "", source.meta.get("layouts", (I,)) != (I,)
    if is_sliced and not layer:  # from the first op to the last they would be whole
        return None
    return Bucket(layer, summed_dtype(value), value.meta["val"].dtype if is_sliced else None)


def _whole_bytes(source: fx.Node) -> int:
    return math.prod(global_shape(source)) * int(source.meta["val"].dtype.itemsize)


def _is_parameter(source: fx.Node) -> bool:
    return source.op == "placeholder" and bool(source.meta["kind"] == "parameter")
