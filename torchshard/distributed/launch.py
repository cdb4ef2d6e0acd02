"""Local ranks: one function run by several processes of this machine, without `torchrun`.

    def main(steps):
        ts.distributed.init_process_group()
        ...

    if __name__ == "__main__":
        losses = launch(main, 2, (100,))     # what main returned on rank 0 and on rank 1

Each rank is a new process (spawned, so it imports the script again) with the environment that `torchrun` would give
it and one thread. Results and exceptions come back through files, as plain pickles. A rank that has returned ends at
once: what it registered with `atexit` does not run.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from torchshard.core.errors import DistributedError

T = TypeVar("T")
GRACE_SECONDS = 2.0
"""After a rank has failed, the others may end by themselves for this long, then they are ended, then killed."""


def launch(fn: Callable[..., T], nprocs: int, args: Sequence[Any] = ()) -> list[T]:
    """Runs `fn(*args)` in `nprocs` processes of this machine, under the environment of ranks 0 to nprocs - 1.

    Args:
        fn: a function of a module (or of the script, below whose `if __name__ == "__main__":` this is called).
        nprocs: the number of ranks.
        args: what `fn` is called with on every rank.

    Returns:
        what each rank's call returned, in the order of the ranks.

    Raises:
        DistributedError: a rank died without an exception, or nprocs is no number of ranks.
        Exception: that of the rank that failed first, with its rank and traceback as a note.
    """
    if not isinstance(nprocs, int) or nprocs < 1:
        raise DistributedError(f"{nprocs!r} ranks can't be started", where="launch(nprocs=...)", attempt="1 or more")
    if not callable(fn):
        raise DistributedError(f"{fn!r} can't be called", where="launch(fn, nprocs)", attempt="a function of a module")
    with TemporaryDirectory(prefix="torchshard-launch-") as folder:
        context = mp.spawn(_rank_main, (nprocs, _free_port(), folder, fn, tuple(args)), nprocs, join=False)
        try:
            while not context.join(grace_period=GRACE_SECONDS):
                pass
        except ProcessException as error:
            _raise_first(Path(folder), error)
        finally:
            for process in context.processes:
                process.kill()
        return [_result(Path(folder), rank) for rank in range(nprocs)]


def _result(folder: Path, rank: int) -> Any:
    path = folder / f"{rank}.result"
    if not path.exists():
        raise _no_result(rank, "its process ended itself, by sys.exit or os._exit", "return from the function instead")
    return pickle.loads(path.read_bytes())


def _no_result(rank: int, why: str, attempt: str) -> DistributedError:
    return DistributedError(f"rank {rank} ended without a result", where="launch", why=why, attempt=attempt)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port


def _rank_main(rank: int, world: int, port: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        result = _pickled(fn(*args), rank)
        (Path(folder) / f"{rank}.result").write_bytes(result)
        _end()
    except Exception as error:
        _write_failure(Path(folder) / f"{rank}.failure", rank, error)
        raise


def _pickled(result: Any, rank: int) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise DistributedError(
            f"what rank {rank} returned can't be pickled",
            where="launch",
            why=f"{type(error).__name__}: {error}",
            attempt="return numbers, tensors, and containers of them; write files for the rest",
        ) from error


def _end() -> None:
    """Ends the process without C++ destructors, which abort it where gloo's threads still run, its work being done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _write_failure(path: Path, rank: int, error: Exception) -> None:
    text = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    held = next((made for made in map(_loadable, (error, _Bare(error))) if made), None)
    broken = isinstance(error, (DistributedError, dist.DistError)) or "gloo" in str(error)
    path.write_bytes(pickle.dumps((time.monotonic(), broken, text, held)))


class _Bare:
    """An exception of a class that pickle can't make again, by its class and its text alone."""

    def __init__(self, error: Exception) -> None:
        self._kind, self._text = type(error), str(error)

    def __reduce__(self) -> Any:
        return _bare, (self._kind, self._text)


def _bare(kind: type[Exception], text: str) -> Exception:
    made = kind.__new__(kind)
    made.args = (text,)
    return made


def _loadable(error: Any) -> bytes | None:
    try:
        held = pickle.dumps(error)
        return held if isinstance(pickle.loads(held), Exception) else None
    except Exception:
        return None


def _raise_first(folder: Path, seen: ProcessException) -> NoReturn:
    """Raises what the first failing rank raised; its neighbours' broken connections follow from that."""
    failures = sorted((pickle.loads(path.read_bytes()) for path in folder.glob("*.failure")), key=lambda f: f[0])
    causes = [failure for failure in failures if not failure[1]]  # the others may follow from another rank's end
    if not failures or (isinstance(seen, ProcessExitedException) and not causes):
        advice = "see what it wrote to stderr; a process killed by SIGKILL may have had too little memory"
        raise _no_result(seen.error_index, seen.msg, advice) from None
    _, _, text, held = (causes or failures)[0]
    if held is None:
        raise DistributedError(f"an exception that can't be pickled, {text}", where="launch") from None
    error: Exception = pickle.loads(held)
    error.add_note(text)
    raise error from None
