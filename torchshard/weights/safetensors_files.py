"""Lists the tensors of safetensors files; `stored_tensors` reads their data.

    8 bytes       the length of the header, little-endian
    the header    JSON: name -> dtype, shape and the bytes [start, stop) of its data
    the data      row-major, without gaps

Files are not trusted: the header is validated before a tensor is created.

Source: the format of https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import torch

from torchshard.core.errors import InputError
from torchshard.weights.stored_tensors import FileTensor, broken_file, version_of

_MOST_HEADER_BYTES: Final = 100_000_000
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
INDEX: Final = "model.safetensors.index.json"


def tensors_in(path: Path, expected: Mapping[str, str] | None = None) -> dict[str, FileTensor]:
    """Returns the tensors of a file by name.

    Args:
        expected: metadata that the header must contain.

    Raises:
        InputError: the file can't be read, is torn, or its header is invalid.
    """
    try:
        with path.open("rb") as file:
            version = size, _ = version_of(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise broken_file(path, f"it has {size} bytes, and its header would have {length}")
            header = json.loads(file.read(length).decode(), object_pairs_hook=_without_repetitions)
    except OSError as error:
        raise broken_file(path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise broken_file(path, f"its header is no JSON of names: {error}") from error
    if not isinstance(header, dict):
        raise broken_file(path, f"its header is a {type(header).__name__}, not a table of names")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise broken_file(path, "its __metadata__ is no table")
    for key, value in (expected or {}).items():
        if metadata.get(key) != value:
            raise broken_file(path, f"its {key} is {metadata.get(key)!r}, not {value!r}")
    found = {name: _tensor(path, name, entry, 8 + length, version) for name, entry in header.items()}
    at = 8 + length
    for tensor in sorted(found.values(), key=lambda tensor: (tensor.start, math.prod(tensor.shape))):
        if tensor.start != at:
            raise broken_file(path, f"its data begin at byte {tensor.start}, those before end at {at}", tensor)
        at += math.prod(tensor.shape) * tensor.dtype.itemsize
    if at != size:
        raise broken_file(path, f"its tensors end at byte {at}, the file at {size}")
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
            raise broken_file(path, "its header has no dtype, shape and data_offsets for it", name)
    if dtype not in DTYPES:
        raise broken_file(path, f"its dtype {dtype!r} is unknown; known are {', '.join(DTYPES)}", name)
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise broken_file(path, f"its shape is {shape}", name)
    bytes_ = math.prod(shape) * DTYPES[dtype].itemsize
    if not (0 <= start <= stop <= size - data and stop - start == bytes_):
        why = f"shape {shape} in {dtype} has {bytes_} bytes; its data are bytes {start} to {stop} of {size - data}"
        raise broken_file(path, why, name)
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
            raise broken_file(file, f"{found[twice].path.name} holds a tensor of this name too", twice)
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
