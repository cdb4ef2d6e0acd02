"""Loading pretrained weights onto gloo ranks, in fresh processes and in turn: seconds, bytes read and peak memory.

    torchshard        ts.from_pretrained(folder, plan), which splits the parameters at once
    torchshard auto   ts.from_pretrained(folder, "auto", example_kwargs=...), which also captures and plans the model
    transformers      from_pretrained(folder, tp_plan="auto"); it needs accelerate (pip install accelerate)
    DCP               torch.distributed.checkpoint.load with its HuggingFaceStorageReader, into DTensors

The model is Llama's architecture with random bfloat16 values, in ten safetensors files. All ways but "torchshard auto"
end with the same layout, that of transformers' `tp_plan`: Megatron's columns and rows, the embedding and the head split
along the vocabulary. In an extra round before the timed ones the ranks' slices are hashed: all ways must have the same.
A process first loads a tiny model in the same way, so that no import is measured.

    seconds      until `load` returns, and until each page of each slice is in the process's memory, of the slowest
                 rank. On a CPU transformers' parameters are views of mapped files, which are read at their first use.
    processor    processor seconds of all threads of a rank; the machine's other work disturbs it less
    read         what read() and its like returned (rchar of /proc/self/io), and the pages of safetensors files that
                 were mapped into the process (Rss of /proc/self/smaps, just before each file is closed and at the
                 end). The kernel maps pages around the one that is touched, 64 KiB at most, and these count too.
    peak         of resident memory above that before loading (VmHWM of /proc/self/status, reset before). Anonymous and
                 file-backed peaks are sampled in the extra round, and need not be at the same time.

The files are in the page cache. With --cold they are dropped from it before each load, and `disk` is what all ranks
together caused to be read from the disk, with the kernel's readahead. Linux only.

With --dtype the parameters have another dtype than the files, so that every way has to copy.

    python benchmarks/weights.py --ranks 2 4 --rounds 5 --json weights.json
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import re
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils
from transformers.utils import logging as transformers_logging

import torchshard as ts
import torchshard.distributed as tsd

COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), ("o_proj", "down_proj")
VOCABULARY = "embed_tokens"
PLAN: dict[str, Any] = {f"*{n}": "column" for n in COLUMN} | {f"*{n}": "row" for n in ROW} | {f"*{VOCABULARY}": "vocab"}
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
FILES, PAGE_BYTES, MIB = 10, 4096, 2**20


# --- the ways --------------------------------------------------------------------------------------------------------


def with_torchshard(folder: Path, dtype: torch.dtype) -> nn.Module:
    return ts.from_pretrained(folder, PLAN, dtype=dtype)


def with_torchshard_auto(folder: Path, dtype: torch.dtype) -> nn.Module:
    kwargs = {"input_ids": torch.zeros(2, 16, dtype=torch.long), "use_cache": False}
    return ts.from_pretrained(folder, "auto", example_kwargs=kwargs, dtype=dtype)


def with_transformers(folder: Path, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=dtype)
    return model


def with_dcp(folder: Path, dtype: torch.dtype) -> nn.Module:
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, parameter in [*model.named_parameters()]:
        path, _, leaf = name.rpartition(".")
        split = distribute_tensor(parameter, mesh, [placement(name)], src_data_rank=None)
        setattr(model.get_submodule(path), leaf, nn.Parameter(split))
    model.to_empty(device="cpu")
    # Its frequencies are a buffer that no file holds.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return model.eval()


def placement(name: str) -> Shard | Replicate:
    module = name.split(".")[-2]
    return Shard(1) if module in ROW else Shard(0) if module in (*COLUMN, VOCABULARY) else Replicate()


WAYS: dict[str, Callable[[Path, torch.dtype], nn.Module]] = {
    "torchshard": with_torchshard,
    "torchshard auto": with_torchshard_auto,
    "transformers": with_transformers,
    "DCP": with_dcp,
}
OTHER_LAYOUT = "torchshard auto"


# --- the folder ------------------------------------------------------------------------------------------------------


def save_random(folder: Path, layers: int, vocabulary: int, sizes: dict[str, int]) -> None:
    options: dict[str, Any] = sizes | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    config = LlamaConfig(**options, tie_word_embeddings=False, dtype="bfloat16")
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    file_bytes = sum(p.numel() * p.itemsize for p in model.parameters()) // FILES
    # A file ends before the tensor with which it would be too large, so ten files need some room.
    model.save_pretrained(folder, max_shard_size=int(1.05 * file_bytes))
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # pages that are not on the disk yet can't be dropped


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


# --- what the kernel counts ------------------------------------------------------------------------------------------


def counts(name: str) -> dict[str, int]:
    """The numbers in a file of /proc/self, in bytes."""
    text = Path("/proc/self", name).read_text()
    return {key: int(value) << (10 if unit else 0) for key, value, unit in re.findall(r"(\w+):\s+(\d+)( kB)?", text)}


def mapped_bytes() -> dict[str, int]:
    """Safetensors file -> how much of it is mapped into this process's memory."""
    found, path = dict[str, int](), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            path = line.split()[-1]
        elif line.startswith("Rss:") and path.endswith(".safetensors"):
            found[path] = found.get(path, 0) + (int(line.split()[1]) << 10)
    return found


@dataclass
class Watch:
    """What of files was mapped at most, and the peaks of memory, of one load."""

    mapped: dict[str, int] = field(default_factory=dict)
    anonymous: int = 0
    file_backed: int = 0
    ends: threading.Event = field(default_factory=threading.Event)

    def note_mapped(self) -> None:
        for path, size in mapped_bytes().items():
            self.mapped[path] = max(size, self.mapped.get(path, 0))

    def sample(self) -> None:
        while not self.ends.wait(0.002):
            now = counts("status")
            self.anonymous = max(self.anonymous, now["RssAnon"])
            self.file_backed = max(self.file_backed, now["RssFile"])


@contextmanager
def watching() -> Iterator[Watch]:
    """Samples memory, and looks at what is mapped before a file is closed."""
    watch, original = Watch(), safetensors.safe_open

    class WatchedOpen:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = original(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Any:
            return self.file.__enter__()

        def __exit__(self, *args: Any) -> None:
            watch.note_mapped()
            self.file.__exit__(*args)

    users = (safetensors, modeling_utils)  # DCP imports it when it reads
    for module in users:
        setattr(module, "safe_open", WatchedOpen)  # noqa: B010
    thread = threading.Thread(target=watch.sample)
    thread.start()
    try:
        yield watch
    finally:
        watch.ends.set()
        thread.join()
        for module in users:
            setattr(module, "safe_open", original)  # noqa: B010


# --- a rank ----------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """One load on one rank; memory is above that before."""

    returned_seconds: float
    seconds: float
    processor_seconds: float
    read_bytes: int
    disk_bytes: int
    peak_bytes: int
    kept_bytes: int
    mapped_bytes: int = 0
    anonymous_bytes: int = 0
    file_backed_bytes: int = 0
    hashes: dict[str, str] = field(default_factory=dict)


def local_slices(model: nn.Module) -> dict[str, Tensor]:
    slices = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        slices[name] = local.detach().as_subclass(Tensor)
    return slices


def touch(slices: dict[str, Tensor]) -> None:
    """Reads a byte of each page."""
    for tensor in slices.values():
        tensor.view(torch.uint8).view(-1)[::PAGE_BYTES].sum()


def hash_slice(tensor: Tensor) -> str:
    values = tensor.contiguous().view(torch.uint8).numpy()
    return f"{tuple(tensor.shape)} {hashlib.blake2b(values.data, digest_size=8).hexdigest()}"


def load_timed(load: Callable[[], nn.Module]) -> tuple[Load, dict[str, Tensor]]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the present size
    memory, io = counts("status"), counts("io")
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    model = load()
    returned = time.perf_counter() - start
    slices = local_slices(model)
    touch(slices)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    after, io_after = counts("status"), counts("io")
    return Load(
        returned_seconds=returned,
        seconds=seconds,
        processor_seconds=busy,
        read_bytes=io_after["rchar"] - io["rchar"],
        disk_bytes=io_after["read_bytes"] - io["read_bytes"],
        peak_bytes=after["VmHWM"] - memory["VmRSS"],
        kept_bytes=sum(t.numel() * t.itemsize for t in slices.values()),
    ), slices  # fmt: skip


def load_watched(load: Callable[[], nn.Module]) -> Load:
    before = counts("status")
    with watching() as watch:
        result, slices = load_timed(load)
        watch.note_mapped()
    result.mapped_bytes = sum(watch.mapped.values())
    result.anonymous_bytes = watch.anonymous - before["RssAnon"]
    result.file_backed_bytes = watch.file_backed - before["RssFile"]
    result.hashes = {name: hash_slice(tensor) for name, tensor in slices.items()}
    return result


def main_of_a_rank(way: str, tiny: Path, folder: Path, dtype: torch.dtype, is_watched: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tsd.init_process_group()
    torch.manual_seed(0)
    WAYS[way](tiny, dtype)
    load = partial(WAYS[way], folder, dtype)
    return asdict(load_watched(load) if is_watched else load_timed(load)[0])


# --- the rounds ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What all ways do alike."""

    ranks: int
    tiny: Path
    folder: Path
    dtype: torch.dtype
    is_cold: bool

    def load(self, way: str, is_watched: bool = False) -> list[Load]:
        drop_from_cache(self.folder) if self.is_cold else read_into_cache(self.folder)
        arguments = (way, self.tiny, self.folder, self.dtype, is_watched)
        return [Load(**figures) for figures in tsd.launch(main_of_a_rank, self.ranks, arguments)]


def check_same_slices(watched: dict[str, list[Load]]) -> None:
    ways = [way for way in watched if way != OTHER_LAYOUT]
    for way in ways[1:]:
        for rank, (first, other) in enumerate(zip(watched[ways[0]], watched[way], strict=True)):
            if first.hashes != other.hashes:
                different = [n for n in first.hashes if first.hashes[n] != other.hashes.get(n)]
                raise SystemExit(f"rank {rank}: {ways[0]} and {way} have loaded other slices of {different[:3]}")


def slowest(loads: list[Load]) -> Load:
    return max(loads, key=lambda load: load.seconds)


def measure(ways: list[str], setting: Setting, rounds: int) -> list[dict[str, Any]]:
    watched = {way: setting.load(way, is_watched=True) for way in ways}
    check_same_slices(watched)
    timed: dict[str, list[list[Load]]] = {way: [] for way in ways}
    for i in range(rounds):
        first = i % len(ways)
        for way in (*ways[first:], *ways[:first]):
            timed[way].append(setting.load(way))
    return [row(way, setting.ranks, watched[way], timed[way]) for way in ways]


def row(way: str, ranks: int, watched: list[Load], timed: list[list[Load]]) -> dict[str, Any]:
    """The medians over the rounds; of the ranks the slowest, and the one that reads or holds most."""

    def median(value: Callable[[list[Load]], float]) -> float:
        return statistics.median(map(value, timed))

    return {
        "ranks": ranks,
        "way": way,
        "returned_seconds": median(lambda loads: slowest(loads).returned_seconds),
        "seconds": median(lambda loads: slowest(loads).seconds),
        "rounds": [slowest(loads).seconds for loads in timed],
        "processor_seconds": median(lambda loads: max(load.processor_seconds for load in loads)),
        "read_bytes": median(lambda loads: max(load.read_bytes for load in loads))
        + max(load.mapped_bytes for load in watched),
        "disk_bytes": median(lambda loads: sum(load.disk_bytes for load in loads)),
        "kept_bytes": max(load.kept_bytes for load in watched),
        "peak_bytes": median(lambda loads: max(load.peak_bytes for load in loads)),
        "anonymous_bytes": max(load.anonymous_bytes for load in watched),
        "file_backed_bytes": max(load.file_backed_bytes for load in watched),
    }


# --- the table -------------------------------------------------------------------------------------------------------


LINE = "{:>5}  {:<16} {:>8} {:>9} {:>7}  {:>9} {:>7}  {:>9} {:>7} {:>7}  {:>9} {:>7} {:>7} {:>9} {:>7}  {:>7}"
TITLES = LINE.format("", "", "returned", "in memory", "to ours", "processor", "to ours", "read", "of kept", "to ours",
                    "peak", "of kept", "to ours", "anonymous", "of files", "disk")  # fmt: skip
UNITS = LINE.format("ranks", "way", "s", "s", "", "s", "", "MiB", "", "", "MiB", "", "", "MiB", "MiB", "MiB")


def table_line(row: dict[str, Any], ours: dict[str, Any]) -> str:
    sizes = {key: f"{value / MIB:.0f}" for key, value in row.items() if key.endswith("_bytes")}
    compared = ("seconds", "processor_seconds", "read_bytes", "peak_bytes")
    to_ours = {key: f"{row[key] / ours[key]:.2f}" for key in compared}
    of_kept = {key: f"{row[key] / row['kept_bytes']:.3f}" for key in ("read_bytes", "peak_bytes")}
    returned, seconds, busy = (f"{row[key]:.2f}" for key in ("returned_seconds", "seconds", "processor_seconds"))
    return LINE.format(
        row["ranks"], row["way"], returned, seconds, to_ours["seconds"], busy, to_ours["processor_seconds"],
        sizes["read_bytes"], of_kept["read_bytes"], to_ours["read_bytes"],
        sizes["peak_bytes"], of_kept["peak_bytes"], to_ours["peak_bytes"],
        sizes["anonymous_bytes"], sizes["file_backed_bytes"], sizes["disk_bytes"],
    )  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    ours = next(row for row in rows if row["way"] == "torchshard")
    for row in rows:
        print(table_line(row, ours), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="timed loads of each way, each in new processes")
    parser.add_argument("--layers", type=int, default=10, help="of 86 MiB; the vocabulary has 250 MiB")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each load")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the parameters")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--folder", type=Path, help="where the weights are made, and deleted; by default in /tmp")
    parser.add_argument("--json", type=Path, help="write the rows, unrounded, to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # the ranks' resource trackers have some at their end
    ways = ["torchshard", *(way for way in options.ways if way != "torchshard")]
    if "transformers" in ways and importlib.util.find_spec("accelerate") is None:
        print("without accelerate transformers has no tp_plan: it is left out")
        ways.remove("transformers")
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        tiny, big = Path(folder, "tiny"), Path(folder, "big")
        transformers_logging.disable_progress_bar()
        save_random(tiny, 2, 128, TINY)
        save_random(big, options.layers, 32000, SIZES)
        files = [*big.glob("*.safetensors")]
        size = sum(file.stat().st_size for file in files) / MIB
        cache = "dropped from the page cache before each load" if options.cold else "in the page cache"
        print(
            f"{size:.0f} MiB of bfloat16 in {len(files)} files, {cache}; {options.dtype} parameters; "
            f"gloo, 1 thread per rank; medians of {options.rounds} rounds"
        )
        print(TITLES, UNITS, sep="\n", flush=True)
        for ranks in options.ranks:
            setting = Setting(ranks, tiny, big, getattr(torch, options.dtype), options.cold)
            rows += measure(ways, setting, options.rounds)
            show(rows[-len(ways) :])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
