"""Cuts a rank's slices out of a model's parameters and buffers: in memory, lazy, or on the meta device.

Each slice is a copy: a view would keep the whole parameter in memory on every rank. Lazy tensors are computed one at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from torchshard.core.layouts import I, Layout, local_shape, split
from torchshard.core.mesh import Coordinate
from torchshard.weights.lazy import LazyTensor, compute


def local_tensor(tensor: Tensor, layout: Layout, coordinate: Coordinate) -> Tensor:
    """A rank's slice of a parameter or buffer; a Parameter stays one, with its requires_grad."""
    rank, ranks = coordinate.rank, coordinate.axis.size
    if tensor.is_meta:
        shape = local_shape(tensor.shape, layout, rank, ranks)
        sliced = torch.empty(shape, dtype=tensor.dtype, device="meta")
    else:
        sliced = split(tensor.detach(), layout, rank, ranks).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(sliced, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else sliced


def for_each_whole(tensors: Mapping[str, Tensor], use: Callable[[str, Tensor], None]) -> None:
    """Calls `use(name, whole)` with each tensor's values; those of a lazy one are in memory until `use` returns."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, LazyTensor):
            names.setdefault(id(tensor), []).append(name)
        else:
            use(name, tensor)

    def use_value(tensor: LazyTensor, value: Tensor) -> None:
        for name in names[id(tensor)]:
            use(name, value)

    compute([t for t in tensors.values() if isinstance(t, LazyTensor)], use_value)


def local_state(model: nn.Module, layouts: Mapping[str, Layout], coordinate: Coordinate) -> dict[str, Tensor]:
    """A rank's slices of all parameters and buffers, by their first names."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: local_tensor(tensor, layouts.get(name, I), coordinate) for name, tensor in named}
