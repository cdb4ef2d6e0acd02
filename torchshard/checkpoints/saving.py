"""Writes a checkpoint: each rank writes its slices at the same time; a last file makes them valid.

    the ranks agree on an id     creates folder/data-<id>/, removes the data of unfinished saves
    each writes its file         0-of-2.safetensors, 1-of-2.safetensors, synced to disk
    all have written             replaces checkpoint.json in one rename, removes the superseded data

If a process dies at any moment, the last complete checkpoint remains intact.

`torch.distributed.checkpoint` (PyTorch 2.13) also writes each rank's slices, and can save a sharded
model. But it replaces the files of an earlier save in the same folder in place, and its metadata is
a pickle. This room could go if DCP kept the last save until the next is complete and stored its
metadata as data.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from torchshard.checkpoints.contents import Contents, Stateful, as_list, contents_of, hashes, unwrapped
from torchshard.checkpoints.copies import Copies
from torchshard.checkpoints.writing import Job, begin_job
from torchshard.core.errors import DistributedError, InputError, ShardError
from torchshard.core.layouts import dtype_text
from torchshard.core.mesh import MODEL
from torchshard.core.sharding import split_text
from torchshard.core.units import read_size
from torchshard.distributed.objects import encode
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.module import ShardedModule
from torchshard.weights.checkpoint_files import digest
from torchshard.weights.local_slice import LocalSlice

_LOG = logging.getLogger(__name__)


class Saving:
    """A save in progress or finished."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: ShardError | None = None

    def done(self) -> bool:
        """Returns whether the checkpoint is complete or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            DistributedError, InputError: a rank has failed; the last complete checkpoint is intact.
        """
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def run_in_background(self, job: Job, copies: Copies) -> None:
        """Writes copies of the tensors in a thread; returns after the last copy is made.

        Raises:
            InputError: a tensor can't be copied.
        """

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
        try:
            with copies.filling():
                for name, tensor in job.mine.items():
                    copies.put(name, tensor)
        except Exception:  # the thread reports it to the other ranks and raises the full error
            self.wait()
            raise


_latest = Saving()
"""The most recent save. The next one waits for it: two at a time would double the memory for
copies, and remove each other's files.
"""


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
    """Saves a training run; `load` restores it under any plan and number of ranks.

    Each rank writes its slices. All ranks must call it, including those of all replicas under data
    parallelism, and share the folder's file system. An earlier checkpoint in the folder is kept
    until the new one is complete, so a process killed at any moment does not destroy it.

    Args:
        folder: created if missing; it contains one checkpoint.
        model: a sharded model, a model with sharded submodules, or an unsharded one; also inside
            DDP or torch.compile. Gradients are not saved.
        optimizer: one or several, in the same order as for `load`.
        scheduler: one or several learning-rate schedulers, or other objects with a state dict of
            plain data.
        extra: plain user data (numbers, texts, tensors, and containers of them), which `load`
            returns; rank 0's is saved. RNG states are always saved: PyTorch's, Python's and
            NumPy's, of each replica.
        wait: False writes copies in the background. Errors raise in the result's `wait()` and in
            the next `save`, which waits for this one.
        copies: the memory limit for copies with `wait=False`, such as "4GiB": `save` returns when
            the unwritten rest fits; None for no limit.

    Returns:
        the save, complete if `wait`.

    Raises:
        InputError: something can't be saved, or the folder can't be written to.
        DistributedError: the ranks' contents or states differ, they see different folders, or a
            rank could not write.
    """
    global _latest
    check_module(model, "ts.save(folder, model, optimizer)")
    ranks, what = Ranks.of(model.parameters()), "the ranks can't save this checkpoint together"

    def prepare() -> tuple[Path, Contents, dict[str, bytes], float | None]:
        # raises the error of an earlier background save
        _latest.wait()
        contents = contents_of(unwrapped(model), as_list(optimizer), as_list(scheduler), extra)
        return checked_folder(folder), contents, _encoded(contents.objects), read_size(copies, "copies")

    place, contents, objects, most_bytes = ranks.run_on_all(prepare, InputError, what)
    verify_states(model, ranks)
    _verify(contents, objects, place, ranks, buffers={name for name, _ in unwrapped(model).named_buffers()})
    job = begin_job(place, contents, objects, ranks)
    _latest = Saving()
    if wait:
        job.run(job.mine.items())
    else:
        _latest.run_in_background(job, Copies(math.inf if most_bytes is None else most_bytes))
    return _latest


def check_module(model: object, call: str) -> None:
    """Checks that the model argument is a module.

    Raises:
        InputError: it is not.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is no model", where="model", why="it is no nn.Module", attempt=call)


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns the folder argument as a path.

    Raises:
        InputError: it is not a path.
    """
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"invalid folder {folder!r}", where="folder", why="it is no path", attempt='"checkpoint"')
    return Path(path)


def _verify(contents: Contents, objects: Mapping[str, bytes], folder: Path, ranks: Ranks, *, buffers: set[str]) -> None:
    """Checks that the ranks save equal contents, because a replicated tensor is saved once.

    Args:
        objects: must match on all ranks, except the user's `extra`; rank 0's are saved.
        buffers: may differ between replicas, like statistics of their own batches; the first
            replica's are saved.
    """
    what, items = "the ranks save different checkpoints", contents.items
    types = {name: split_text(i.shape, i.sharding, dtype_text(i.tensor.dtype)) for name, i in items.items()}
    facts = {"the folder": os.fspath(folder), **types, **contents.aliases}
    facts |= {f"what is no tensor of the {kind}": digest(data) for kind, data in objects.items() if kind != "extra"}
    common = {name: item for name, item in items.items() if name.removeprefix("model/") not in buffers}
    if ranks.count > 1:
        ranks.verify(facts, what, "one folder, the same model and the same optimizers on every rank")
        for axis, group in ranks.groups.items():
            if group.size > 1:
                ranks.verify_along(axis, hashes(items if axis == MODEL else common, axis), what)


def verify_states(model: nn.Module, ranks: Ranks) -> None:
    """Raises DistributedError if the ranks' sharded models differ in their histories or values."""

    def verify() -> None:
        for module in model.modules():
            if isinstance(module, ShardedModule):
                module.verify_state()

    ranks.run_on_all(verify, DistributedError, "the ranks hold different states")


def _encoded(objects: Mapping[str, object]) -> dict[str, bytes]:
    """Encodes plain objects as bytes, each on its own.

    Raises:
        InputError: one of them is not plain.
    """
    parts = dict[str, bytes]()
    for name, value in objects.items():
        place = next(_slices_in(value, name), None)
        if place is not None:
            raise InputError(
                f"a checkpoint can't hold what {name} has",
                where=f"ts.save, {place}",
                why="it is this rank's slice, and what is no tensor of the model is written once for all ranks",
                attempt="ts.save(another folder, copy), for a copy.deepcopy(model) that holds such tensors; or whole "
                "tensors, as full_state_dict() has them",
            )
        try:
            parts[name] = encode(value, allow_pickle=False)
        except (InputError, RecursionError, NotImplementedError, RuntimeError) as error:
            why = error.what if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise InputError(
                f"a checkpoint can't hold what {name} has",
                where=f"ts.save, {name}",
                why=f"{why.partition(chr(10))[0]}; opening a pickle may run any code",
                attempt="numbers, texts, bytes, tensors and arrays, and lists, tuples, sets and dicts of them",
            ) from None
    return parts


def _slices_in(value: object, place: str) -> Iterator[str]:
    """Yields the places of slices in plain containers."""
    if isinstance(value, LocalSlice):
        yield place
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _slices_in(item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _slices_in(item, f"{place}[{i}]")
