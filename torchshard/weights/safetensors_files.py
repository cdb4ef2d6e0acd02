"""Reads safetensors files: lists their tensors, and reads regions of a tensor without the rest.

    8 bytes       the length of the header, little-endian
    the header    JSON: name -> dtype, shape and the bytes [start, stop) of its data
    the data      row-major, without gaps

Files are not trusted: the header is validated before a tensor is created. Each contiguous run is read
with `pread`. Mapped memory would count as this process's, and would crash it if the file shrinks.

Source: the format of https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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
_MOST_HEADER_BYTES: Final = 100_000_000
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
INDEX: Final = "model.safetensors.index.json"


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
                now = _version(file)
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
            raise _broken(self.path, str(error), self) from error

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
            raise _broken(self.path, str(error), self) from error

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


def _version(file: int) -> tuple[int, int]:
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


def _broken(path: Path, why: str, tensor: object = None) -> InputError:
    return InputError(
        f"{path.name} is not a safetensors file that can be read",
        where=f"{path}" if tensor is None else f"{path}: {tensor.name if isinstance(tensor, FileTensor) else tensor}",
        why=why,
        attempt="copy or download the file again; nothing of it was used",
    )


def tensors_in(path: Path, expected: Mapping[str, str] | None = None) -> dict[str, FileTensor]:
    """Returns the tensors of a file by name.

    Args:
        expected: metadata that the header must contain.

    Raises:
        InputError: the file can't be read, is torn, or its header is invalid.
    """
    try:
        with path.open("rb") as file:
            version = size, _ = _version(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise _broken(path, f"it has {size} bytes, and its header would have {length}")
            header = json.loads(file.read(length).decode(), object_pairs_hook=_without_repetitions)
    except OSError as error:
        raise _broken(path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is no JSON of names: {error}") from error
    if not isinstance(header, dict):
        raise _broken(path, f"its header is a {type(header).__name__}, not a table of names")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _broken(path, "its __metadata__ is no table")
    for key, value in (expected or {}).items():
        if metadata.get(key) != value:
            raise _broken(path, f"its {key} is {metadata.get(key)!r}, not {value!r}")
    found = {name: _tensor(path, name, entry, 8 + length, version) for name, entry in header.items()}
    at = 8 + length
    for tensor in sorted(found.values(), key=lambda tensor: (tensor.start, math.prod(tensor.shape))):
        if tensor.start != at:
            raise _broken(path, f"its data begin at byte {tensor.start}, those before end at {at}", tensor)
        at += math.prod(tensor.shape) * tensor.dtype.itemsize
    if at != size:
        raise _broken(path, f"its tensors end at byte {at}, the file at {size}")
    return found


def _without_repetitions(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return made


def _tensor(path: Path, name: str, entry: object, data: int, version: tuple[int, int]) -> FileTensor:
    size, _ = version
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise _broken(path, "its header has no dtype, shape and data_offsets for it", name)
    if dtype not in DTYPES:
        raise _broken(path, f"its dtype {dtype!r} is unknown; known are {', '.join(DTYPES)}", name)
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise _broken(path, f"its shape is {shape}", name)
    bytes_ = math.prod(shape) * DTYPES[dtype].itemsize
    if not (0 <= start <= stop <= size - data and stop - start == bytes_):
        why = f"shape {shape} in {dtype} has {bytes_} bytes; its data are bytes {start} to {stop} of {size - data}"
        raise _broken(path, why, name)
    return FileTensor(path, name, DTYPES[dtype], tuple(shape), data + start, version)


def tensors_of(folder: str | os.PathLike[str]) -> dict[str, FileTensor]:
    """Returns the tensors of a folder's safetensors files, or of one file, by name.

    Reads the files in the index (`model.safetensors.index.json`); without an index `model.safetensors`;
    without either, all files.

    Raises:
        InputError: the folder has no such files, a file is missing or broken, or the index names a file
            outside the folder or a tensor that its file does not contain.
    """
    place = Path(folder)
    if place.is_file() and place.suffix == ".safetensors":
        return tensors_in(place)
    if not place.is_dir():
        raise _no_weights(place, "there is no such folder")
    if (place / INDEX).is_file():
        return _indexed(place)
    files = sorted(place.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in place.iterdir() if file.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        raise _no_weights(place, f"{pickles[0]} may run code when it is opened" if pickles else "it holds none")
    files = [place / "model.safetensors"] if place / "model.safetensors" in files else files
    found: dict[str, FileTensor] = {}
    for file in files:
        tensors = tensors_in(file)
        twice = next((name for name in tensors if name in found), None)
        if twice is not None:
            raise _broken(file, f"{found[twice].path.name} holds a tensor of this name too", twice)
        found.update(tensors)
    return found


def _no_weights(place: Path, why: str) -> InputError:
    return InputError(
        "no weights were found",
        where=str(place),
        why=why,
        attempt="a folder with safetensors files; save others with safetensors.torch.save_file(state_dict, path)",
    )


def _indexed(folder: Path) -> dict[str, FileTensor]:
    path = folder / INDEX
    try:
        names = json.loads(path.read_bytes())["weight_map"]
        is_map = isinstance(names, dict) and all(isinstance(file, str) for file in names.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _broken_index(path, f"{type(error).__name__}: {error}") from error
    if not is_map:
        raise _broken_index(path, "its weight_map is no table of names and files")
    for file in dict.fromkeys(names.values()):
        if len(PurePosixPath(file).parts) != 1 or file in {"..", "."} or "\\" in file:
            raise _broken_index(path, f"it names {file!r}, which is not a file of this folder")
        if not (folder / file).is_file():
            raise _broken_index(path, f"{file} is missing")
    held = {file: tensors_in(folder / file) for file in dict.fromkeys(names.values())}
    absent = next(((name, file) for name, file in names.items() if name not in held[file]), None)
    if absent is not None:
        raise _broken_index(path, f"{absent[1]} holds no tensor {absent[0]!r}")
    return {name: held[file][name] for name, file in names.items()}


def _broken_index(path: Path, why: str) -> InputError:
    return InputError(
        "the index of the weights can't be used",
        where=str(path),
        why=why,
        attempt="copy or download the folder again, with all files that its index names",
    )
