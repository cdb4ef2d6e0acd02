"""Writes safetensors files, in full or by parts, and replaces files atomically.

Parts are written at their offsets with `pwrite`, so several processes may write one file. Tensors that
are not contiguous or not on the CPU are copied block by block.

Source: the format of https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.weights.boxes import place_of, runs
from torchshard.weights.safetensors_files import DTYPES
from torchshard.weights.stored_tensors import BLOCK_BYTES, bytes_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorType:
    """The dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes_(self) -> int:
        """The size of the data in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """The header and offsets of a file to write."""

    path: Path
    header: bytes
    types: Mapping[str, TensorType]
    starts: Mapping[str, int]
    """Name -> the offset of its data in the file, in bytes."""
    size: int
    """The size of the file in bytes."""

    @classmethod
    def of(cls, path: Path, types: Mapping[str, TensorType], metadata: Mapping[str, str]) -> FilePlan:
        """Plans a file with these tensors, sorted by descending dtype size, which aligns all data, then by name.

        Raises:
            InputError: the format does not support a dtype.
        """
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        at, begins = 0, dict[str, int]()
        for name in sorted(types, key=lambda name: (-types[name].dtype.itemsize, name)):
            type_ = types[name]
            if type_.dtype not in _NAMES:
                raise InputError(
                    f"{name!r} can't be saved",
                    where=str(path),
                    why=f"safetensors files have no {type_.dtype}; they have {', '.join(map(str, _NAMES))}",
                    attempt="another dtype",
                )
            stop = at + type_.bytes_
            entries[name] = {"dtype": _NAMES[type_.dtype], "shape": list(type_.shape), "data_offsets": [at, stop]}
            begins[name], at = at, stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        starts = {name: len(header) + begin for name, begin in begins.items()}
        return cls(path, header, types, starts, len(header) + at)

    def create(self) -> None:
        """Creates the file at its full size, with the header and no data."""
        with self.path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)

    def write(self, file: int, name: str, tensor: Tensor, place: Tensor | None = None) -> None:
        """Writes a tensor, or a region of one, to the open file.

        Args:
            tensor: the values of the region.
            place: the region, as a view from `boxes.place_of` with dims in any order; None for the full tensor.
        """
        place = place_of(self.types[name].shape) if place is None else place
        strides = place.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        values = tensor.detach().resolve_conj().resolve_neg()
        self._write_ordered(file, self.starts[name], values.permute(order), place.permute(order))

    def _write_ordered(self, file: int, start: int, tensor: Tensor, place: Tensor) -> None:
        if not tensor.numel():
            return
        is_direct = tensor.is_contiguous() and tensor.device.type == "cpu"
        if tensor.numel() * tensor.itemsize > BLOCK_BYTES and not is_direct:
            dim, size = next((dim, size) for dim, size in enumerate(tensor.shape) if size > 1)
            for a, b in ((0, size // 2), (size // 2, size)):
                self._write_ordered(file, start, tensor.narrow(dim, a, b - a), place.narrow(dim, a, b - a))
            return
        memory = bytes_of(tensor if is_direct else tensor.cpu().contiguous())
        length, starts = runs(place, tensor.itemsize)
        for i, run in enumerate(starts):
            _write_exactly(file, memory[i * length : (i + 1) * length], start + run)


def _write_exactly(file: int, memory: memoryview, at: int) -> None:
    while memory:
        count = os.pwrite(file, memory, at)
        memory, at = memory[count:], at + count


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk: a rename is not durable before that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file's content atomically, and flushes it to disk."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:  # "x" never follows an existing link
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)
