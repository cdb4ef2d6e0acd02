"""How ranks that save tell each other that they have written.

They tell it by torch.distributed's key-value store: a collective in a background thread could reach the backend between
others, in another order on each rank. Where that store is a file, small files beside the checkpoint's take its place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist

from torchshard.core.errors import DistributedError, ShardError, first_line
from torchshard.distributed.ranks import Ranks
from torchshard.weights.safetensors_writer import replace_file

T = TypeVar("T")
_FIRST_POLL_SECONDS: Final = 0.002
_MOST_POLL_SECONDS: Final = 0.1
_READERS_SECONDS: Final = 5.0


class _Notes:
    """A key-value store of small files.

    It stands in for `FileStore`, whose readers wait for ever for the rest of a record if its writer was killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """As torch.distributed's Store.set; a value is there whole or not at all."""
        replace_file(self._path(key), value.encode())

    def get(self, key: str) -> bytes:
        """As Store.get, of a key that is there."""
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """As Store.check."""
        return all(self._path(key).exists() for key in keys)

    def delete_key(self, key: str) -> None:
        """As Store.delete_key."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.rpartition('/')[2]}.note"


def _store(folder: Path) -> dist.Store | _Notes:
    """The store by which ranks that save to a folder tell each other that they have written."""
    store = dist.distributed_c10d._get_default_store()
    innermost = store
    while isinstance(innermost, dist.PrefixStore):
        innermost = innermost.underlying_store
    return _Notes(folder) if isinstance(innermost, dist.FileStore) else store


class Completion:
    """Knows when all ranks have written; may be used from a thread, while collectives run in another.

    Args:
        folder: this save's own, for notes.
    """

    def __init__(self, ranks: Ranks, id_: str, folder: Path) -> None:
        # looked up now: when a thread has written, the groups may be destroyed already
        self._store: Any = _store(folder) if ranks.count > 1 else None
        self._ranks, self._prefix = ranks, f"torchshard/checkpoint/{id_}"

    def finish(self, failure: ShardError | None, commit: Callable[[], None]) -> None:
        """Reports that this rank has written, or why not; on the rank that leads, commits when all have.

        Returns when that is done.

        Raises:
            ShardError: some rank has failed, or has not written in time: nothing is committed.
        """
        if self._store is None:
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
        except (RuntimeError, OSError) as error:  # the store is gone with the process that held it, or with the folder
            raise failure or _failed(first_line(error)) from None

    def _lead(self, commit: Callable[[], None]) -> None:
        end = "rank 0 could not complete it"
        try:
            for number in range(self._ranks.count):
                self._wait(number, f"rank {number}")
            commit()
            end = ""
        except ShardError as error:
            end = _text(error)
            raise
        finally:
            self._store.set(self._key("end"), end)
            with contextlib.suppress(RuntimeError, OSError):  # it is complete, or has failed, without them
                self._wait_for_readers()

    def _follow(self) -> None:
        try:
            self._wait("end", "rank 0, which completes it,")
        finally:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(self._key(f"read by {self._ranks.number}"), "")

    def _wait_for_readers(self) -> None:
        """Waits, for a while, until all have read how it ended: this process may hold the store, and may exit.

        Then it puts away what they have told each other.
        """
        readers = [self._key(f"read by {number}") for number in range(1, self._ranks.count)]
        deadline = time.monotonic() + _READERS_SECONDS
        while not self._store.check(readers):
            if time.monotonic() > deadline:
                return
            time.sleep(_FIRST_POLL_SECONDS)
        for key in (*map(self._key, range(self._ranks.count)), self._key("end"), *readers):
            self._store.delete_key(key)

    def _wait(self, key: int | str, who: str) -> None:
        seconds, poll = self._ranks.group.timeouts.verify * (2 if key == "end" else 1), _FIRST_POLL_SECONDS
        deadline = time.monotonic() + seconds
        while not self._store.check([self._key(key)]):
            if time.monotonic() > deadline:
                raise _failed(f"{who} has not written within {seconds:g} s of this rank")
            time.sleep(poll)
            poll = min(2 * poll, _MOST_POLL_SECONDS)
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
        attempt="save again; the last complete checkpoint is as it was",
    )
