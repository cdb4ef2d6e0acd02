"""Lets ranks that save a checkpoint report to each other that they have written.

They use torch.distributed's key-value store, not a collective: a collective from a background thread
could start between the main thread's collectives, in a different order on each rank. If the store is
a `FileStore`, small files in the save's own folder replace it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import torch.distributed as dist

from torchshard.core.errors import DistributedError, ShardError, first_line
from torchshard.distributed.ranks import Ranks
from torchshard.weights.safetensors_writer import replace_file

T = TypeVar("T")
log = logging.getLogger(__name__)
_FIRST_POLL_SECONDS: Final = 0.002
_MAX_POLL_SECONDS: Final = 0.1
_READERS_TIMEOUT_SECONDS: Final = 5.0


class _Notes:
    """A key-value store of small files.

    It replaces `FileStore`, where a killed writer makes readers wait forever for the rest of a
    record.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Sets a key like `Store.set`; a value appears in full or not at all."""
        replace_file(self._path(key), value.encode())

    def get(self, key: str) -> bytes:
        """Returns the value of an existing key, like `Store.get`."""
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys exist, like `Store.check`."""
        return all(self._path(key).exists() for key in keys)

    def delete_key(self, key: str) -> None:
        """Removes a key, like `Store.delete_key`."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.rpartition('/')[2]}.note"


def _store(folder: Path) -> dist.Store | _Notes:
    """Returns the store through which the ranks that save to a folder report completion."""
    # `_get_default_store`: no public name for the default group's store (PyTorch 2.13.0; pytorch/pytorch#84468).
    store = dist.distributed_c10d._get_default_store()
    innermost = store
    while isinstance(innermost, dist.PrefixStore):
        innermost = innermost.underlying_store
    return _Notes(folder) if isinstance(innermost, dist.FileStore) else store


class Completion:
    """Detects when all ranks have written.

    A thread may use it while collectives run in another.

    Args:
        folder: this save's own folder, for notes.
    """

    def __init__(self, ranks: Ranks, id_: str, folder: Path) -> None:
        # looked up now: the groups may be destroyed by the time a thread has written
        if ranks.count > 1:
            self._store = _store(folder)
        self._ranks, self._prefix = ranks, f"torchshard/checkpoint/{id_}"

    def finish(self, failure: ShardError | None, commit: Callable[[], None]) -> None:
        """Reports this rank's success or failure. The leader commits once all ranks have written.

        Returns when the checkpoint is committed.

        Raises:
            ShardError: a rank failed or timed out. On ranks other than the leader, the checkpoint may
                be committed nevertheless: the leader's report may be late or lost.
        """
        if self._ranks.count == 1:
            if failure is not None:
                raise failure
            commit()
            return
        try:
            self._store.set(self._key(self._ranks.number), _text(failure))
            if self._ranks.number == 0:
                self._lead(commit)
            else:
                self._follow()
        except ShardError as error:
            raise failure or error from None
        except (RuntimeError, OSError) as error:  # the store's process has exited, or the folder is gone
            raise failure or _failed(first_line(error)) from None

    def _lead(self, commit: Callable[[], None]) -> None:
        end = "rank 0 could not complete it"
        try:
            for number in range(self._ranks.count):
                self._wait(number, f"rank {number} did not finish writing")
            commit()
            end = ""
        except ShardError as error:
            end = _text(error)
            raise
        finally:
            try:
                self._store.set(self._key("end"), end)
                self._wait_for_readers()
            except (RuntimeError, OSError) as error:  # the outcome is final, whether or not the other ranks read it
                log.warning("the other ranks may not learn how a checkpoint's save ended: %s", first_line(error))

    def _follow(self) -> None:
        try:
            self._wait("end", "rank 0 did not commit the checkpoint")
        finally:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(self._key(f"read by {self._ranks.number}"), "")

    def _wait_for_readers(self) -> None:
        """Waits for all ranks to read the outcome, up to `_READERS_TIMEOUT_SECONDS`; deletes the keys.

        This process may own the store, and may exit after it returns.
        """
        readers = [self._key(f"read by {number}") for number in range(1, self._ranks.count)]
        deadline = time.monotonic() + _READERS_TIMEOUT_SECONDS
        while not self._store.check(readers):
            if time.monotonic() > deadline:
                return
            time.sleep(_FIRST_POLL_SECONDS)
        for key in (*map(self._key, range(self._ranks.count)), self._key("end"), *readers):
            self._store.delete_key(key)

    def _wait(self, key: int | str, missing: str) -> None:
        # followers wait twice as long: rank 0 may itself wait a full time-out for another rank
        seconds, poll = self._ranks.group.timeouts.verify * (2 if key == "end" else 1), _FIRST_POLL_SECONDS
        deadline = time.monotonic() + seconds
        while not self._store.check([self._key(key)]):
            if time.monotonic() > deadline:
                raise _failed(f"{missing} within {seconds:g} s after this rank did its part")
            time.sleep(poll)
            poll = min(2 * poll, _MAX_POLL_SECONDS)
        text = self._store.get(self._key(key)).decode()
        if text:
            raise _failed(text)

    def _key(self, key: int | str) -> str:
        return f"{self._prefix}/{key}"


def _text(failure: ShardError | None) -> str:
    return "" if failure is None else "; ".join(filter(None, (failure.what, failure.where, failure.why)))


def _failed(why: str) -> DistributedError:
    return DistributedError(
        "the checkpoint was not completed",
        where="ts.save",
        why=why,
        attempt="save again; until then, ts.load reads the last complete checkpoint",
    )
