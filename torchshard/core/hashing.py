"""Hashes of texts and of tensors' values: equal on all ranks that hold the same, whatever the process."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_CHUNK = 1 << 20
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def hash_text(text: str) -> int:
    """62 bits of a hash of a text. Python's own `hash` differs between processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def hash_tensor(tensor: Tensor) -> int:
    """63 bits that depend on every bit of a tensor's values and on their order (the mixing of splitmix64, summed)."""
    held = as_bytes(tensor)
    whole = held[: len(held) // 8 * 8].view(torch.int64)
    total = sum((b + 1) << (8 * i) for i, b in enumerate(held[len(whole) * 8 :].tolist()))
    for start in range(0, len(whole), _CHUNK):
        words = whole[start : start + _CHUNK]
        mixed = words + torch.arange(start + 1, start + 1 + len(words), device=held.device) * _GOLDEN
        for shift, factor in _MIXING:
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += int((mixed ^ (mixed >> 31)).sum())
    return total & (2**63 - 1)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's values in their order as bytes, in memory that begins at a multiple of eight: words can be read."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.itemsize % 8:  # one element counts as contiguous, not here
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
