"""Writes safetensors files, whole or part by part, and so that they survive a crash.

Parts are written with `pwrite` at their places, so several processes may write one file. What is not contiguous memory
of the CPU is copied block by block.

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
from torchshard.weights.boxes import Box, halves, runs, whole_box, with_range
from torchshard.weights.safetensors_files import BLOCK_BYTES, DTYPES, bytes_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorType:
    """What a file holds under a name."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes_(self) -> int:
        """The size of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file that is to be written."""

    path: Path
    header: bytes
    types: Mapping[str, TensorType]
    starts: Mapping[str, int]
    """Name -> where its data begin, in bytes from the beginning of the file."""
    size: int
    """Of the whole file, in bytes."""

    @classmethod
    def of(cls, path: Path, types: Mapping[str, TensorType], metadata: Mapping[str, str]) -> FilePlan:
        """A file with these tensors; wide dtypes come first, so that all data are aligned.

        Raises:
            InputError: the format has no such dtype.
        """
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        at, begins = 0, dict[str, int]()
        for name in sorted(types, key=lambda name: -types[name].dtype.itemsize):
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
        """Makes the file, with its header and without data."""
        with self.path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)

    def write(self, file: int, name: str, tensor: Tensor, box: Box | None = None) -> None:
        """Writes a part of a tensor, or all of it, to the open file."""
        box = whole_box(self.types[name].shape) if box is None else box
        if not tensor.numel():
            return
        is_direct = tensor.is_contiguous() and tensor.device.type == "cpu"
        if tensor.numel() * tensor.itemsize > BLOCK_BYTES and not is_direct:
            dim, start, middle, stop = halves(box)
            for a, b in ((start, middle), (middle, stop)):
                self.write(file, name, tensor.narrow(dim, a - start, b - a), with_range(box, dim, a, b))
            return
        memory = bytes_of(tensor if is_direct else tensor.detach().cpu().contiguous())
        length, starts = runs(self.types[name].shape, box, tensor.itemsize)
        for i, start in enumerate(starts):
            _write_exactly(file, memory[i * length : (i + 1) * length], self.starts[name] + start)


def _write_exactly(file: int, memory: memoryview, at: int) -> None:
    while memory:
        count = os.pwrite(file, memory, at)
        memory, at = memory[count:], at + count


def sync_folder(folder: Path) -> None:
    """Returns when the names of a folder's files are on its disk: a rename is not, before that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file's content at once, and returns when it is on the disk."""
    temporary = path.with_name(f"{path.name}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)
