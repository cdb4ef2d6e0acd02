"""Checkpoints on disk: what a training run needs to go on, as slices in safetensors files.

    checkpoint.json              the one file that says which others count; it is replaced last, at once
    data-<id>/0-of-2.safetensors the slices that rank 0 of 2 held, and its share of what all ranks held whole
    data-<id>/objects.bin        what is no tensor: settings of optimizers, schedulers, the user's own data

A folder without checkpoint.json, or a data folder that it does not name, is what a save has left that did not end.
Nothing here is pickled: opening a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.layouts import Layout, Shard, local_shape, parse_layout, parts_of, parts_size
from torchshard.core.mesh import MeshAxis
from torchshard.weights.boxes import Box, overlaps
from torchshard.weights.safetensors_files import FileTensor, StoredTensor, tensors_in

MANIFEST: Final = "checkpoint.json"
OBJECTS: Final = "objects.bin"
FORMAT: Final = "torchshard checkpoint 1"


@dataclass(frozen=True)
class SlicedTensor(StoredTensor):
    """A whole tensor, of which files hold the ranks' slices."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout
    slices: tuple[FileTensor, ...]
    """By rank; of a tensor that was whole on all ranks, one."""

    def read(self, box: Box, into: Tensor, dtypes: Sequence[torch.dtype] = (), spare: int = 0) -> int:
        """As `FileTensor.read`; it reads no more than the part has."""
        axis = MeshAxis(len(self.slices))
        return sum(
            file.read(own, target, dtypes)
            for rank, file in enumerate(self.slices)
            for own, target in overlaps(self.shape, self.layout, axis.coordinate(rank), box, into)
        )

    def buffer_bytes(self, into: Tensor, dtypes: Sequence[torch.dtype] = ()) -> int:
        """As `FileTensor.buffer_bytes`."""
        return self.slices[0].buffer_bytes(into, dtypes)

    def sample(self) -> bytes:
        """As `FileTensor.sample`."""
        return b"".join(file.sample() for file in self.slices)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    """With the manifest."""
    id: str
    """Another one for each save."""
    tensors: Mapping[str, SlicedTensor]
    """'model/<name>', and 'optimizer/<number>/<state>/<name of the parameter>'."""
    aliases: Mapping[str, str]
    """Another name of a tied parameter -> its first name, both as in `tensors`."""

    digest: str
    """Of the file with what is no tensor."""

    @property
    def objects_path(self) -> Path:
        """The file with what is no tensor."""
        return self.folder / f"data-{self.id}" / OBJECTS

    def objects(self) -> bytes:
        """What is no tensor.

        Raises:
            InputError: the file can't be read, or is not the one that was saved.
        """
        try:
            data = self.objects_path.read_bytes()
        except OSError as error:
            raise broken(self.objects_path, str(error)) from error
        if digest(data) != self.digest:
            raise broken(self.objects_path, "it is not the file that was saved: its hash differs")
        return data

    def find(self, name: str) -> SlicedTensor | None:
        """The tensor with this name, or with the first name of a tied one."""
        return self.tensors.get(self.aliases.get(name, name))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a checkpoint, complete or not."""
    return (folder / MANIFEST).is_file() or (folder.is_dir() and any(folder.glob("data-*/*-of-*")))


def digest(data: bytes) -> str:
    """A hash of a file's content."""
    return hashlib.sha256(data).hexdigest()


def manifest(
    id_: str, files: Mapping[str, int], objects: bytes, layouts: Mapping[str, str], aliases: Mapping[str, str]
) -> bytes:
    """The content of checkpoint.json.

    Args:
        files: name within the data folder -> its size in bytes.
        objects: the content of objects.bin.
        layouts: tensor -> '<layout> <shape of the whole>'.
    """
    body = {
        "format": FORMAT,
        "id": id_,
        "files": files,
        "objects": digest(objects),
        "tensors": layouts,
        "aliases": aliases,
    }
    return json.dumps(body, indent=1).encode()


def file_metadata(id_: str, name: str) -> dict[str, str]:
    """What the file of a rank says of itself: to another place in a checkpoint, or into another one, it is refused."""
    return {"checkpoint": id_, "file": name}


def layout_text(layout: Layout, shape: Sequence[int]) -> str:
    """A layout and the shape of the whole tensor: 'S(0; 7x8) 56,24'."""
    return f"{layout} {','.join(map(str, shape))}"


def saved_id(folder: Path) -> str:
    """The id of the checkpoint that counts; "" if there is none.

    Raises:
        OSError, ValueError, KeyError, TypeError: the manifest can't be read.
    """
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["id"])
    except FileNotFoundError:
        return ""


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; each claim of its files is checked, and none of their data is read.

    If a save completes meanwhile and removes the files, that one is read.

    Raises:
        InputError: there is none that is complete, or a file is missing, torn, or of another save.
    """
    tried: str | None = None
    while True:
        try:
            return _read_checkpoint(folder)
        except InputError:
            try:
                latest = saved_id(folder)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                latest = ""
            if latest in ("", tried):
                raise
            tried = latest


def _read_checkpoint(folder: Path) -> Checkpoint:
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        is_begun = folder.is_dir() and is_checkpoint(folder)
        raise InputError(
            "there is no complete checkpoint",
            where=str(folder),
            why="a save into it has not ended" if is_begun else f"it has no {MANIFEST}",
            attempt="a folder that ts.save has written",
        ) from error
    except OSError as error:
        raise broken(path, str(error)) from error
    try:
        body = json.loads(content)
        files, layouts, aliases = _tables(body)
        id_, objects = body["id"], body["objects"]
        if body["format"] != FORMAT or not re.fullmatch(r"[0-9a-f]{16}", id_) or OBJECTS not in files:
            raise ValueError(f"its format is {body['format']!r}, its id {id_!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise broken(path, f"it is not what ts.save writes: {type(error).__name__}: {error}") from error
    try:
        held = _held(folder / f"data-{id_}", id_, files)
    except OSError as error:
        raise broken(folder / f"data-{id_}", str(error)) from error
    tensors = {name: _sliced(path, name, text, held.pop(name, {})) for name, text in layouts.items()}
    if held:
        raise broken(path, f"it does not name {next(iter(held))!r}, which a file holds")
    lost = next((target for target in aliases.values() if target not in tensors), None)
    if lost is not None:
        raise broken(path, f"there is no tensor {lost!r}, for which it has other names")
    return Checkpoint(folder, id_, tensors, aliases, str(objects))


def model_tensors(folder: Path) -> dict[str, SlicedTensor]:
    """The parameters and buffers of a checkpoint, under all their names.

    Raises:
        InputError: as `read_checkpoint`.
    """
    checkpoint, prefix = read_checkpoint(folder), "model/"
    names = [name for name in (*checkpoint.tensors, *checkpoint.aliases) if name.startswith(prefix)]
    found = {name.removeprefix(prefix): checkpoint.find(name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _tables(body: Any) -> tuple[dict[str, int], dict[str, str], dict[str, str]]:
    files, layouts, aliases = body["files"], body["tensors"], body["aliases"]
    for table, kind in ((files, int), (layouts, str), (aliases, str)):
        if not (isinstance(table, dict) and all(type(value) is kind for value in table.values())):
            raise TypeError(f"a table of names has values that are no {kind.__name__}")
    return files, layouts, aliases


def _held(folder: Path, id_: str, files: Mapping[str, int]) -> dict[str, dict[int, FileTensor]]:
    """Tensor -> rank -> its slice."""
    found: dict[str, dict[int, FileTensor]] = {}
    for file, size in files.items():
        path, match = folder / file, re.fullmatch(r"([0-9]{1,6})-of-[0-9]{1,6}(\.[0-9]{1,6})?\.safetensors", file)
        if file != OBJECTS and match is None:
            raise broken(folder.parent / MANIFEST, f"it names {file!r}, which is not a file of a checkpoint")
        if not path.is_file():
            raise broken(path, "it is missing")
        if path.stat().st_size != size:
            raise broken(path, f"it has {path.stat().st_size} bytes, and had {size} when it was saved")
        if match is None:
            continue
        for name, tensor in tensors_in(path, file_metadata(id_, file)).items():
            if int(match[1]) in found.setdefault(name, {}):
                raise broken(path, "another file holds this rank's slice too", name)
            found[name][int(match[1])] = tensor
    return found


def _sliced(path: Path, name: str, text: str, held: Mapping[int, FileTensor]) -> SlicedTensor:
    layout_part, _, sizes = text.rpartition(" ")
    try:
        layout, shape = parse_layout(layout_part), tuple(int(n) for n in sizes.split(",") if n)
        is_sized = not isinstance(layout, Shard) or (
            layout.dim < len(shape) and parts_size(parts_of(shape[layout.dim], layout)) == shape[layout.dim]
        )
    except ValueError as error:
        raise broken(path, str(error), name) from error
    if not is_sized or (isinstance(layout, Shard) and layout.repeated):
        raise broken(path, f"{layout} is no layout of shape {shape}", name)
    slices = tuple(held[rank] for rank in sorted(held))
    is_split = isinstance(layout, Shard)
    if not slices or (is_split and [*sorted(held)] != [*range(len(held))]) or (not is_split and len(slices) > 1):
        raise broken(path, f"of {layout} the files hold the slices of ranks {sorted(held)}", name)
    for rank, file in enumerate(slices):
        expected = local_shape(shape, layout, rank, len(slices))
        if file.shape != expected or file.dtype != slices[0].dtype:
            raise broken(
                file.path, f"rank {rank}'s slice is {file.shape}, {file.dtype}; of {text} it is {expected}", name
            )
    return SlicedTensor(name, slices[0].dtype, shape, layout, slices)


def broken(path: Path, why: str, tensor: str = "") -> InputError:
    """The error for a checkpoint that can't be read."""
    return InputError(
        "the checkpoint can't be read",
        where=f"{path}: {tensor}" if tensor else str(path),
        why=why,
        attempt="an older checkpoint, or a copy of this one; nothing of it was loaded",
    )
