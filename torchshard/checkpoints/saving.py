"""Writes a checkpoint: each rank its slices, at the same time, and one file last that makes them count.

    the ranks agree on an id     folder/data-<id>/ is made; what an earlier save has left half done is removed
    each writes its file         0-of-2.safetensors, 1-of-2.safetensors, and waits until it is on the disk
    all have written             checkpoint.json is replaced in one rename, and the data that it named before removed

A process that dies at any moment leaves the last complete checkpoint as it was.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from torchshard.checkpoints.contents import Contents, Stateful, as_list, contents_of, encoded, hashes, unwrapped
from torchshard.checkpoints.copies import Copies
from torchshard.checkpoints.writing import Job, begin_job
from torchshard.core.errors import DistributedError, InputError, ShardError
from torchshard.core.layouts import dtype_text
from torchshard.core.mesh import MODEL
from torchshard.core.sharding import split_text
from torchshard.distributed.ranks import Ranks
from torchshard.plans.machine import read_size
from torchshard.runtime.module import ShardedModule
from torchshard.weights.checkpoint_files import digest

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

    def run_in_background(self, job: Job, copies: Copies) -> None:
        """Writes copies of the tensors; returns when the last of them is made.

        Raises:
            InputError: one can't be copied.
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
        except Exception:  # the thread tells the other ranks, and gives the error its words
            self.wait()
            raise


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
        model: a sharded model, one that has sharded models as parts, or an unsharded one; DDP and torch.compile around
            it are seen through. Gradients are not saved.
        optimizer: one or several, in the same order at `load`; each must treat every element alone, as SGD and AdamW.
        scheduler: one or several learning-rate schedulers, or what else has a state dict of plain data.
        extra: plain data of the caller's (numbers, texts, tensors, and containers of them), which `load` returns; that
            of rank 0 is saved. RNG states are saved too: PyTorch's, Python's and NumPy's, of each replica.
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
    check_module(model, "ts.save(folder, model, optimizer)")
    ranks, what = Ranks.of(model.parameters()), "the ranks can't save this checkpoint together"

    def prepare() -> tuple[Path, Contents, dict[str, bytes], float | None]:
        _latest.wait()
        contents = contents_of(unwrapped(model), as_list(optimizer), as_list(scheduler), extra)
        return checked_folder(folder), contents, encoded(contents.objects), read_size(copies, "copies")

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
    """Checks that what a caller has named the model is one.

    Raises:
        InputError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is no model", where="model", why="it is no nn.Module", attempt=call)


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    """A folder that a caller has named.

    Raises:
        InputError: it is no path.
    """
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"invalid folder {folder!r}", where="folder", why="it is no path", attempt='"checkpoint"')
    return Path(path)


def _verify(contents: Contents, objects: Mapping[str, bytes], folder: Path, ranks: Ranks, *, buffers: set[str]) -> None:
    """Checks that the ranks save the same: of tensors that several hold, each saves some for all.

    Args:
        objects: what is no tensor; the caller's own data may differ, and rank 0's are saved.
        buffers: which replicas need not have in common, as statistics of their own batches; the first one's are saved.
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
    """Raises DistributedError if the ranks have done different things with a sharded model, or hold other values."""

    def verify() -> None:
        for module in model.modules():
            if isinstance(module, ShardedModule):
                module.verify_state()

    ranks.run_on_all(verify, DistributedError, "the ranks hold different states")
