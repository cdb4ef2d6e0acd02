"""How gradients of parameters are summed over the ranks: in which dtype, and which of them in one message.

The gradient of a cast, as autocast makes one of each weight, is summed in the parameter's own dtype if that is wider.

A parameter that is used on slices, as a norm's weight on slices of a sequence, gets a part of its gradient on each
rank. A message takes as long as its latency, so small parts of a layer are sent together, while the backward of the
layer before runs (DDP's buckets; S. Li et al., PyTorch Distributed, 2020, 3.2.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from torchshard.core.layouts import I
from torchshard.core.paths import layer_of
from torchshard.ir.graph import before_casts, nbytes

BUCKETED_BYTES = 1 << 18
"""A larger gradient takes its time by its bytes."""


class Bucket(NamedTuple):
    """What is summed in one message."""

    layer: str
    """The path of the numbered module; '' for what is in none."""
    dtype: torch.dtype


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
    if not _is_parameter(source) or nbytes(source.meta["val"]) > BUCKETED_BYTES:
        return None
    if source.meta.get("layouts", (I,)) != (I,):  # each rank gets its slice of the sum
        return None
    return Bucket(layer_of(source.meta["path"]) or "", summed_dtype(value))


def _is_parameter(source: fx.Node) -> bool:
    return source.op == "placeholder" and bool(source.meta["kind"] == "parameter")
