"""Packs tensors of several dtypes into one tensor of bytes, which one collective sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Type = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and dtype."""


def nbytes(of: Type) -> int:
    """Returns the size of a tensor in bytes."""
    shape, dtype = of
    return math.prod(shape) * dtype.itemsize


def packed(tensors: Sequence[Tensor], device: torch.device, size: int = 0) -> Tensor:
    """Returns the bytes of some tensors, one after the other, and zeros up to `size` bytes."""
    flat = [x.contiguous().flatten().view(torch.uint8) for x in tensors]
    padding = torch.zeros(max(size - sum(map(len, flat)), 0), dtype=torch.uint8, device=device)
    return torch.cat([*flat, padding])


def unpacked(data: Tensor, types: Sequence[Type]) -> list[Tensor]:
    """Returns the tensors at the start of packed bytes, as views where they are aligned."""
    found, at = list[Tensor](), 0
    for shape, dtype in types:
        piece = data.narrow(0, at, nbytes((shape, dtype)))
        at += piece.nbytes
        aligned = piece.storage_offset() % dtype.itemsize == 0
        bytes_ = piece if aligned else piece.clone()
        # PyTorch views no empty array of NumPy as another dtype: its stride is 0 (2.13.0)
        found.append(bytes_.view(dtype).view(shape) if len(bytes_) else data.new_empty(shape, dtype=dtype))
    return found
