"""Checkpoints on disk: the state of a training run, as slices in safetensors files.

    checkpoint.json              the manifest: lists the files of the checkpoint; replaced last, atomically
    data-<id>/0-of-2.safetensors the slices of rank 0 of 2, and its share of the replicated tensors
    data-<id>/objects.bin        other objects: settings of optimizers, schedulers, the user's data

An interrupted save leaves a folder without checkpoint.json, or a data folder that the manifest does
not name. The files contain no pickles, so opening a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.layouts import Shard, parts_of, parts_size
from torchshard.core.mesh import DATA, MODEL, Mesh, MeshAxis
from torchshard.core.sharding import Sharding, local_shape, placements_in
from torchshard.core.types import is_count, is_of
from torchshard.weights.boxes import Box, overlaps
from torchshard.weights.safetensors_files import tensors_in
from torchshard.weights.stored_tensors import FileTensor, StoredTensor

MANIFEST: Final = "checkpoint.json"
OBJECTS: Final = "objects.bin"
FORMAT: Final = "torchshard checkpoint 1"


@dataclass(frozen=True)
class SlicedTensor(StoredTensor):
    """A full tensor, stored as the ranks' slices in several files."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sharding: Sharding
    """Its sharding when it was saved."""
    slices: tuple[FileTensor, ...]
    """The distinct slices in rank order; one for a replicated tensor."""

    def read(self, box: Box, into: Tensor, dtypes: Sequence[torch.dtype] = (), spare: int = 0) -> int:
        """Reads a box into a tensor, see `StoredTensor.read`; ignores `spare` and reads only the box's bytes."""
        return sum(
            file.read(own, target, dtypes)
            for cuts, file in zip(self.sharding.all_cuts(), self.slices, strict=True)
            for own, target in overlaps(self.shape, cuts, box, into)
        )

    def buffer_bytes(self, into: Tensor, dtypes: Sequence[torch.dtype] = ()) -> int:
        """Returns the bytes that `read` allocates in addition to `into`."""
        return self.slices[0].buffer_bytes(into, dtypes)

    def sample(self) -> bytes:
        """Returns the joined samples of the slices."""
        return b"".join(file.sample() for file in self.slices)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    """The folder of the manifest."""
    id: str
    """The id of the save: 16 hex digits."""
    tensors: Mapping[str, SlicedTensor]
    """By name: 'model/<name>' or 'optimizer/<number>/<state>/<name of the parameter>'."""
    aliases: Mapping[str, str]
    """Alias of a tied parameter -> its first name, both as in `tensors`."""
    digest: str
    """The hash of objects.bin."""

    @property
    def objects_path(self) -> Path:
        """The path of objects.bin."""
        return self.folder / f"data-{self.id}" / OBJECTS

    def objects(self) -> bytes:
        """Returns the content of objects.bin.

        Raises:
            InputError: the file can't be read, or its hash differs from the manifest's.
        """
        try:
            data = self.objects_path.read_bytes()
        except OSError as error:
            raise broken(self.objects_path, str(error)) from error
        if digest(data) != self.digest:
            raise broken(self.objects_path, "it is not the file that was saved: its hash differs")
        return data

    def find(self, name: str) -> SlicedTensor | None:
        """Returns the tensor with this name or alias."""
        return self.tensors.get(self.aliases.get(name, name))


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder contains a checkpoint, complete or not."""
    return (folder / MANIFEST).is_file() or (folder.is_dir() and any(folder.glob("data-*/*-of-*")))


def digest(data: bytes) -> str:
    """Returns the hash of a file's content."""
    return hashlib.sha256(data).hexdigest()


def file_metadata(id_: str, name: str) -> dict[str, str]:
    """Returns the metadata of a rank's file; a file with another id or name is rejected when it is opened."""
    return {"checkpoint": id_, "file": name}


def layout_text(of: Sharding, shape: Sequence[int]) -> str:
    """Returns a tensor's sharding and global shape as text: 'S(0; 7x8) 56,24'."""
    return f"{of.short_text} {','.join(map(str, shape))}"


def saved_id(folder: Path) -> str:
    """Returns the id in the manifest; "" if the manifest is missing.

    Raises:
        OSError, ValueError, KeyError, TypeError: the manifest can't be read.
    """
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["id"])
    except FileNotFoundError:
        return ""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Opens the checkpoint in a folder: checks all headers and sizes, and reads no tensor data.

    If a concurrent save completes and removes the files, it opens the new checkpoint.

    Raises:
        InputError: the folder has no complete checkpoint, or a file is missing, torn, or of another save.
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
        files, layouts, aliases = _table(body["files"], int), _table(body["tensors"], str), _table(body["aliases"], str)
        saved = _mesh(body["mesh"]) if "mesh" in body else None
        id_, objects = body["id"], body["objects"]
        if body["format"] != FORMAT or not re.fullmatch(r"[0-9a-f]{16}", id_) or OBJECTS not in files:
            raise ValueError(f"its format is {body['format']!r}, its id {id_!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise broken(path, f"it is not what ts.save writes: {type(error).__name__}: {error}") from error
    try:
        mesh, held = _held(folder / f"data-{id_}", id_, files, saved)
    except OSError as error:
        raise broken(folder / f"data-{id_}", str(error)) from error
    tensors = {name: _sliced(path, name, text, mesh, held.pop(name, {})) for name, text in layouts.items()}
    if held:
        raise broken(path, f"it does not name {next(iter(held))!r}, which a file holds")
    lost = next((target for target in aliases.values() if target not in tensors), None)
    if lost is not None:
        raise broken(path, f"there is no tensor {lost!r}, for which it has other names")
    return Checkpoint(folder, id_, tensors, aliases, str(objects))


def model_tensors(folder: Path) -> dict[str, SlicedTensor]:
    """Returns the parameters and buffers of a checkpoint, under all their names.

    Raises:
        InputError: the checkpoint can't be read.
    """
    checkpoint, prefix = read_checkpoint(folder), "model/"
    names = [name for name in (*checkpoint.tensors, *checkpoint.aliases) if name.startswith(prefix)]
    found = {name.removeprefix(prefix): checkpoint.find(name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


T = TypeVar("T")


def _table(value: object, kind: type[T]) -> dict[str, T]:
    return {name: is_of(kind, each) for name, each in is_of(dict, value).items()}


def _mesh(sizes: object) -> Mesh:
    """Returns the mesh of the ranks that saved."""
    if not isinstance(sizes, dict) or not all(map(is_count, sizes.values())):
        raise TypeError(f"its mesh is {sizes!r:.80}")
    return Mesh(tuple(MeshAxis(size, name) for name, size in sizes.items()))


_Held = dict[int, FileTensor]
"""Number of the rank that wrote a tensor -> its slice."""
_FILE: Final = r"(?P<rank>[0-9]{1,6})-of-(?P<ranks>[0-9]{1,6})(\.(?P<replica>[0-9]{1,6}))?\.safetensors"


def _held(folder: Path, id_: str, files: Mapping[str, int], saved: Mesh | None) -> tuple[Mesh, dict[str, _Held]]:
    """Returns (the mesh of the ranks that saved, tensor -> its slices).

    Args:
        saved: the mesh in the manifest. Older manifests lack it; file names then give the sizes.
    """
    found, replicas, ranks = dict[str, _Held](), 1, 1
    for file, size in files.items():
        path, match = folder / file, re.fullmatch(_FILE, file)
        if file != OBJECTS and match is None:
            raise broken(folder.parent / MANIFEST, f"it names {file!r}, which is not a file of a checkpoint")
        if not path.is_file():
            raise broken(path, "it is missing")
        if path.stat().st_size != size:
            raise broken(path, f"it has {path.stat().st_size} bytes, and had {size} when it was saved")
        if match is None:
            continue
        replica, rank = int(match["replica"] or 0), int(match["rank"])
        replicas, ranks = max(replicas, replica + 1), max(ranks, int(match["ranks"]))
        for name, tensor in tensors_in(path, file_metadata(id_, file)).items():
            found.setdefault(name, {})[replica * int(match["ranks"]) + rank] = tensor
    mesh = saved or Mesh((MeshAxis(replicas, DATA), MeshAxis(ranks, MODEL)))
    if mesh.size != replicas * ranks:
        raise broken(folder.parent / MANIFEST, f"its mesh is of {mesh.size} ranks, and its files of {replicas * ranks}")
    return mesh, found


def _sliced(path: Path, name: str, text: str, mesh: Mesh, held: _Held) -> SlicedTensor:
    word_part, _, sizes = text.rpartition(" ")
    try:
        spelled, shape = placements_in(word_part, mesh), tuple(int(n) for n in sizes.split(",") if n)
    except ValueError as error:
        raise broken(path, str(error), name) from error
    of = Sharding.of(*spelled)
    if not all(_has_shape(layout, shape) for _, layout in spelled if isinstance(layout, Shard)):
        raise broken(path, f"{word_part} is no layout of shape {shape}", name)
    split = [axis.name for axis, layout in of if isinstance(layout, Shard)]
    found = dict[tuple[int, ...], FileTensor]()
    for number, tensor in held.items():
        place = mesh.place(number)
        if found.setdefault(tuple(place[axis] for axis in split), tensor) is not tensor:
            raise broken(tensor.path, "another file holds this rank's slice too", name)
    # file names are not trusted: the list of all cuts is built only if the files have that many slices
    is_complete = len(found) == math.prod(axis.size for axis, layout in of if isinstance(layout, Shard))
    of_all = {tuple(cut.rank for cut in cuts): cuts for cuts in of.all_cuts()} if is_complete else {}
    if found.keys() != of_all.keys() or not is_complete:
        raise broken(path, f"of {word_part} the files hold the slices of ranks {sorted(held)}", name)
    slices = tuple(found[ranks] for ranks in of_all)
    for cuts, file in zip(of_all.values(), slices, strict=True):
        expected = local_shape(shape, cuts)
        if file.shape != expected or file.dtype != slices[0].dtype:
            why = f"the slice is {file.shape}, {file.dtype}; of {text} it is {expected}"
            raise broken(file.path, why, name)
    return SlicedTensor(name, slices[0].dtype, shape, of, slices)


def _has_shape(layout: Shard, shape: Sequence[int]) -> bool:
    if layout.repeated or layout.dim >= len(shape):
        return False
    return parts_size(parts_of(shape[layout.dim], layout)) == shape[layout.dim]


def broken(path: Path, why: str, tensor: str = "") -> InputError:
    """Returns the error for a checkpoint that can't be read."""
    return InputError(
        "the checkpoint can't be read",
        where=f"{path}: {tensor}" if tensor else str(path),
        why=why,
        attempt="an older checkpoint, or a copy of this one; nothing of it was loaded",
    )
