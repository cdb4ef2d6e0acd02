"""Tensors stored in files: reads a region of one without the rest.

Each contiguous run of a region is read with `pread`. Mapped memory would count as this process's, and would crash it
if the file shrinks.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.weights.boxes import Box, place_of, runs, sizes, whole_box, with_range

BLOCK_BYTES: Final = 1 << 22
"""The maximum buffer, in addition to the slices, for values that have to be cast or moved."""
SHORT_RUN: Final = 512
"""Runs of fewer bytes are read together with the gaps between them: one call per run is slower."""
_SAMPLED_BYTES: Final = 4096


class StoredTensor(ABC):
    """A full tensor, stored in one file or several."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @abstractmethod
    def read(self, box: Box, into: Tensor, dtypes: Sequence[torch.dtype] = (), spare: int = 0) -> int:
        """Reads a region into a tensor.

        Args:
            box: the region.
            into: a tensor of the box's shape, with any strides, dtype and device.
            dtypes: the dtypes to which the values are cast, in order.
            spare: how many additional bytes may be read if that is faster.

        Returns:
            The number of bytes read.

        Raises:
            InputError: a file is missing, has changed, or can't be read.
        """

    @abstractmethod
    def buffer_bytes(self, into: Tensor, dtypes: Sequence[torch.dtype] = ()) -> int:
        """Returns the bytes that `read` allocates in addition to `into`."""

    def prefetch(self, box: Box) -> None:  # noqa: B027 - optional: only single files prefetch
        """Hints to the kernel that a region will be read."""

    @abstractmethod
    def sample(self) -> bytes:
        """Returns a few bytes that ranks compare to detect different files; b"" for small tensors.

        Raises:
            InputError: a file can't be read.
        """

    @property
    def bytes_(self) -> int:
        """The size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __call__(self) -> Tensor:
        """Reads the full tensor."""
        into = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(whole_box(self.shape), into)
        return into


@dataclass(frozen=True)
class ModelTensor(StoredTensor):
    """A parameter or buffer of a sharded model, recorded on a tape like a file's tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: Callable[[], Tensor]
    """Gathers the tensor; all ranks must call it."""

    def read(self, box: Box, into: Tensor, dtypes: Sequence[torch.dtype] = (), spare: int = 0) -> int:
        """Raises: it is in no file, and no rank has all of it."""
        raise NotImplementedError

    def buffer_bytes(self, into: Tensor, dtypes: Sequence[torch.dtype] = ()) -> int:
        """Returns 0, because no data is read."""
        return 0

    def sample(self) -> bytes:
        """Returns no bytes, because no data is read."""
        return b""

    def __call__(self) -> Tensor:
        return self.whole()


@dataclass(frozen=True)
class FileTensor(StoredTensor):
    """A tensor in one file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The offset of the data in the file, in bytes."""
    version: tuple[int, int]
    """The file's (size in bytes, modification time in ns) when its header was read."""

    def read(self, box: Box, into: Tensor, dtypes: Sequence[torch.dtype] = (), spare: int = 0) -> int:
        """Reads a region into a tensor; see `StoredTensor.read`."""
        if not into.numel():
            return 0
        try:
            file = os.open(self.path, os.O_RDONLY)
            try:
                now = version_of(file)
                if now[0] != self.version[0]:
                    raise _changed(self, f"it had {self.version[0]} bytes, and now {now[0]}")
                if now != self.version:
                    raise _changed(
                        self, f"it was written {(now[1] - self.version[1]) / 1e9:.3g} s after the file of the header"
                    )
                return self._read(file, box, into, dtypes, spare)
            finally:
                os.close(file)
        except OSError as error:
            raise broken_file(self.path, str(error), self) from error

    def _read(self, file: int, box: Box, into: Tensor, dtypes: Sequence[torch.dtype], spare: int) -> int:
        bytes_, rows = into.numel() * self.dtype.itemsize, (*box[:1], *whole_box(self.shape)[1:])
        over = math.prod(sizes(rows)) * self.dtype.itemsize - bytes_
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        has_short_runs = 0 < over <= spare and runs(place_of(self.shape, box), self.dtype.itemsize)[0] < SHORT_RUN
        if has_short_runs and row_bytes <= BLOCK_BYTES:
            self._read_rows(file, box, into, dtypes, BLOCK_BYTES // row_bytes)
            return bytes_ + over
        held = self.buffer_bytes(into, dtypes)
        if held:
            last = dtypes[-1] if dtypes else self.dtype
            casts = dtypes[:-1] if last == into.dtype else dtypes  # `copy_` does the last
            self._read_cast(file, box, into, casts, _block(held, self.dtype))
        else:
            self._read_runs(file, box, into)
        return bytes_

    def _read_rows(self, file: int, box: Box, into: Tensor, dtypes: Sequence[torch.dtype], count: int) -> None:
        """Reads full rows, `count` at a time, and copies the region's part of each."""
        start, stop = box[0]
        block = _block(min(count, stop - start) * math.prod(self.shape[1:]) * self.dtype.itemsize, self.dtype)
        for first in range(start, stop, count):
            last = min(first + count, stop)
            rows = block[: (last - first) * math.prod(self.shape[1:])].view(last - first, *self.shape[1:])
            self._read_runs(file, ((first, last), *whole_box(self.shape)[1:]), rows)
            part = rows[(slice(None), *(slice(*bounds) for bounds in box[1:]))]
            for dtype in dtypes:
                part = part.to(dtype)
            into[first - start : last - start].copy_(part)

    def prefetch(self, box: Box) -> None:
        """Hints to the kernel that a region will be read."""
        if not all(sizes(box)) or not hasattr(os, "posix_fadvise"):
            return
        place = place_of(self.shape, box)
        last = sum((size - 1) * stride for size, stride in zip(place.shape, place.stride(), strict=True))
        begin, length = int(place.storage_offset()) * self.dtype.itemsize, (last + 1) * self.dtype.itemsize
        with contextlib.suppress(OSError):  # the read reports it
            file = os.open(self.path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, self.start + begin, length, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)

    def buffer_bytes(self, into: Tensor, dtypes: Sequence[torch.dtype] = ()) -> int:
        """Returns the bytes that `read` allocates; 0 for a direct read into contiguous CPU memory."""
        is_direct = into.is_contiguous() and into.device.type == "cpu" and {into.dtype, *dtypes} == {self.dtype}
        return 0 if is_direct else min(into.numel() * self.dtype.itemsize, BLOCK_BYTES)

    def sample(self) -> bytes:
        """Returns 64 bytes spread over the data; b"" if the data are under 4 KiB."""
        if self.bytes_ < _SAMPLED_BYTES:
            return b""
        step = self.bytes_ // 8
        try:
            with self.path.open("rb", buffering=0) as file:
                return b"".join(os.pread(file.fileno(), 8, self.start + i * step) for i in range(8))
        except OSError as error:
            raise broken_file(self.path, str(error), self) from error

    def _read_cast(self, file: int, box: Box, into: Tensor, dtypes: Sequence[torch.dtype], block: Tensor) -> int:
        """Reads a region through `block`; splits it in halves until they fit."""
        if into.numel() > len(block):
            dim, (start, stop) = next((d, (a, b)) for d, (a, b) in enumerate(box) if b - a > 1)
            middle = (start + stop) // 2
            return sum(
                self._read_cast(file, with_range(box, dim, a, b), into.narrow(dim, a - start, b - a), dtypes, block)
                for a, b in ((start, middle), (middle, stop))
            )
        part = block[: into.numel()].view(into.shape)
        self._read_runs(file, box, part)
        for dtype in dtypes:
            part = part.to(dtype)
        into.copy_(part)
        return into.numel() * self.dtype.itemsize

    def _read_runs(self, file: int, box: Box, block: Tensor) -> None:
        """Reads a region's runs, separate in the file, into a contiguous tensor."""
        memory, (length, starts) = bytes_of(block), runs(place_of(self.shape, box), self.dtype.itemsize)
        for i, start in enumerate(starts):
            self._read_exactly(file, memory[i * length : (i + 1) * length], self.start + start)

    def _read_exactly(self, file: int, memory: memoryview, at: int) -> None:
        while memory:
            count = os.preadv(file, [memory], at)
            if not count:
                raise _changed(self, f"it ends at byte {at}, inside the tensor's data")
            memory, at = memory[count:], at + count

    def __str__(self) -> str:
        return f"{self.path.name}: {self.name}"


def version_of(file: int) -> tuple[int, int]:
    """Returns a file's (size in bytes, modification time in ns)."""
    stat = os.fstat(file)
    return stat.st_size, stat.st_mtime_ns


def _block(bytes_: int, dtype: torch.dtype) -> Tensor:
    """Allocates a read buffer by `mmap`: heap buffers, once freed, would leave gaps between kept tensors."""
    return torch.frombuffer(mmap.mmap(-1, bytes_), dtype=dtype)


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _changed(tensor: FileTensor, why: str) -> InputError:
    return InputError(
        f"{tensor.path.name} was changed while it was read",
        where=f"{tensor.path}: {tensor.name}",
        why=why,
        attempt="a folder to which nothing is written meanwhile: write to another one, and rename that",
    )


def broken_file(path: Path, why: str, tensor: object = None) -> InputError:
    """Returns the error for a safetensors file that can't be read, or for one tensor in it."""
    return InputError(
        f"{path.name} is not a safetensors file that can be read",
        where=f"{path}" if tensor is None else f"{path}: {tensor.name if isinstance(tensor, FileTensor) else tensor}",
        why=why,
        attempt="copy or download the file again; nothing of it was used",
    )
