"""Exports a sharded model to a folder that other libraries load; all ranks write at once.

    format    which tensors go into which files, under which names: conversions recorded on lazy tensors
    parts     for each of those tensors, its parts among the model's tensors, and their places in the file
    write     each rank writes its parts into files of the final size, which are then renamed

No rank stores an unsharded tensor, except for conversions that can't run on parts: the ranks gather
those tensors one at a time, and a warning lists them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torchshard.checkpoints.contents import Item
from torchshard.checkpoints.formats import FolderFormat, folder_format, merged
from torchshard.checkpoints.saving import check_module, checked_folder, verify_states
from torchshard.checkpoints.writing import file_errors, unseen
from torchshard.core.errors import InputError
from torchshard.core.hashing import hash_text
from torchshard.core.user_files import warn
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.module import ShardedModule
from torchshard.weights.boxes import overlaps, place_of, whole_box
from torchshard.weights.lazy import LazyTensor
from torchshard.weights.parts import Parts, Read, Wanted
from torchshard.weights.progress import Progress
from torchshard.weights.recording import file_tensor
from torchshard.weights.safetensors_writer import FilePlan, TensorType
from torchshard.weights.stored_tensors import ModelTensor
from torchshard.weights.tape import Tape


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int | str = "50GB", merge: bool = False
) -> None:
    """Exports a sharded model for its library's `from_pretrained`; no rank stores it unsharded.

    All ranks must call it with one shared folder. For a transformers model, it writes the files of
    the unsharded model's `PreTrainedModel.save_pretrained` (experts may be in different files); for
    a model with peft adapters, the adapters, like `PeftModel.save_pretrained`; for any other model,
    model.safetensors, or several files with an index.

    Args:
        folder: created if missing. Files of an older model in it are replaced one by one: use
            another folder to keep the old model until this one is complete.
        max_shard_size: the maximum size of a file, as in transformers.
        merge: for a model with peft adapters, writes the model with the active adapters merged, as
            `merge_and_unload().save_pretrained` would. Merged weights are gathered one at a time.

    Raises:
        InputError: the model is not sharded, has no adapters to merge, or the folder can't be
            written to.
        DistributedError: the ranks have different states, or see different folders.
    """
    check_module(model, "ts.save_pretrained(model, folder)")
    ranks, what = Ranks.of(model.parameters()), "the ranks can't write this model together"
    verify_states(model, ranks)
    buffers = model.computed_buffers() if merge and isinstance(model, ShardedModule) else None

    def planned() -> _Job:
        return _planned(model, checked_folder(folder), max_shard_size, ranks, buffers)

    job = ranks.run_on_all(planned, InputError, what)
    facts = {"the folder": os.fspath(folder), **job.facts()}
    ranks.verify(facts, "the ranks write different models", "one folder and the same model on every rank")
    ranks.run_on_all(lambda: job.create(ranks), InputError, what)
    ranks.run_on_all(job.check_seen, InputError, "the ranks do not see one folder")
    ranks.run_on_all(job.write, InputError, what)
    ranks.run_on_all(lambda: job.complete(ranks), InputError, what)


@dataclass(frozen=True)
class _Output:
    """A tensor of a file."""

    file: FilePlan
    name: str
    tensor: Tensor
    """Recorded, or with values."""
    reads: Sequence[Read] | None
    """The parts of the model's tensors that form it; None if it must be computed unsharded."""


@dataclass(frozen=True)
class _Job:
    """The files of an export, and this rank's share of them."""

    folder: Path
    format: FolderFormat
    outputs: Sequence[_Output]
    items: Mapping[str, Item]
    """This rank's slices by name."""
    ranks: Ranks
    merges: bool
    """Whether adapters are merged, which needs unsharded weights."""

    @property
    def files(self) -> list[FilePlan]:
        """All files."""
        return list({id(output.file): output.file for output in self.outputs}.values())

    def facts(self) -> dict[str, str]:
        """Returns the facts that must match on all ranks."""
        return {file.path.name: f"{hash_text(file.header.hex()):x}" for file in self.files}

    def create(self, ranks: Ranks) -> None:
        """Creates the files, on the leader."""
        if ranks.number == 0:
            with file_errors(self.folder):
                for file in self.files:
                    file.path.parent.mkdir(parents=True, exist_ok=True)
                    file.create()

    def check_seen(self) -> None:
        """Checks that this rank sees the files."""
        missing = next((file for file in self.files if not file.path.is_file()), None)
        if missing is not None:
            raise unseen(self.folder, missing.path.name)

    def write(self) -> None:
        """Writes this rank's parts of all files, and returns after they are synced to disk."""
        whole = [output.name for output in self.outputs if output.reads is None]
        if whole and not self.merges:
            warn(f"{len(whole)} tensors were gathered whole, one at a time: {', '.join(whole[:3])}")
        total, written = sum(i.tensor.numel() * i.tensor.itemsize for i in self.items.values()), 0
        shown = Progress("writing weights", self.ranks.number, total)
        with file_errors(self.folder):
            handles = {id(file): os.open(file.path, os.O_RDWR) for file in self.files}
            try:
                for number, output in enumerate(self.outputs):
                    written += self._write_output(handles[id(output.file)], number, output)
                    shown.show(written)
                for handle in handles.values():
                    os.fsync(handle)
            finally:
                for handle in handles.values():
                    os.close(handle)
        shown.end()

    def _write_output(self, handle: int, number: int, output: _Output) -> int:
        if output.reads is None:
            value = output.tensor.value() if isinstance(output.tensor, LazyTensor) else output.tensor
            if self._writes_whole(number):
                output.file.write(handle, output.name, value)
            return value.numel() * value.itemsize
        written = 0
        for part, place, dtypes in self._own_parts(number, output.reads):
            for dtype in dtypes:
                part = part.to(dtype)
            output.file.write(handle, output.name, part, place)
            written += part.numel() * part.itemsize
        return written

    def _writes_whole(self, number: int) -> bool:
        """Returns whether this rank writes an output's replicated data: ranks take turns."""
        return number % self.ranks.count == self.ranks.number

    def _own_parts(self, number: int, reads: Sequence[Read]) -> Iterator[tuple[Tensor, Tensor, Sequence[torch.dtype]]]:
        """Yields (part of this rank's slices, its place in the output, dtypes to cast it to)."""
        for read in reads:
            item = self.items[read.tensor.name]
            holder, _ = self.ranks.holders(item.sharding)
            if not (holder == 0 if item.sharding.is_split else self._writes_whole(number)):
                continue
            for own, place in overlaps(item.shape, self.ranks.cuts(item.sharding), read.box, read.into):
                yield item.tensor[tuple(slice(*bounds) for bounds in own)], place, read.dtypes

    def complete(self, ranks: Ranks) -> None:
        """Renames the files to their final names and writes the other files, on the leader."""
        if ranks.number == 0:
            with file_errors(self.folder):
                for file in self.files:
                    file.path.replace(file.path.with_suffix(""))
                self.format.write_others(self.folder)


def _planned(
    model: nn.Module, folder: Path, max_shard_size: int | str, ranks: Ranks, buffers: Mapping[str, Tensor] | None
) -> _Job:
    """Plans the files and this rank's parts.

    Args:
        buffers: None, or to merge adapters: the buffers that state dicts omit.
    """
    if not isinstance(model, ShardedModule):
        raise InputError(
            "save_pretrained writes sharded models",
            where="ts.save_pretrained",
            why=f"this is a {type(model).__name__}, that each rank holds whole",
            attempt="model.save_pretrained(folder) on one rank, if it has that; or safetensors.torch.save_file",
        )
    tape = Tape()
    items, state = dict[str, Item](), dict[str, Tensor]()
    for name, (first, value, whole) in model.stored_tensors().items():
        items.setdefault(first, Item.of(value))
        if name == first:
            state[name] = file_tensor(tape, ModelTensor(name, value.dtype, items[name].shape, whole))
        else:
            state[name] = state[first]
    source = model.source
    if buffers is not None:
        source, state = merged(source, {**buffers, **state})
    format_ = folder_format(source, state, max_shard_size)
    outputs, parts = list[_Output](), Parts(tape)
    for path, tensors in format_.files.items():
        types = {name: TensorType(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        file = FilePlan.of(folder / f"{path}.part", types, {"format": "pt"})
        for name, tensor in tensors.items():
            wanted = isinstance(tensor, LazyTensor) and Wanted(
                tensor.slot, whole_box(tensor.shape), place_of(tensor.shape)
            )
            reads = parts.reads(wanted) if wanted else None
            outputs.append(_Output(file, name, tensor, reads))
    return _Job(folder, format_, outputs, items, ranks, buffers is not None)
