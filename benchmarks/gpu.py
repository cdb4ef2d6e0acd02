"""What one GPU can show: each check alone in a process, with what it found, or why it was skipped.

    python benchmarks/gpu.py --write docs/gpu.md     (make gpu)
    python benchmarks/gpu.py --device cpu            the same checks on a CPU, where they can run, to try them

Two ranks share the card: their CUDA tensors travel through gloo. The step of a rank of 1, 2, 4 and 8 is that of its own
graphs, without what they send: each collective gives memory of the right size at once. Beside it stand a rank's part of
the model as Megatron cuts it, which sends nothing either, and DTensor's in a group that sends nothing.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from alone import in_processes
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchshard as ts
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.program import program
from torchshard.core.mesh import MeshAxis
from torchshard.distributed.ops import OPS, Begin, wait
from torchshard.ir.graph import hint, placeholders
from torchshard.passes import direct, localized, step_graphs
from torchshard.plans.machine import objective

RANKS = (1, 2, 4, 8)
ROUNDS = 20
LIMIT_SECONDS = 600


class Skipped(Exception):
    """Why a check can't run here."""


# --- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with the shapes of Llama 8B's, divided by `smaller`: attention of grouped heads, a gated product.

    With `ranks`, one rank's part of it, as Megatron cuts it.
    """

    def __init__(self, smaller: int = 1, ranks: int = 1) -> None:
        super().__init__()
        width, inner, self.head = 4096 // smaller, 14336 // smaller, 128
        heads = max(width // self.head, 8)
        self.head = width // heads
        groups = max(heads // 4, 8)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width // ranks, bias=False), nn.Linear(width // ranks, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.head // ranks, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner // ranks, bias=False) for _ in range(2))
        self.down = nn.Linear(inner // ranks, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


PLAN = dict.fromkeys(("*.q", "*.k", "*.v", "*.gate", "*.up"), "column") | dict.fromkeys(("*.o", "*.down"), "row")


def _stack(device: str, blocks: int, smaller: int, dtype: torch.dtype, ranks: int = 1) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(smaller, ranks) for _ in range(blocks)))
    length = 2048 // smaller
    return model.to(device, dtype), torch.randn(1, length, 4096 // smaller, device=device, dtype=dtype)


# --- checks ----------------------------------------------------------------------------------------------------------


def environment(device: str) -> str:
    """What this machine is."""
    if device == "cpu":
        return f"PyTorch {torch.__version__}, no GPU"
    found = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    size = f"{found.total_memory / 2**30:.0f} GiB"
    card = f"{found.name}, {size}, compute capability {found.major}.{found.minor}"
    return f"{card}, PyTorch {torch.__version__}, NCCL {nccl}"


def _on_ranks(run: Callable[..., Any], world: int, device: str, backend: str, *args: Any) -> list[Any]:
    """Calls a function on several ranks that share the card."""
    return ts.distributed.launch(_rank, world, (run, device, backend, *args))


def _rank(run: Callable[..., Any], device: str, backend: str, *args: Any) -> Any:
    ts.distributed.init_process_group(backend)
    return run(device, *args)


def _training(device: str, dtype: torch.dtype, compile: bool) -> float:
    """The largest difference of three steps' losses and gradients, relative to the largest gradient."""
    model, x = _stack(device, 2, 16, dtype)
    sharded = ts.shard(copy.deepcopy(model), PLAN, (x,), compile=compile)
    worst = 0.0
    for _ in range(3):
        for each in (model, sharded):
            each.zero_grad()
            each(x).square().mean().backward()
        whole = {name: p.grad for name, p in model.named_parameters()}
        gradients = {n: ts.distributed.gather(p.grad, s.dim) if (s := sharded.layouts[n]) != ts.I else p.grad
                     for n, p in sharded.named_parameters()}  # fmt: skip
        for name, gradient in gradients.items():
            worst = max(worst, float((gradient - whole[name]).abs().max() / whole[name].abs().max()))
    return worst


def training(
    device: str, world: int, backend: str, dtype: torch.dtype = torch.float32, *, compile: bool = False
) -> str:
    """Three steps beside the unsharded model."""
    if backend == "nccl" and device == "cpu":
        raise Skipped("NCCL needs a GPU")
    limit = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    worst = max(_on_ranks(_training, world, device, backend, dtype, compile))
    if not worst < limit:
        raise AssertionError(f"gradients differ by {worst:.1e} of the largest, more than {limit:.0e}")
    return f"gradients differ by {worst:.1e} of the largest"


def _collectives(device: str) -> list[str]:
    x = torch.arange(12.0, device=device).reshape(4, 3) * (1 + ts.distributed.get_rank())
    found = []
    for name, call in (
        ("all_reduce", lambda t: ts.distributed.all_reduce(t.clone())),
        ("gather", lambda t: ts.distributed.gather(t, 0)),
        ("gather, dim 1", lambda t: ts.distributed.gather(t, 1)),
        ("reduce_scatter", lambda t: ts.distributed.reduce_scatter(t, 0)),
        ("all_to_all", lambda t: ts.distributed.all_to_all(t, 0, 1)),
        ("broadcast", lambda t: ts.distributed.broadcast(t.clone(), 1)),
    ):
        if not torch.equal(call(x).cpu(), call(x.cpu())):
            found.append(name)
    return found


def collectives(device: str) -> str:
    """Each eager collective on CUDA tensors, beside the same on the CPU."""
    wrong = {name for found in _on_ranks(_collectives, 2, device, "gloo") for name in found}
    if wrong:
        raise AssertionError(f"{', '.join(sorted(wrong))} differ from the CPU's")
    return "equal to the CPU's"


def _without_sending(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, whose collectives give memory of the right size at once."""
    for node in list(module.graph.nodes):
        if node.target in OPS and OPS[node.target].kernel == "none":
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif isinstance(node.target, Begin) or node.target in OPS:
            value = (next(iter(node.users)) if isinstance(node.target, Begin) else node).meta["val"]
            node.target, node.args = _memory, (node.args[0], [hint(size) for size in value.shape], value.dtype)
        elif node.target is wait:
            node.target = _same
    module.recompile()
    return module


def _memory(x: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return x.new_zeros(shape, dtype=dtype) if list(x.shape) != list(shape) else x


def _same(x: Tensor) -> Tensor:
    return x


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _rank_step(device: str, world: int, smaller: int, compile: dict[str, Any] | None) -> Callable[[], object]:
    """A step of rank 0 of so many, without what it sends."""
    model, x = _stack(device, 2, smaller, _dtype(device))
    aim = objective(None, device=device)
    made = program(model, read_constraints(ModelFacts.of(model), PLAN, MeshAxis(world), aim), (x,))
    local = localized(made.graph, MeshAxis(world).simulated()[0])
    parts = step_graphs(local)
    forward, backward = (_without_sending(part) for part in (parts.forward, parts.backward))
    run = (lambda graph: torch.compile(graph, **compile)) if compile is not None else direct
    forward, backward = run(forward), run(backward)
    arguments = [
        x if n.meta["kind"] == "input" else 0.02 * torch.randn(n.meta["val"].shape, device=device, dtype=x.dtype)
        for n in placeholders(local.graph)
    ]
    count = len(parts.given)

    def step() -> object:
        with torch.no_grad():
            made = forward(*arguments)
            return backward(*made[count:], *made[:count])

    return step


def _measured(step: Callable[[], object], device: str) -> tuple[float, int, float]:
    """Seconds of a step, kernels that it launches, and the most memory that it holds."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        step()
    sync()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step()
        sync()
        times.append(time.perf_counter() - start)
    activity = torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        sync()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return statistics.median(times), len(profiler.events()), peak


def _step_by_hand(device: str, ranks: int, smaller: int, compile: dict[str, Any] | None) -> Callable[[], object]:
    """A step of a rank's part as Megatron cuts it, under autograd; with one rank, the unsharded model's."""
    return _autograd_step(*_stack(device, 2, smaller, _dtype(device), ranks), compile)


def _dtensor_step(device: str, ranks: int, smaller: int, compile: dict[str, Any] | None) -> Callable[[], object]:
    """A step of a rank under DTensor, in a group that sends nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    model, x = _stack(device, 2, smaller, _dtype(device))
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    parallelize_module(
        model, init_device_mesh(device, (ranks,)), {name: styles[style]() for name, style in PLAN.items()}
    )
    return _autograd_step(model, x, compile)


def _autograd_step(model: nn.Module, x: Tensor, compile: dict[str, Any] | None) -> Callable[[], object]:
    call = model if compile is None else torch.compile(model, **compile)

    def step() -> object:
        model.zero_grad(set_to_none=True)
        return call(x).square().mean().backward()

    return step


def on_ranks(
    device: str,
    make: Callable[[str, int, int, dict[str, Any] | None], Callable[[], object]],
    compile: dict[str, Any] | None = None,
) -> str:
    """The time, kernels and memory of a rank's step with two layers of Llama 8B's shapes, on 1, 2, 4 and 8 ranks."""
    smaller = 1 if device == "cuda" else 16
    lines = []
    for ranks in RANKS:
        seconds, kernels, peak = _measured(make(device, ranks, smaller, compile), device)
        lines.append(f"{ranks}: {1e3 * seconds:.2f} ms, {kernels} kernels" + (f", {peak:.1f} GiB" if peak else ""))
    return "; ".join(lines)


def checked(device: str) -> str:
    """`ts.check` of a model on the device, dropout included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16)).to(device)
    x = torch.randn(4, 16, device=device)
    before = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    report = ts.check(model, {"0": "column", "3": "row"}, world_size=2, example_inputs=(x,))
    after = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    if not report.ok or not torch.equal(before, after):
        raise AssertionError("the check fails, or has changed the random numbers that come next")
    return str(report).partition("\n")[0]


CHECKS: dict[str, Callable[[str], str]] = {
    "this machine": environment,
    "NCCL, a world of one": partial(training, world=1, backend="nccl"),
    "two ranks on one card, eager collectives": collectives,
    "two ranks on one card, float64": partial(training, world=2, backend="gloo", dtype=torch.float64),
    "two ranks on one card, float32": partial(training, world=2, backend="gloo"),
    "two ranks on one card, bfloat16": partial(training, world=2, backend="gloo", dtype=torch.bfloat16),
    "two ranks on one card, float16": partial(training, world=2, backend="gloo", dtype=torch.float16),
    "two ranks on one card, compiled": partial(training, world=2, backend="gloo", compile=True),
    "ts.check of a model on the card": checked,
    "step of a rank": partial(on_ranks, make=_rank_step),
    "step of a rank by hand": partial(on_ranks, make=_step_by_hand),
    "step of a rank by DTensor": partial(on_ranks, make=_dtensor_step),
    "step of a rank, compiled": partial(on_ranks, make=_rank_step, compile={}),
    "step of a rank by hand, compiled": partial(on_ranks, make=_step_by_hand, compile={}),
    "step of a rank by DTensor, compiled": partial(on_ranks, make=_dtensor_step, compile={}),
    "step of a rank, as CUDA graphs": partial(on_ranks, make=_rank_step, compile={"mode": "reduce-overhead"}),
}


def _found(device: str, name: str) -> tuple[str, str]:
    """(passed, skipped or FAILED, what was found)."""
    if device == "cuda" and not torch.cuda.is_available():
        return "skipped", "no GPU on this machine"
    if "CUDA graphs" in name and device == "cpu":
        return "skipped", "CUDA graphs need a GPU"
    try:
        return "passed", CHECKS[name](device)
    except Skipped as reason:
        return "skipped", str(reason)


HEADING = """# On a GPU

Written by `make gpu` (`benchmarks/gpu.py`), which runs what one GPU can show. Two ranks share the card; their tensors
travel through gloo. A rank's step is that of one rank of 1, 2, 4 and 8, forward and backward, through two layers with
the shapes of Llama 8B, batch 1, 2,048 positions, bfloat16, without what it sends.

"""


def main() -> int:
    """Runs the checks, each in a process of its own, and prints or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--write", type=Path, help="the page")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    options = parser.parse_args()
    names, rows = [name for name in CHECKS if options.only in name], []
    for name, found, _ in in_processes(partial(_found, options.device), names, LIMIT_SECONDS, jobs=1):
        # a text in place of what the function gives says what failed
        status, text = found if isinstance(found, tuple) else ("FAILED", found)
        rows.append(f"| {name} | {status} | {text.replace('|', '/')} |")
        print(f"{status:8} {name}: {text}", flush=True)
    if options.write:
        options.write.write_text("\n".join([HEADING + "| check | | found |", "|---|---|---|", *rows, ""]))
    return int(any("| FAILED |" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
