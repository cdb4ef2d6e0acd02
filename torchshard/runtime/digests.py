"""Digests that the ranks compare instead of tensors: checksums, and a sum for values that match up to rounding.

Each digest trades detection against its cost per call. Large tensors are sampled, and tensors on
other devices are digested there, so a call never waits for a device.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchshard.core.hashing import as_bytes, hash_tensor, spread
from torchshard.core.layouts import Shard
from torchshard.core.mesh import Place
from torchshard.core.sharding import Sharding
from torchshard.ir.sizes import value_text
from torchshard.weights.lazy import LazyTensor

WHOLE_BYTES: Final = 1 << 22
"""The size above which only a sample of a tensor is compared."""
SAMPLED: Final = 1 << 14
"""The minimum number of elements in a sample."""


def is_here(tensor: Tensor) -> bool:
    """Returns whether a tensor has values that can be read without waiting for a device."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def is_elsewhere(tensor: Tensor) -> bool:
    """Returns whether a tensor has values that can be read only by waiting for a device."""
    return has_values(tensor) and not is_here(tensor)


def has_values(tensor: Tensor) -> bool:
    """Returns whether a tensor has memory with elements, on any device."""
    return not (tensor.is_meta or is_fake(tensor)) and bool(tensor.numel())


def values_digest(tensor: Tensor, most_bytes: int = WHOLE_BYTES) -> int:
    """Returns a checksum of a tensor's values in order; for a large tensor, of evenly spaced elements."""
    compared = spread(tensor, SAMPLED) if tensor.numel() * tensor.itemsize > most_bytes else tensor
    return zlib.crc32(as_bytes(compared).numpy().data)


def device_digest(tensor: Tensor) -> Tensor:
    """Returns a checksum of a tensor's sample as an int64 tensor on its device, without waiting for it."""
    flat = as_bytes(spread(tensor, SAMPLED)).long()
    places = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B1
    return ((flat + 1) * (places ^ (places >> 15))).sum()


def describe_content(tensor: Tensor) -> str:
    """Returns the shape, the dtype and a hash of every bit of the values."""
    if not has_values(tensor):
        return value_text(tensor)
    return f"{value_text(tensor)} with hash {hash_tensor(tensor):x}"


def describe_contents(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns `describe_content` of each tensor; for lazy ones, how they are made."""
    facts = {name: describe_content(t) for name, t in tensors.items() if not isinstance(t, LazyTensor)}
    lazies = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, LazyTensor)}
    tapes = {id(lazy.tape): lazy.tape for lazy in lazies.values()}
    for number, (key, tape) in enumerate(tapes.items()):
        of_tape = {name: lazy for name, lazy in lazies.items() if id(lazy.tape) == key}
        facts |= {name: f"{value_text(lazy)}, {lazy.slot} of tape {number}" for name, lazy in of_tape.items()}
        facts[f"how {next(iter(of_tape))} is made"] = tape.digest([lazy.slot for lazy in of_tape.values()])
    return facts


def weighted_sum(tensor: Tensor, number: int) -> tuple[float, float]:
    """Returns a signed sum of a CPU tensor's elements, and the sum of magnitudes, to which rounding is relative.

    Each element has a weight by its place, and the sum one by `number`: swapped elements or tensors
    change the sum.
    """
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    # A product with a vector in the tensor's own dtype is fast; only the sums of rows are widened.
    rows = (matrix @ _place_weights(matrix.shape[1], matrix.dtype)).double()
    terms = rows * _place_weights(len(rows), rows.dtype) * (1 + 0.37 * number)
    return float(terms.sum()), float(terms.abs().sum())


@functools.lru_cache(maxsize=64)
def _place_weights(size: int, dtype: torch.dtype) -> Tensor:
    """Returns weights from 0.5 to 1.5, spread evenly by the golden ratio, so neighbours differ much."""
    places = torch.arange(1, size + 1, dtype=torch.float64, device="cpu")
    return ((places * 0.6180339887498949) % 1 + 0.5).to(dtype)


def are_distinct(whole: Tensor, of: Sharding, place: Place, axis: str) -> bool:
    """Returns whether the slices of the first two ranks along an axis differ; if so, equal ones were overwritten.

    Args:
        place: the place of a rank; the two ranks share its place on the other axes.
    """
    if not isinstance(of.over(axis), Shard) or not has_values(whole) or whole.layout != torch.strided:
        return False
    first, second = (of.local(whole.detach(), {**place, axis: rank}) for rank in range(2))
    return first.shape == second.shape and not torch.equal(first, second)
