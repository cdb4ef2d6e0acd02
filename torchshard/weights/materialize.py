"""Cuts a rank's slices out of a model's parameters and buffers: in memory, lazy, or on the meta device.

Each slice is a copy: a view would keep the whole parameter in memory on every rank. Lazy tensors are computed one at a
time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from torchshard.core.mesh import Place
from torchshard.core.sharding import UNSHARDED, Sharding, local_shape
from torchshard.weights.boxes import pieces
from torchshard.weights.lazy import LazyTensor, compute
from torchshard.weights.parts import Parts, Read, Wanted
from torchshard.weights.progress import Progress


def local_tensor(tensor: Tensor, sharding: Sharding, place: Place) -> Tensor:
    """Returns a rank's slice of a parameter or buffer; a Parameter stays one, with its requires_grad."""
    if tensor.is_meta:
        shape = local_shape(tensor.shape, sharding.cuts(place))
        sliced = torch.empty(shape, dtype=tensor.dtype, device="meta")
    else:
        sliced = sharding.local(tensor.detach(), place).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(sliced, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else sliced


def for_each_whole(tensors: Mapping[str, Tensor], use: Callable[[str, Tensor], None]) -> None:
    """Calls `use(name, full)` with each tensor's values; a lazy tensor's are freed when `use` returns."""
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


@dataclass
class ReadSlices:
    """Statistics of partial reads of files."""

    names: set[str] = field(default_factory=set)
    """The parameters and buffers that were read by slice, not in full."""
    bytes_read: int = 0
    bytes_over: int = 0
    """The bytes read but not needed: the gaps between short runs."""
    bytes_kept: int = 0
    largest_buffer: int = 0
    """The maximum bytes of a read buffer, in addition to the slices."""


def read_slices(
    tensors: Mapping[str, Tensor], held: Mapping[str, Sharding], place: Place, use: Callable[[str, Tensor], None]
) -> ReadSlices:
    """Calls `use(name, slice)` with this rank's slice of each lazy tensor that can be read by parts.

    It reads the bytes of the slices, and in the gaps between short runs at most 1/64 as many.

    Raises:
        InputError: a file can't be read.
    """
    found, planned = ReadSlices(), [*_planned_reads(tensors, held, place)]
    upcoming = deque(read for _, _, reads in planned for read in reads)
    total, ahead = sum(read.bytes_ for read in upcoming), 0
    spare, shown = total // OVER_READ, Progress("reading weights", sum(place.values()), total)
    for name, local, reads in planned:
        for read in reads:
            while upcoming and ahead < PREFETCHED_BYTES:
                following = upcoming.popleft()
                following.prefetch()
                ahead += following.bytes_
            ahead -= read.bytes_
            bytes_ = read.run(spare - found.bytes_over)
            found.largest_buffer = max(found.largest_buffer, read.buffer_bytes)
            found.bytes_read, found.bytes_over = found.bytes_read + bytes_, found.bytes_over + bytes_ - read.bytes_
            shown.show(found.bytes_read)
        found.bytes_kept += local.numel() * local.itemsize
        found.names.add(name)
        use(name, local)
    shown.end()
    return found


OVER_READ: Final = 64
"""A rank may read one unneeded byte per this many needed bytes."""
PREFETCHED_BYTES: Final = 1 << 26
"""How many bytes ahead of the reads are prefetched."""


def _planned_reads(
    tensors: Mapping[str, Tensor], held: Mapping[str, Sharding], place: Place
) -> Iterator[tuple[str, Tensor, list[Read]]]:
    """Yields (name, memory for the slice, the reads that fill it) for tensors that can be read by parts."""
    parts = dict[int, Parts]()
    for name, tensor in tensors.items():
        if not isinstance(tensor, LazyTensor):
            continue
        of_tape, own = parts.setdefault(id(tensor.tape), Parts(tensor.tape)), held.get(name, UNSHARDED).cuts(place)
        local = torch.empty(local_shape(tensor.shape, own), dtype=tensor.dtype, device="cpu")
        reads = [of_tape.reads(Wanted(tensor.slot, piece.box, piece.of(local))) for piece in pieces(tensor.shape, own)]
        if all(some is not None for some in reads):
            yield name, local, [read for some in reads for read in some or ()]


def local_state(model: nn.Module, held: Mapping[str, Sharding], place: Place) -> dict[str, Tensor]:
    """Returns a rank's slices of all parameters and buffers, by their first names."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: local_tensor(tensor, held.get(name, UNSHARDED), place) for name, tensor in named}
