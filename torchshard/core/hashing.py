"""Hashes of texts and tensor values that are equal in all processes, so ranks can compare them.

Python's own `hash` of a text is salted per process, and hashing a tensor on the host would copy it
from its device.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_CHUNK = 1 << 16
"""Number of words mixed at a time, to bound the temporary memory."""
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""splitmix64's (shift, factor) pairs; factors are signed: torch.int64 lacks unsigned arithmetic."""


def hash_text(text: str) -> int:
    """Returns a 62-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def hash_tensor(tensor: Tensor) -> int:
    """Returns a 63-bit hash that depends on every bit of a tensor's values and on their order.

    Each 64-bit word is mixed with its position by splitmix64. The sum of the mixed words is
    independent of the order of summation, so the hash is deterministic on a GPU too.
    """
    data = as_bytes(tensor)
    words = data[: len(data) // 8 * 8].view(torch.int64)
    total = sum((b + 1) << (8 * i) for i, b in enumerate(data[len(words) * 8 :].tolist()))
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        mixed = chunk + torch.arange(start + 1, start + 1 + len(chunk), device=data.device) * _GOLDEN_RATIO
        for shift, factor in _MIXING:
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += int((mixed ^ (mixed >> 31)).sum())
    return total & (2**63 - 1)


def spread(tensor: Tensor, count: int) -> Tensor:
    """Returns at least `count` evenly spaced elements of a tensor, flattened; all if it has fewer."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // count)]


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a tensor's values in row-major order as bytes, 8-byte aligned to be viewed as int64."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # is_contiguous() is true for a single element with any stride, but view(dtype) needs stride 1
    if flat.stride(0) != 1 or flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
