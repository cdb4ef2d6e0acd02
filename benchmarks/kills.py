"""Ranks that are killed while they save: the last complete checkpoint always loads, equal to the bit.

Each round starts real ranks (gloo, 2 or 3), which load what the round before has left, save over its debris, load that,
and then save again and again, with `wait=True` and `wait=False` in turn. Some or all of them are killed by SIGKILL: at
a random moment, a random part of a save's time after it began, or when a certain file appears. Then

    the folder loads, unsharded, as the last save of which any rank said that it is complete, or a later one
    parameters, buffers, optimizer state, scheduler, extra and RNG states are those of one save, equal to the bit
    ranks that were not killed raise an error of ours in time

The content of a checkpoint follows from its number, so it needs no copy to be compared with. Processes are killed here,
not machines: what a loss of power leaves on a disk is not tested.

    python benchmarks/kills.py
    python benchmarks/kills.py --kills 40 --seed 7
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchshard as ts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.resumed import adamw

WIDTH = 256
"""A checkpoint of this model has 4 MB: a save takes long enough to be hit while it writes."""
TIMEOUT_SECONDS = 5.0
"""How long ranks wait for one another."""
NOT_STARTED = "not started"
SURVIVOR_SECONDS = 4 * TIMEOUT_SECONDS
"""A rank that was not killed must have raised after this time."""
START_SECONDS = 90.0
FALLS = ("before any file", "while writing", "between files and manifest", "after the manifest", "between saves")
"""Where a kill can fall, seen from the save that was begun last."""


class Model(nn.Module):
    """Tied embeddings, uneven slices, and buffers: what is captured and sharded in a moment."""

    calls: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(301, WIDTH), nn.Linear(WIDTH, 301)
        self.head.weight = self.tok.weight
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(301))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.up(self.tok(ids))) + self.seen * self.calls
        return result


PLANS: Mapping[str, Any] = {
    "auto": "auto",
    "vocab": {"tok": "vocab", "up": "column"},
    "columns": {"tok": "column", "up": "row"},
}


# --- what a checkpoint holds, by its number --------------------------------------------------------------------------


def whole(name: str, shape: Sequence[int], number: int) -> Tensor:
    """A parameter or buffer in float64: no element is 0, and no two saves have an element in common."""
    first = zlib.crc32(name.encode()) % 1024 + 8192 * number
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def unsharded() -> nn.Module:
    """The model of all rounds."""
    return Model().double()


class Run:
    """A training run: a model, its optimizer and scheduler, whose state is set by numbers."""

    def __init__(self, plan: str | None) -> None:
        source = unsharded()
        self._shapes = {name: value.shape for name, value in source.state_dict().items()}
        self.model = source if plan is None else ts.shard(source, PLANS[plan], (torch.arange(6),))
        self._load_whole(0)
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        self._at_zero = {name: value.detach().clone() for name, value in named}
        self.optimizer = adamw(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)

    def _load_whole(self, number: int) -> None:
        values = self._whole(number)
        if isinstance(self.model, ts.ShardedModule):
            self.model.load_full_state_dict(values)
        else:
            self.model.load_state_dict(values)

    def _whole(self, number: int) -> dict[str, Tensor]:
        values = {name: whole(name, shape, number) for name, shape in self._shapes.items()}
        values["head.weight"] = values["tok.weight"]
        return values | {"calls": torch.tensor(number)}

    def _states(self, number: int) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each parameter with this process's slice of its value, and the optimizer state, at a save."""
        for name, _ in self.model.named_parameters():
            value = self._at_zero[name] + 8192 * number
            step = torch.tensor(float(number))
            yield name, value, {"step": step, "exp_avg": value * 0.5, "exp_avg_sq": value * 2 + 1}

    @torch.no_grad()
    def fill(self, number: int) -> None:
        """Sets everything to what the save with this number is to hold, in place as a step does."""
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        for name, value, states in self._states(number):
            parameters[name].copy_(value)
            for key, state in states.items():
                self.optimizer.state[parameters[name]].setdefault(key, torch.empty_like(state)).copy_(state)
        buffers["calls"].fill_(number)
        buffers["seen"].copy_(self._at_zero["seen"] + 8192 * number)
        self.scheduler.last_epoch = number
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    def extra(self, number: int) -> dict[str, Any]:
        """What the caller gives to `ts.save`."""
        return {"number": number, "tensor": torch.full((1000,), number)}

    def number_in(self, extra: Any) -> int:
        """The number of the save that was loaded, after all of it was compared.

        Raises:
            ValueError: not all of it is of one save.
        """
        number = int(extra["number"])
        wrong = [name for name, is_right in self._compared(number, extra).items() if not is_right]
        if wrong:
            raise ValueError(f"{wrong[:5]} of {len(wrong)} are not those of save {number}")
        return number

    def _compared(self, number: int, extra: Any) -> dict[str, bool]:
        model = self.model
        found = model.full_state_dict() if isinstance(model, ts.ShardedModule) else model.state_dict()
        equal = {name: torch.equal(found[name], value) for name, value in self._whole(number).items()}
        parameters = dict(self.model.named_parameters())
        for name, value, states in self._states(number):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ts.SliceWarning)  # a slice is meant
                equal[f"the slice of {name}"] = torch.equal(parameters[name].detach(), value)
            held = self.optimizer.state[parameters[name]]
            equal |= {f"{key} of {name}": torch.equal(held[key], state) for key, state in states.items()}
        torchs = torch.Generator().manual_seed(number)
        seeded, current = (
            generator.get_state(legacy=False)["state"]["key"]
            for generator in (np.random.RandomState(number), np.random)
        )
        return equal | {
            "extra": bool(extra["tensor"].eq(number).all()),
            "the scheduler": self.scheduler.last_epoch == number,
            "PyTorch's RNG state": torch.equal(torch.get_rng_state(), torchs.get_state()),
            "Python's RNG state": random.getstate() == random.Random(number).getstate(),
            "NumPy's RNG state": np.array_equal(seeded, current),
        }


def number_in(folder: Path) -> int | None:
    """The number of the save that a folder holds, loaded unsharded; None if no save into it has been completed.

    Raises:
        ShardError, ValueError: it can't be loaded, or is not of one save.
    """
    if not (folder / "checkpoint.json").exists():
        try:
            ts.load(folder, unsharded())
        except ts.InputError as error:
            if "there is no complete checkpoint" in str(error):
                return None
            raise
    run = Run(None)
    return run.number_in(ts.load(folder, run.model, run.optimizer, scheduler=run.scheduler))


# --- a rank ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What the ranks of a round do."""

    folder: Path
    """Of the checkpoint."""
    reports: Path
    """A folder with a file of each rank, which says what it has done."""
    world: int
    plan: str
    first: int
    """The number of the first save."""
    store: str
    """'file:...', or 'tcp:<port>', in which rank 0 is the server, as under torchrun."""

    def report(self, rank: int) -> Path:
        """The file of a rank."""
        return self.reports / f"{rank}.txt"


def _rank(rank: int, job: Job) -> None:
    """Loads, saves, loads, and saves until it is killed or another rank is."""
    descriptor = os.open(job.report(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(text: str) -> None:
        os.write(descriptor, f"{text}\n".encode())

    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # PyTorch's store prints a stack when its server is killed
        _join(rank, job)
        _save_forever(rank, job, say)
    except ts.ShardError as error:
        say(f"raised {type(error).__name__}: {' '.join(str(error).split())}")
    except BaseException:
        say(f"failed {traceback.format_exc()!r}")
    os._exit(0)


def _join(rank: int, job: Job) -> None:
    kind, _, place = job.store.partition(":")
    if kind == "tcp":
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.world), "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = place
    else:
        limit = timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=job.world, timeout=limit)
    ts.distributed.init_process_group(timeout_seconds=TIMEOUT_SECONDS, start_seconds=START_SECONDS)


def _save_forever(rank: int, job: Job, say: Callable[[str], None]) -> None:
    run, number = Run(job.plan), job.first
    if job.first > 1:
        run.number_in(ts.load(job.folder, run.model, run.optimizer, scheduler=run.scheduler))
        say("loaded")
        _save(run, number, job, say)
        if rank == 0:
            _check_clean(job)
        run.fill(0)
        found = run.number_in(ts.load(job.folder, run.model, run.optimizer, scheduler=run.scheduler))
        if found != number:
            raise ValueError(f"save {number} was completed, and {found} was loaded")
        number += 1
    say("ready")
    while True:
        _save(run, number, job, say)
        number += 1


def _save(run: Run, number: int, job: Job, say: Callable[[str], None]) -> None:
    run.fill(number)
    say(f"begin {number} {time.monotonic()}")
    in_background, extra = number % 2 == 0, run.extra(number)
    saving = ts.save(job.folder, run.model, run.optimizer, scheduler=run.scheduler, extra=extra, wait=not in_background)
    if in_background:
        run.fill(number + 1)  # as a step would, while it is written
        extra["tensor"].fill_(number + 1)
    saving.wait()
    say(f"done {number} {time.monotonic()}")


def _check_clean(job: Job) -> None:
    """Raises ValueError if a completed save has left anything but itself."""
    names = sorted(str(path.relative_to(job.folder)) for path in job.folder.rglob("*"))
    body = json.loads((job.folder / "checkpoint.json").read_bytes())
    data = f"data-{body['id']}"
    files = {f"{rank}-of-{job.world}.safetensors" for rank in range(job.world)} | {"objects.bin"}
    if set(names) != {"checkpoint.json", data} | {f"{data}/{name}" for name in files}:
        raise ValueError(f"a save over debris has left {names}")


# --- kills -----------------------------------------------------------------------------------------------------------


@dataclass
class Reports:
    """What the ranks have said so far."""

    job: Job
    lines: list[list[str]] = field(default_factory=list)

    def read(self) -> Reports:
        """Reads them again."""
        paths = [self.job.report(rank) for rank in range(self.job.world)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        self.lines = [text.splitlines() for text in texts]
        return self

    def numbers(self, word: str) -> list[int]:
        """The latest save that each rank has begun, or done; 0 if none."""
        return [max((int(line.split()[1]) for line in own if line.startswith(word)), default=0) for own in self.lines]

    def starting(self, word: str) -> list[str]:
        """All lines of all ranks that begin with a word."""
        return [line for own in self.lines for line in own if line.startswith(word)]

    def save_seconds(self) -> float:
        """How long rank 0's last complete save took; a guess if there was none."""
        times = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in self.lines[0] if " " in line}
        last = self.numbers("done")[0]
        return times[f"done {last}"] - times[f"begin {last}"] if last else 0.1


class Kill(NamedTuple):
    """When, and who."""

    aim: str
    victims: tuple[int, ...]


AIMS = ("any time", "folder", *2 * ("file", "objects", "in a save"), "manifest", "replaced")
"""After a random time; a random part of a save's time after one began; when something of a save appears."""


def _wait_for(job: Job, is_there: Callable[[], bool], seconds: float = START_SECONDS) -> bool:
    """Whether it is there in time."""
    deadline, reports = time.monotonic() + seconds, Reports(job)
    while not is_there():
        if time.monotonic() > deadline or reports.read().starting("raised") or reports.starting("failed"):
            return False
    return True


def _wait_for_aim(job: Job, aim: str, rng: random.Random) -> None:
    """Returns at the moment of the kill."""
    reports, folder = Reports(job).read(), job.folder
    seconds = reports.save_seconds()
    if aim == "any time":
        time.sleep(rng.uniform(0, 6 * seconds))
        return
    time.sleep(rng.uniform(0, 2 * seconds))  # so that saves of both kinds are hit
    if aim == "in a save":
        begun = max(reports.read().numbers("begin"))
        _wait_for(job, lambda: max(reports.read().numbers("begin")) > begun, 10)
        time.sleep(rng.uniform(0, 1.1 * seconds))
        return
    before = {str(path) for path in folder.glob("data-*")}
    manifest = _identity(folder / "checkpoint.json")

    def has_appeared() -> bool:
        if aim == "replaced":
            return _identity(folder / "checkpoint.json") != manifest
        if aim == "manifest":
            return (folder / "checkpoint.json.part").exists()
        new = [path for path in folder.glob("data-*") if str(path) not in before]
        pattern = {"folder": "*", "file": "*.safetensors", "objects": "objects.bin"}[aim]
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            return any(aim == "folder" or any(path.glob(pattern)) for path in new)
        return False

    _wait_for(job, has_appeared, 10)
    time.sleep(rng.choice((0.0, rng.uniform(0, 0.1 * seconds))))


def _identity(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _where(job: Job, begun: int, done: int, number: int | None) -> str:
    """Where a kill fell, by what the folder holds; `number` is that of its complete save."""
    if done >= begun:
        return "between saves"
    if number == begun:
        return "after the manifest"
    named = re.findall(r'"id": "(\w+)"', _text(job.folder / "checkpoint.json"))
    left = [path for path in job.folder.glob("data-*") if path.name.removeprefix("data-") not in named]
    files = {path.name: path for data in left for path in data.iterdir()}
    if not files:
        return "before any file"
    names = [f"{rank}-of-{job.world}.safetensors" for rank in range(job.world)]
    is_whole = "objects.bin" in files and all(name in files and _is_written(files[name]) for name in names)
    return "between files and manifest" if is_whole else "while writing"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_written(path: Path) -> bool:
    """Whether a file's data have all arrived: no word of what is saved is 0."""
    content = path.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    return bool(data) and bool(np.frombuffer(data[: len(data) // 8 * 8], np.int64).all())


def _each(processes: Sequence[BaseProcess], ranks: Sequence[int], number: signal.Signals) -> None:
    for rank in ranks:
        pid = processes[rank].pid
        if pid is not None and processes[rank].is_alive():
            os.kill(pid, number)


class Round(NamedTuple):
    """What came of a round."""

    fell: str
    problems: list[str]
    survivors: Counter[str]
    number: int | None
    """Of the save that the folder holds afterwards."""


def run_round(job: Job, kill: Kill, rng: random.Random) -> Round:
    """Starts the ranks of a round, kills some of them, and looks at what is left."""
    context = multiprocessing.get_context("forkserver")
    processes: list[BaseProcess] = [context.Process(target=_rank, args=(rank, job)) for rank in range(job.world)]
    for process in processes:
        process.start()
    reports, everyone = Reports(job), range(job.world)
    try:
        _wait_for(job, lambda: len(reports.read().starting("ready")) == job.world)
        is_ready = len(reports.read().starting("ready")) == job.world
        if not is_ready:
            return Round(NOT_STARTED, _before_the_kill(reports), Counter(), _number(job, []))
        _wait_for_aim(job, kill.aim, rng)
        # They stand still while one looks: what the survivors do afterwards is theirs.
        _each(processes, everyone, signal.SIGSTOP)
        reports.read()
        begun, done = max(reports.numbers("begin")), max(reports.numbers("done"))
        if reports.starting("raised") or reports.starting("failed"):
            return Round(NOT_STARTED, _before_the_kill(reports), Counter(), _number(job, []))
        problems = list[str]()
        fell = _where(job, begun, done, _number(job, []))
        _each(processes, kill.victims, signal.SIGKILL)
        survivors = [rank for rank in everyone if rank not in kill.victims]
        _each(processes, survivors, signal.SIGCONT)
        deadline = time.monotonic() + SURVIVOR_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        told = Counter[str]()
        for rank in survivors:
            last = (reports.read().lines[rank] or [""])[-1]
            told[" ".join(last.split()[:2]).rstrip(":")] += 1
            if processes[rank].is_alive():
                problems.append(f"rank {rank} hangs, after {last!r}")
            elif not last.startswith("raised"):
                problems.append(f"rank {rank} has raised no error of ours: {last}")
    finally:
        _each(processes, everyone, signal.SIGKILL)
        for process in processes:
            process.join()
    begun, done = max(reports.numbers("begin")), max(reports.numbers("done"))
    number = _number(job, problems)
    if not done <= (number or 0) <= begun:
        problems.append(f"LOST: save {done} was completed, {begun} begun, and the folder holds {number}")
    return Round(fell, problems, told, number)


def _before_the_kill(reports: Reports) -> list[str]:
    """What has gone wrong though nobody was killed; on a loaded machine a rank may be late, and that is no problem."""
    lines = [line for word in ("raised", "failed") for line in reports.starting(word)] or ["no rank is ready in time"]
    return [] if any("time was up" in line or "within" in line for line in lines) else lines


def _number(job: Job, problems: list[str]) -> int | None:
    """What the folder holds; adds what is wrong with it."""
    try:
        return number_in(job.folder)
    except Exception as error:
        problems.append(f"LOST: {type(error).__name__}: {' '.join(str(error).split())}")
        return None


def _victims(world: int, rng: random.Random) -> tuple[int, ...]:
    count = rng.choice((1, rng.randint(1, world), world))
    return tuple(sorted(rng.sample(range(world), count)))


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # it tells of the semaphores of killed processes
    multiprocessing.set_forkserver_preload(["tests.warm"])
    rng, start = random.Random(given.seed), time.perf_counter()
    fell, told, killed, problems, number = Counter[str](), Counter[str](), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "checkpoint-0")
        for turn in itertools.count():
            if turn % 10 == 0:  # also the first save into a folder may be killed
                folder, number = Path(place, f"checkpoint-{turn}"), 0
            reports = Path(place, f"reports-{turn}")
            reports.mkdir()
            world = 3 if turn % 4 == 3 else 2
            store = f"tcp:{_free_port()}" if rng.random() < 0.5 else f"file:{reports}/store"
            job = Job(folder, reports, world, rng.choice(list(PLANS)), number + 1, store)
            kill = Kill(rng.choice(AIMS) if number else "in a save", _victims(world, rng))
            result = run_round(job, kill, rng)
            problems += bool(result.problems)
            for problem in result.problems:
                print(f"round {turn}, {kill}, {world} ranks, {job.store[:4]}, {result.fell}: {problem}", flush=True)
            number = result.number or 0
            fell[result.fell] += 1
            if result.fell == NOT_STARTED:
                continue
            told += result.survivors
            killed["all" if len(kill.victims) == world else "some" if len(kill.victims) > 1 else "one"] += 1
            kills = killed.total()
            if kills % 20 == 0:
                print(f"{kills:5} kills, {time.perf_counter() - start:4.0f} s  {dict(fell)}", flush=True)
            if kills == given.kills:
                break
    print(f"{given.kills} kills in {time.perf_counter() - start:.0f} s, {problems} with problems")
    print("  where they fell:   " + ", ".join(f"{fell[name]} {name}" for name in (*FALLS, *(fell.keys() - {*FALLS}))))
    print("  ranks killed:      " + ", ".join(f"{count} times {name}" for name, count in killed.items()))
    print("  survivors:         " + ", ".join(f"{count} {name}" for name, count in told.items()))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
