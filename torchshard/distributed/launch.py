"""Runs one function in several processes of this machine, one per rank, without `torchrun`.

    def main(steps):
        ts.distributed.init_process_group()
        ...

    if __name__ == "__main__":
        losses = launch(main, 2, (100,))     # what main returned on rank 0 and on rank 1

Each rank is a new process with the environment that `torchrun` would set, and one thread. Processes
are spawned, not forked, because a fork copies the locks of PyTorch's threads; so each imports the
script again. Results and exceptions return through files, as plain pickles. A rank ends right after
the function returns: its `atexit` functions do not run.
"""

from __future__ import annotations

import multiprocessing.util
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from torchshard.core.errors import DistributedError, in_short

T = TypeVar("T")
GRACE_SECONDS = 2.0
"""How long the other ranks may take to end after one fails, before SIGTERM, and before SIGKILL."""


class _Failure(NamedTuple):
    """The contents of a failed rank's file."""

    seconds: float
    """When the rank failed, on the machine's shared clock."""
    follows: bool
    """Whether another rank's failure may be the cause: a broken connection, or a missing call."""
    text: str
    """The rank, and the traceback."""
    exception: bytes | None
    """The exception as a pickle; None if it can't be pickled."""


_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")


def hide_launcher() -> None:
    """Removes the launcher's variables, so other libraries run each rank as a single-process job.

    accelerate, Hugging Face's `Trainer` and Lightning start DistributedDataParallel if they detect
    several processes, and would average the gradients of slices of different weights. As
    single-process jobs over the same batches, they train a sharded model like any other.

    Call it after `init_process_group`, which reads these variables, and before creating the
    libraries' objects.

    Raises:
        DistributedError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise DistributedError(
            "there are no ranks yet",
            where="torchshard.distributed.hide_launcher",
            why="without the launcher's variables they could not find each other",
            attempt="torchshard.distributed.init_process_group() before it",
        )
    for name in _LAUNCHERS:
        os.environ.pop(name, None)


def launch(fn: Callable[..., T], nprocs: int, args: Sequence[object] = ()) -> list[T]:
    """Runs `fn(*args)` on this machine as ranks 0 to nprocs - 1, each in its own process.

    Args:
        fn: a function of a module, or of a script that calls `launch` below
            `if __name__ == "__main__":`.
        nprocs: the number of ranks.
        args: the arguments of `fn`, the same on every rank.

    Returns:
        the results by rank.

    Raises:
        DistributedError: a rank died without an exception, nprocs is not a positive integer, or
            `fn` or its arguments can't be pickled.
        Exception: the exception of the rank that failed first; a note has the rank and traceback.
    """
    if not isinstance(nprocs, int) or nprocs < 1:
        raise DistributedError(f"{nprocs!r} ranks can't be started", where="launch(nprocs=...)", attempt="1 or more")
    if not callable(fn):
        raise DistributedError(f"{fn!r} can't be called", where="launch(fn, nprocs)", attempt="a function of a module")
    with TemporaryDirectory(prefix="torchshard-launch-") as folder:
        try:
            context = mp.spawn(_rank_main, (nprocs, free_port(), folder, fn, tuple(args)), nprocs, join=False)
        except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as error:
            raise DistributedError(
                f"{fn!r} and its arguments can't be sent to other processes",
                where="launch(fn, nprocs)",
                why=in_short(error),
                attempt="a function at the top of a module or script, and arguments that can be pickled",
            ) from error
        try:
            while not context.join(grace_period=GRACE_SECONDS):
                pass
        except ProcessException as error:
            _raise_first(Path(folder), error)
        finally:
            for process in context.processes:
                process.kill()
        return [cast(T, _result(Path(folder), rank)) for rank in range(nprocs)]


def _result(folder: Path, rank: int) -> object:
    path = folder / f"{rank}.result"
    if not path.exists():
        raise _no_result(rank, "its process ended itself, by sys.exit or os._exit", "return from the function instead")
    return pickle.loads(path.read_bytes())


def _no_result(rank: int, why: str, attempt: str) -> DistributedError:
    return DistributedError(f"rank {rank} ended without a result", where="launch", why=why, attempt=attempt)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _rank_main(
    rank: int, world: int, port: int, folder: str, fn: Callable[..., object], args: tuple[object, ...]
) -> None:
    """Runs one rank's process."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    # torch is imported already, and no longer reads OMP_NUM_THREADS
    torch.set_num_threads(1)
    try:
        result = _pickled(fn(*args), rank)
        (Path(folder) / f"{rank}.result").write_bytes(result)
        _end()
    except Exception as error:
        _write_failure(Path(folder) / f"{rank}.failure", rank, error)
        raise


def _pickled(result: object, rank: int) -> bytes:
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
    """Ends the process without C++ destructors, which abort it if a gloo thread still runs."""
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # or locks, as tqdm has one, would be left
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _write_failure(path: Path, rank: int, error: Exception) -> None:
    follows = isinstance(error, (DistributedError, dist.DistError)) or "gloo" in str(error)
    text = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    pickles = (_loadable_pickle(candidate) for candidate in (error, _Bare(error)))
    exception = next((data for data in pickles if data is not None), None)
    path.write_bytes(pickle.dumps(tuple(_Failure(time.monotonic(), follows, text, exception))))


class _Bare:
    """Pickles an exception by class and text, if pickle can't call its `__init__` again."""

    def __init__(self, error: Exception) -> None:
        self._type, self._text = type(error), str(error)

    def __reduce__(self) -> tuple[Callable[[type[Exception], str], Exception], tuple[type[Exception], str]]:
        return _bare, (self._type, self._text)


def _bare(error_type: type[Exception], text: str) -> Exception:
    error = error_type.__new__(error_type)
    error.args = (text,)
    return error


def _loadable_pickle(error: object) -> bytes | None:
    """Returns a pickle that loads as an exception again; None if that fails."""
    try:
        data = pickle.dumps(error)
        return data if isinstance(pickle.loads(data), Exception) else None
    except Exception:  # classes may raise anything while they are pickled or loaded
        return None


def _raise_first(folder: Path, error: ProcessException) -> NoReturn:
    """Raises the first rank's exception, preferring those that can't follow from another rank's."""
    loaded = (_Failure(*pickle.loads(path.read_bytes())) for path in folder.glob("*.failure"))
    failures = sorted(loaded, key=lambda failure: failure.seconds)
    causes = [failure for failure in failures if not failure.follows]
    if not failures or (isinstance(error, ProcessExitedException) and not causes):
        advice = "see what it wrote to stderr; a process killed by SIGKILL may have had too little memory"
        raise _no_result(error.error_index, error.msg, advice) from None
    first = (causes or failures)[0]
    if first.exception is None:
        raise DistributedError(f"an exception that can't be pickled, {first.text}", where="launch") from None
    exception: Exception = pickle.loads(first.exception)
    exception.add_note(first.text)
    raise exception from None
