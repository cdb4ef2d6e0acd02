"""A rank's slices of the parameters, from a model in memory or on the meta device; each slice owns its memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchshard.core.layouts import I, Layout, local_shape, split
from torchshard.core.mesh import Coordinate


def local_tensor(tensor: Tensor, layout: Layout, coordinate: Coordinate) -> Tensor:
    """What a rank holds of a parameter or buffer; a Parameter stays one, with its requires_grad."""
    rank, ranks = coordinate.rank, coordinate.axis.size
    if tensor.is_meta:
        shape = local_shape(tensor.shape, layout, rank, ranks)
        held = torch.empty(shape, dtype=tensor.dtype, device="meta")
    else:
        held = split(tensor.detach(), layout, rank, ranks).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(held, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else held


def local_state(model: nn.Module, layouts: Mapping[str, Layout], coordinate: Coordinate) -> dict[str, Tensor]:
    """All parameters and buffers of a rank by their first names."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: local_tensor(tensor, layouts.get(name, I), coordinate) for name, tensor in named}
