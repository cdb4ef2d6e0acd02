"""One rank's part of a save: its file and, on the leader, the manifest."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from torchshard.checkpoints.completion import Completion
from torchshard.checkpoints.contents import Contents, Item, generator_states
from torchshard.core.errors import InputError, ShardError
from torchshard.distributed.objects import encode
from torchshard.distributed.ranks import Ranks
from torchshard.weights.checkpoint_files import FORMAT, MANIFEST, OBJECTS, digest, file_metadata, layout_text, saved_id
from torchshard.weights.progress import Progress
from torchshard.weights.safetensors_writer import FilePlan, TensorType, replace_file, sync_folder


def begin_job(folder: Path, contents: Contents, objects: Mapping[str, bytes], ranks: Ranks) -> Job:
    """Creates the data folder that all ranks will write to; all ranks must call it.

    Raises:
        InputError: it can't be created, a rank does not see it, or files don't support a dtype.
    """
    id_ = ranks.random_name("ts.save")
    states = ranks.of_replicas(encode(generator_states(), allow_pickle=False))
    data = folder / f"data-{id_}"

    def make() -> None:
        if ranks.number == 0:
            with file_errors(folder):
                data.mkdir(parents=True)
                _remove_data(folder, data)

    def job() -> Job:
        if not data.is_dir():
            raise unseen(folder, data.name)
        mine = {name: contents.items[name].tensor for name in _own_share(contents.items, ranks)}
        types = {name: TensorType(tensor.dtype, tuple(tensor.shape)) for name, tensor in mine.items()}
        name = file_name(ranks.group.rank, ranks.group.size, ranks.replicas.rank)
        file = FilePlan.of(data / name, types, file_metadata(id_, name))
        saved = encode({"objects": dict(objects), "rng": states}, allow_pickle=False)
        return Job(ranks, id_, file, mine, contents, saved, Completion(ranks, id_, data))

    ranks.run_on_all(make, InputError, "the folder can't be written to")
    return ranks.run_on_all(job, InputError, "the ranks can't save this checkpoint together")


def unseen(folder: Path, name: str) -> InputError:
    """Returns the error for a rank that does not see rank 0's files."""
    return InputError(
        "the ranks do not see one folder",
        where=str(folder),
        why=f"rank 0 has made {name} in it, and this rank does not find that",
        attempt="a folder on a file system that all ranks share",
    )


def file_name(rank: int, ranks: int, replica: int) -> str:
    """Returns the name of a rank's file, without a replica number in the first replica."""
    return f"{rank}-of-{ranks}{f'.{replica}' if replica else ''}.safetensors"


def _own_share(items: Mapping[str, Item], ranks: Ranks) -> Iterator[str]:
    """Yields the tensors that this rank writes.

    Holders of a slice take turns; a replicated tensor goes to the rank with the fewest bytes.
    """
    bytes_ = [0] * ranks.count
    for turn, (name, item) in enumerate(items.items()):
        if item.sharding.is_split:
            number, count = ranks.holders(item.sharding)
            is_own = turn % count == number
        else:
            writer = bytes_.index(min(bytes_))
            bytes_[writer] += item.tensor.numel() * item.tensor.itemsize
            is_own = writer == ranks.number
        if is_own:
            yield name


@dataclass(frozen=True)
class Job:
    """One rank's work in a save."""

    ranks: Ranks
    id: str
    file: FilePlan
    mine: Mapping[str, Tensor]
    contents: Contents
    objects: bytes
    """The encoded objects, as of the beginning of the save."""
    completion: Completion

    @property
    def folder(self) -> Path:
        """The folder of the manifest."""
        return self.file.path.parent.parent

    def run(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the tensors, and completes the checkpoint with all ranks.

        Raises:
            ShardError: a rank has failed.
        """
        failure: ShardError | None = None
        try:
            with file_errors(self.file.path):
                self._write(tensors)
        except ShardError as error:
            failure = error
        except Exception as error:  # any error must be reported: the other ranks wait for it
            why = f"{type(error).__name__}: {error}"
            failure = InputError("the checkpoint can't be written", where=str(self.file.path), why=why)
        self.completion.finish(failure, self._commit)

    def _write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        total, written = sum(type_.bytes_ for type_ in self.file.types.values()), 0
        shown = Progress("writing a checkpoint", self.ranks.number, total)
        self.file.create()
        with self.file.path.open("r+b") as file:
            for name, tensor in tensors:
                self.file.write(file.fileno(), name, tensor)
                written += tensor.numel() * tensor.itemsize
                shown.show(written)
            os.fsync(file.fileno())
        shown.end()
        if self.ranks.number == 0:
            replace_file(self.file.path.with_name(OBJECTS), self.objects)

    def _commit(self) -> None:
        ranks, replicas = self.ranks.group.size, self.ranks.replicas.size
        names = [file_name(rank, ranks, replica) for replica in range(replicas) for rank in range(ranks)]
        data = self.file.path.parent
        with file_errors(self.folder):
            sizes = {name: (data / name).stat().st_size for name in (*names, OBJECTS)}
            # data must be on disk before the manifest names it
            sync_folder(data)
            replace_file(self.folder / MANIFEST, self._manifest(sizes))
            _remove_data(self.folder)

    def _manifest(self, sizes: Mapping[str, int]) -> bytes:
        """Returns the content of checkpoint.json.

        Args:
            sizes: name of a file in the data folder -> its size in bytes.
        """
        body = {
            "format": FORMAT,
            "id": self.id,
            "files": sizes,
            "mesh": {axis.name: axis.size for axis in self.ranks.mesh.axes},
            "objects": digest(self.objects),
            "tensors": {name: layout_text(item.sharding, item.shape) for name, item in self.contents.items.items()},
            "aliases": self.contents.aliases,
        }
        return json.dumps(body, indent=1).encode()


@contextlib.contextmanager
def file_errors(place: Path) -> Iterator[None]:
    """Converts file system errors into `InputError`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "the checkpoint can't be written",
            where=str(place),
            why=error.strerror or str(error),
            attempt="a folder that can be written to, with room for the checkpoint beside the one before it",
        ) from error


def _remove_data(folder: Path, *kept: Path) -> None:
    """Removes the data of superseded and unfinished saves, if possible."""
    try:
        names = {f"data-{saved_id(folder)}", *(path.name for path in kept)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # the unreadable manifest may name the only complete data
    for place in folder.glob("data-*"):
        if place.name not in names and re.fullmatch("data-[0-9a-f]{16}", place.name):
            shutil.rmtree(place, ignore_errors=True)
