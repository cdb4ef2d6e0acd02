"""Numbers that the ranks compare in place of tensors: checksums of values, and a sum for values that are rounded.

Each is a compromise between what it detects and what a call can afford. Large tensors are sampled, and tensors on
other devices are digested there, so that a call never waits for a device.
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
"""Of larger tensors a sample is compared."""
SAMPLED: Final = 1 << 14
"""How many elements a sample has, at least."""


def is_here(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be read without waiting for a device."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether a tensor has values on a device that one would have to wait for."""
    return has_values(tensor) and not is_here(tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has memory with elements, on any device."""
    return not (tensor.is_meta or is_fake(tensor)) and bool(tensor.numel())


def values_digest(tensor: Tensor, most_bytes: int = WHOLE_BYTES) -> int:
    """A checksum of a tensor's values in their order; of a large tensor, of elements at even distances."""
    compared = spread(tensor, SAMPLED) if tensor.numel() * tensor.itemsize > most_bytes else tensor
    return zlib.crc32(as_bytes(compared).numpy().data)


def device_digest(tensor: Tensor) -> Tensor:
    """A checksum like `values_digest` as an int64 tensor on the tensor's device, computed without waiting for it."""
    flat = as_bytes(spread(tensor, SAMPLED)).long()
    places = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B1
    return ((flat + 1) * (places ^ (places >> 15))).sum()


def describe_content(tensor: Tensor) -> str:
    """Shape, dtype and a hash of every bit of the values."""
    if not has_values(tensor):
        return value_text(tensor)
    return f"{value_text(tensor)} with hash {hash_tensor(tensor):x}"


def describe_contents(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`describe_content` of each tensor; of lazy ones, how they are made."""
    facts = {name: describe_content(t) for name, t in tensors.items() if not isinstance(t, LazyTensor)}
    lazies = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, LazyTensor)}
    tapes = {id(lazy.tape): lazy.tape for lazy in lazies.values()}
    for number, (key, tape) in enumerate(tapes.items()):
        of_tape = {name: lazy for name, lazy in lazies.items() if id(lazy.tape) == key}
        facts |= {name: f"{value_text(lazy)}, {lazy.slot} of tape {number}" for name, lazy in of_tape.items()}
        facts[f"how {next(iter(of_tape))} is made"] = tape.digest([lazy.slot for lazy in of_tape.values()])
    return facts


def weighted_sum(tensor: Tensor, number: int) -> tuple[float, float]:
    """A signed sum of a CPU tensor's elements, and the sum of their sizes, by which it may differ when rounded.

    Each element has a weight by its place, and the sum one by `number`: swapped elements or tensors give another sum.
    """
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    # A product with a vector in the tensor's own dtype is fast; only the sums of rows are widened.
    rows = (matrix @ _place_weights(matrix.shape[1], matrix.dtype)).double()
    terms = rows * _place_weights(len(rows), rows.dtype) * (1 + 0.37 * number)
    return float(terms.sum()), float(terms.abs().sum())


@functools.lru_cache(maxsize=64)
def _place_weights(size: int, dtype: torch.dtype) -> Tensor:
    """Weights from 0.5 to 1.5, spread evenly by the golden ratio, so that neighbours differ much."""
    places = torch.arange(1, size + 1, dtype=torch.float64, device="cpu")
    return ((places * 0.6180339887498949) % 1 + 0.5).to(dtype)


def are_distinct(whole: Tensor, of: Sharding, place: Place, axis: str) -> bool:
    """Whether slices of the first two ranks along an axis differ, so that equal ones later on were overwritten.

    Args:
        place: of a rank; the two are at the same place as it on the other axes.
    """
    if not isinstance(of.over(axis), Shard) or not has_values(whole) or whole.layout != torch.strided:
        return False
    first, second = (of.local(whole.detach(), {**place, axis: rank}) for rank in range(2))
    return first.shape == second.shape and not torch.equal(first, second)
