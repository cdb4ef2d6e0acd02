"""Writes a checkpoint: each rank its slices, at the same time, and one file last that makes them count.

    the ranks agree on an id     folder/data-<id>/ is made; what an earlier save has left half done is removed
    each writes its file         0-of-2.safetensors, 1-of-2.safetensors, and waits until it is on the disk
    all have written             checkpoint.json is replaced in one rename, and the data that it named before removed

A process that dies at any moment leaves the last complete checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from torchshard.checkpoints.contents import (
    Contents,
    Item,
    Stateful,
    as_list,
    contents_of,
    encoded,
    rng_states,
    unwrapped,
)
from torchshard.checkpoints.copies import Copies
from torchshard.checkpoints.ranks import Completion, Ranks
from torchshard.core.errors import DistributedError, InputError, ShardError
from torchshard.core.layouts import Shard, type_text
from torchshard.distributed.group import Group
from torchshard.distributed.objects import encode
from torchshard.plans.machine import read_size
from torchshard.runtime.module import ShardedModule
from torchshard.weights.checkpoint_files import MANIFEST, OBJECTS, layout_text, manifest
from torchshard.weights.progress import Progress
from torchshard.weights.safetensors_writer import FilePlan, TensorType, replace_file, sync_folder

_LOG = logging.getLogger(__name__)


class Saving:
    """A save that was begun."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: ShardError | None = None

    def done(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
            DistributedError, InputError: it failed on some rank; the last complete checkpoint is as it was.
        """
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def run_in_background(self, job: _Job, copies: Copies) -> None:
        """Writes copies of the tensors; returns when the last of them is made."""

        def run() -> None:
            try:
                job.run(copies)
            except ShardError as error:
                self._failure = error
                _LOG.error("%s", error)
            finally:
                copies.close()

        self._thread = threading.Thread(target=run, name="torchshard checkpoint")
        self._thread.start()
        with copies.filling():
            for name, tensor in job.mine.items():
                copies.put(name, tensor)


_latest = Saving()
"""The save that was begun last. The next one waits for it: two at a time would double the memory of copies, and remove
each other's files."""


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    extra: object = None,
    wait: bool = True,
    copies: str | float | None = None,
) -> Saving:
    """Saves a training run: each rank writes its slices. `load` takes them into any plan and any number of ranks.

    A collective call: all ranks make it, those of all replicas under data parallelism too. The folder must be on a file
    system that all of them share. A folder that holds a checkpoint keeps it until the new one is complete: a process
    that is killed at any moment loses nothing.

    Args:
        folder: made if it is missing; it holds one checkpoint.
        model: a sharded model, one that has sharded models as parts, or an unsharded one; DDP around it is seen
            through.
        optimizer: one or several, in the same order at `load`; each must treat every element alone, as SGD and AdamW.
        scheduler: one or several learning-rate schedulers, or what else has a state dict of plain data.
        extra: plain data of the caller's (numbers, texts, tensors, and containers of them), which `load` returns; that
            of rank 0 is saved. RNG states are saved besides: PyTorch's, Python's and NumPy's, of each replica.
        wait: False to write in the background, from copies; the result's `wait()` tells of errors, and so does the
            next `save`, which waits for this one.
        copies: the most memory that copies may take with `wait=False`, such as "4GiB": `save` returns when what is not
            written yet fits; None for no limit.

    Returns:
        the save, complete if `wait`.

    Raises:
        InputError: something can't be saved, or the folder can't be written to.
        DistributedError: the ranks save different things or hold different states, do not see one folder, or one of
            them could not write.
    """
    global _latest
    _latest.wait()
    ranks, what = Ranks.own(), "the ranks can't save this checkpoint together"
    contents, most_bytes = ranks.run_on_all(
        lambda: (
            contents_of(unwrapped(model), as_list(optimizer), as_list(scheduler), extra),
            read_size(copies),
        ),
        InputError,
        what,
    )
    ranks.verify(_facts(contents, folder), "the ranks save different checkpoints")
    verify_states(model, ranks)
    job = _begin(Path(folder), contents, ranks)
    _latest = Saving()
    if wait:
        job.run(job.mine.items())
    else:
        _latest.run_in_background(job, Copies(math.inf if most_bytes is None else most_bytes))
    return _latest


def verify_states(model: nn.Module, ranks: Ranks) -> None:
    """Raises DistributedError if the ranks have done different things with a sharded model, or hold other values."""

    def verify() -> None:
        for module in model.modules():
            if isinstance(module, ShardedModule):
                module.verify_state()

    ranks.run_on_all(verify, DistributedError, "the ranks hold different states")


def _facts(contents: Contents, folder: str | os.PathLike[str]) -> dict[str, str]:
    items = {name: f"{type_text(i.tensor.dtype, i.shape)} {i.layout}" for name, i in contents.items.items()}
    return {"the folder": os.fspath(folder), **items, **contents.aliases}


def _begin(folder: Path, contents: Contents, ranks: Ranks) -> _Job:
    """Makes the data folder, in which all ranks are about to write."""
    id_ = ranks.leaders(secrets.token_hex(8).encode()).decode()
    states = ranks.of_replicas(encoded({"the RNG state": rng_states()}))
    data = folder / f"data-{id_}"

    def make() -> None:
        if ranks.number == 0:
            with file_errors(folder):
                data.mkdir(parents=True)
                _remove_data(folder, data, _named(folder))

    def see() -> None:
        if not data.is_dir():
            raise InputError(
                "the ranks do not see one folder",
                where=str(folder),
                why=f"rank 0 has made {data.name} in it, and this rank does not find that",
                attempt="a folder on a file system that all ranks share",
            )

    ranks.run_on_all(make, InputError, "the folder can't be written to")
    ranks.run_on_all(see, InputError, "the ranks do not see one folder")
    mine = {name: contents.items[name].tensor for name in _own_share(contents.items, ranks)}
    types = {name: TensorType(tensor.dtype, tuple(tensor.shape)) for name, tensor in mine.items()}
    file = FilePlan.of(data / file_name(ranks.group, ranks.replicas.rank), types, {"checkpoint": id_})
    return _Job(ranks, id_, file, mine, contents, states)


def file_name(group: Group, replica: int) -> str:
    """The file of a rank; those of the first replica have no number."""
    return f"{group.rank}-of-{group.size}{f'.{replica}' if replica else ''}.safetensors"


def _own_share(items: Mapping[str, Item], ranks: Ranks) -> Iterator[str]:
    """The tensors that this rank writes: its slices, in turn with its replicas, and a share of what all hold whole."""
    bytes_ = [0] * ranks.count
    for turn, (name, item) in enumerate(items.items()):
        if isinstance(item.layout, Shard):
            is_own = turn % ranks.replicas.size == ranks.replicas.rank
        else:
            writer = bytes_.index(min(bytes_))
            bytes_[writer] += item.tensor.numel() * item.tensor.itemsize
            is_own = writer == ranks.number
        if is_own:
            yield name


@dataclass(frozen=True)
class _Job:
    """What this rank has to write."""

    ranks: Ranks
    id: str
    file: FilePlan
    mine: Mapping[str, Tensor]
    contents: Contents
    rng_states: Sequence[bytes]
    """Of each replica."""

    @property
    def folder(self) -> Path:
        """That holds the manifest."""
        return self.file.path.parent.parent

    def run(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the tensors, and completes the checkpoint with all ranks.

        Raises:
            ShardError: it failed on some rank.
        """
        failure: ShardError | None = None
        try:
            with file_errors(self.file.path):
                self._write(tensors)
        except ShardError as error:
            failure = error
        Completion(self.ranks, self.id).finish(failure, self._commit)

    def _write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        shown, written = Progress("writing a checkpoint", self.ranks.number), 0
        self.file.create()
        with self.file.path.open("r+b") as file:
            for name, tensor in tensors:
                self.file.write(file.fileno(), name, tensor)
                written += tensor.numel() * tensor.itemsize
                shown.show(written)
            os.fsync(file.fileno())
        shown.end()
        if self.ranks.number == 0:
            replace_file(self.file.path.with_name(OBJECTS), self._objects())

    def _objects(self) -> bytes:
        return encode({**self.contents.objects, "rng": list(self.rng_states)}, allow_pickle=False)

    def _commit(self) -> None:
        group, replicas = self.ranks.group, self.ranks.replicas
        places = [replace(group, rank=rank) for rank in range(group.size)]
        names = [file_name(place, replica) for replica in range(replicas.size) for place in places]
        data = self.file.path.parent
        with file_errors(self.folder):
            sizes = {name: (data / name).stat().st_size for name in (*names, OBJECTS)}
            layouts = {name: layout_text(item.layout, item.shape) for name, item in self.contents.items.items()}
            sync_folder(data)
            replace_file(self.folder / MANIFEST, manifest(self.id, sizes, layouts, self.contents.aliases))
            _remove_data(self.folder, data)


@contextlib.contextmanager
def file_errors(place: Path) -> Iterator[None]:
    """Turns errors of the file system into ours."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "the checkpoint can't be written",
            where=str(place),
            why=error.strerror or str(error),
            attempt="a folder that can be written to, with room for the checkpoint beside the one before it",
        ) from error


def _named(folder: Path) -> str:
    """The data folder that counts, or "" if none does."""
    try:
        return f"data-{json.loads((folder / MANIFEST).read_bytes())['id']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remove_data(folder: Path, *kept: Path | str) -> None:
    """Removes the data of other saves, as far as that can be done."""
    names = {Path(name).name for name in kept}
    for place in folder.glob("data-*"):
        if place.name not in names and re.fullmatch("data-[0-9a-f]{16}", place.name):
            shutil.rmtree(place, ignore_errors=True)
