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
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from alone import in_processes
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import torchshard as ts
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.program import program
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.distributed.group import ALONE
from torchshard.ir.fake_values import hint
from torchshard.ir.graph import placeholders
from torchshard.ops import OPS, Begin, wait
from torchshard.passes import direct, localized
from torchshard.plans.objective import read_aim
from torchshard.runtime.compilation import Compiler
from torchshard.runtime.step import Step
from torchshard.weights.parameter import ShardedParameter

RANKS = (1, 2, 4, 8)
ROUNDS = 20
LIMIT_SECONDS = 600
TIMED = "step of a rank"
GRAPHS = {"mode": "reduce-overhead"}


class Skipped(Exception):
    """Why a check can't run here."""


# --- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with the shapes of Llama 8B's, divided by `smaller`: attention of grouped heads, a gated product.

    With `ranks`, one rank's part of it, as Megatron cuts it.
    """

    def __init__(self, smaller: int = 1, ranks: int = 1, *, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.dropout, self.checkpointed = dropout, checkpointed
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
        return checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)

    def layer(self, x: Tensor) -> Tensor:
        """(batch, positions, width), as it gets them."""
        p = self.dropout
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=grouped)
        x = x + F.dropout(self.o(mixed.transpose(1, 2).flatten(2)), p)
        h = self.norm2(x)
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), p)


SEQUENCE = dict.fromkeys(("*.norm1", "*.norm2"), "sequence")
PLAN = dict.fromkeys(("*.q", "*.k", "*.v", "*.gate", "*.up"), "column") | dict.fromkeys(("*.o", "*.down"), "row")


def _stack(
    device: str, blocks: int, smaller: int, dtype: torch.dtype, ranks: int = 1, **options: Any
) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(smaller, ranks, **options) for _ in range(blocks)))
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


def _on_ranks(
    run: Callable[..., Any], world: int, device: str, backend: str, *args: Any, group_size: int = -1
) -> list[Any]:
    """Calls a function on several ranks that share the card."""
    return ts.distributed.launch(_rank, world, (run, device, backend, group_size, *args))


def _rank(run: Callable[..., Any], device: str, backend: str, group_size: int, *args: Any) -> Any:
    ts.distributed.init_process_group(group_size, backend=backend)
    return run(device, *args)


class Steps(NamedTuple):
    """How a model is trained beside the unsharded one."""

    dtype: torch.dtype = torch.float32
    plan: Any = PLAN
    dropout: float = 0.0
    """Of the layers' output, and with the math kernel of attention too."""
    autocast: torch.dtype | None = None
    checkpointed: bool = False
    default: bool = False
    """Whether new tensors are on the device by default."""
    mesh: Any = None
    """Of `ts.shard`: a dict, whose last axis is `tp`, or how all ranks store the weights."""
    compile: bool = False

    @property
    def tp(self) -> int | None:
        """How many ranks split the weights; None: all of them."""
        return self.mesh["tp"] if isinstance(self.mesh, Mapping) else None if self.mesh is None else 1

    @property
    def limit(self) -> float:
        """What gradients may differ by."""
        limits = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
        return limits[self.autocast or self.dtype]


def _gradients(model: nn.Module, x: Tensor, steps: Steps) -> dict[str, Tensor]:
    """Of one step, scaled as float16 wants it."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast(x.device.type, steps.autocast, enabled=steps.autocast is not None):
        loss = model(x).square().mean()
    scaler = torch.amp.GradScaler(x.device.type, init_scale=1024.0, enabled=steps.autocast == torch.float16)
    scaler.scale(loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _training(device: str, steps: Steps) -> float:
    """The largest difference of three steps' gradients, relative to the largest gradient."""
    torch.set_default_device(device if steps.default else None)
    model, x = _stack(device, 2, 16, steps.dtype, dropout=steps.dropout, checkpointed=steps.checkpointed)
    x = (x * torch.arange(1, 7, device=device)[:, None, None]).to(steps.dtype)
    tp = steps.tp or dist.get_world_size()  # these ranks get the same part of the batch
    part = x.chunk(dist.get_world_size() // tp)[dist.get_rank() // tp]
    worst = 0.0
    with sdpa_kernel(SDPBackend.MATH) if steps.dropout else nullcontext():
        objective = {"compile": steps.compile}
        sharded = ts.shard(copy.deepcopy(model), steps.plan, (part,), mesh=steps.mesh, objective=objective)
        for _ in range(3):
            whole, own = _gradients(model, x, steps), _gradients(sharded, part, steps)
            if whole.keys() != own.keys():
                raise AssertionError("other parameters have gradients")
            for name, p in sharded.named_parameters():
                if (gradient := own.get(name)) is not None and isinstance(p, ShardedParameter):
                    gradient = p.ranks.gathered(gradient.as_subclass(Tensor), p.sharding, p.whole)
                    worst = max(worst, float((gradient - whole[name]).abs().max() / whole[name].abs().max()))
    return worst


def training(device: str, world: int, backend: str = "gloo", **given: Any) -> str:
    """Three steps beside the unsharded model."""
    if backend == "nccl" and device == "cpu":
        raise Skipped("NCCL needs a GPU")
    steps = Steps(**given)
    group_size = steps.mesh["tp"] if isinstance(steps.mesh, Mapping) else -1
    worst = max(_on_ranks(_training, world, device, backend, steps, group_size=group_size))
    if not worst < steps.limit:
        raise AssertionError(f"gradients differ by {worst:.1e} of the largest, more than {steps.limit:.0e}")
    return f"gradients differ by {worst:.1e} of the largest"


def _generated(device: str, implementation: str, compile: bool) -> int:
    """Tokens that a small Llama gives as its unsharded twin does."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=3,
        vocab_size=512, eos_token_id=None, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device).eval()
    ids = torch.arange(1, 25, device=device).reshape(2, 12)
    example = {"input_ids": ids, "use_cache": False}
    sharded = ts.shard(
        copy.deepcopy(model), "auto", example_kwargs=example, objective={"mode": "infer", "compile": compile}
    )
    options = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": implementation}
    whole, own = (each.generate(ids, attention_mask=torch.ones_like(ids), **options) for each in (model, sharded))
    if not torch.equal(whole, own):
        raise AssertionError(f"{int((whole != own).sum())} of {whole.numel()} tokens differ")
    return whole.numel() - ids.numel()


def generating(device: str, implementation: str = "dynamic", *, compile: bool = False) -> str:
    """The tokens of `generate`, its cache split, beside the unsharded model's."""
    return f"{min(_on_ranks(_generated, 2, device, 'gloo', implementation, compile))} equal tokens"


def _told(call: Callable[[], object], kind: type[ts.ShardError]) -> str:
    """The first line of the error that a rank gets."""
    try:
        call()
    except kind as error:
        return str(error).partition("\n")[0]
    return ""


def _all_told(lines: list[str]) -> str:
    """What the ranks are told, of whom none may go on."""
    if not all(lines):
        raise AssertionError(f"told: {lines}")
    return "; ".join(lines)


def _sharing() -> str:
    return _told(partial(ts.distributed.init_process_group, "nccl", timeout_seconds=10), ts.DistributedError)


def sharing(device: str) -> str:
    """Two ranks that ask for NCCL on one card: both are told."""
    if device == "cpu" or torch.cuda.device_count() > 1:
        raise Skipped("needs one GPU, alone")
    return _all_told(ts.distributed.launch(_sharing, 2))


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
    aim = read_aim(device=device)
    made = program(model, read_constraints(ModelFacts.of(model), PLAN, Mesh((MeshAxis(world),)), aim), (x,))
    coordinate = MeshAxis(world).simulated()[0]
    local = localized(made.graph, coordinate)
    compiler = None if compile is None else Compiler(compile, where="compile")
    call = Step(local, coordinate, (), lambda graph: (compiler or direct)(_without_sending(graph)))
    arguments = [
        x
        if n.meta["kind"] == "input"
        else nn.Parameter(0.02 * torch.randn(n.meta["val"].shape, device=device, dtype=x.dtype))
        for n in placeholders(local.graph)
    ]

    def step() -> object:
        for argument in arguments:
            argument.grad = None
        if compiler is not None:
            compiler.begin_call(ALONE, {x.device})
        return call(*arguments)[0].square().mean().backward()

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


class Keyed(nn.Module):
    """Attention with a bias of its keys, whose gradient is nothing but rounding, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(F.dropout(mixed, 0.2)).square()


def checked(device: str) -> str:
    """`ts.check` of a model on the device, dropout included."""
    torch.manual_seed(0)
    model, x = Keyed().to(device), torch.randn(2, 5, 16, device=device)
    before = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    report = ts.check(model, "auto", example_inputs=(x,), mesh=2)
    after = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    if not report.ok or not torch.equal(before, after):
        raise AssertionError(f"the check has changed the random numbers that come next, or fails: {report}")
    return str(report).partition("\n")[0]


def _graphs_by_gloo(device: str) -> str:
    model, x = _stack(device, 1, 16, torch.float32)
    return _told(partial(ts.shard(model, PLAN, (x,), objective={"compile": GRAPHS}), x), ts.InputError)


def graphs_by_gloo(device: str) -> str:
    """CUDA graphs on ranks that share a card: all are told."""
    if device == "cpu":
        raise Skipped("CUDA graphs need a GPU")
    return _all_told(_on_ranks(_graphs_by_gloo, 2, device, "gloo"))


CHECKS: dict[str, Callable[[str], str]] = {
    "this machine": environment,
    "NCCL, a world of one": partial(training, world=1, backend="nccl"),
    "NCCL, a world of one, as CUDA graphs": partial(training, world=1, backend="nccl", options={"compile": GRAPHS}),
    "two ranks on one card, eager collectives": collectives,
    "two ranks on one card, float64": partial(training, world=2, dtype=torch.float64),
    "two ranks on one card, float32": partial(training, world=2),
    "two ranks on one card, bfloat16": partial(training, world=2, dtype=torch.bfloat16),
    "two ranks on one card, float16": partial(training, world=2, dtype=torch.float16),
    "two ranks on one card, compiled": partial(training, world=2, compile=True),
    "two ranks on one card, dropout": partial(training, world=2, dtype=torch.float64, dropout=0.2),
    "two ranks on one card, checkpoints": partial(training, world=2, dtype=torch.float64, checkpointed=True),
    "two ranks on one card, split sequence": partial(training, world=2, dtype=torch.float64, plan=PLAN | SEQUENCE),
    "two ranks on one card, divided batch": partial(training, world=2, dtype=torch.float64, plan={}, mesh="replicate"),
    "three ranks on one card, weights in slices": partial(
        training, world=3, dtype=torch.float64, plan={}, mesh="shard"
    ),
    "two ranks on one card, weights in slices, compiled": partial(
        training, world=2, plan={}, mesh="shard", compile=True
    ),
    "four ranks on one card, batch and weights": partial(
        training, world=4, dtype=torch.float64, mesh={"dp": 2, "tp": 2}
    ),
    "six ranks on one card, weights in slices of slices": partial(
        training, world=6, dtype=torch.float64, dropout=0.2, mesh={"dp": (3, "shard"), "tp": 2}
    ),
    "three ranks on one card, planned, autocast to bfloat16": partial(
        training, world=3, plan="auto", autocast=torch.bfloat16
    ),
    "two ranks on one card, autocast to float16, scaled": partial(training, world=2, autocast=torch.float16),
    "two ranks on one card, generate": generating,
    "two ranks on one card, generate, static cache": partial(generating, implementation="static"),
    "two ranks on one card, generate, compiled": partial(generating, compile=True),
    "two ranks on one card, all tensors made there by default": partial(training, world=2, default=True),
    "two ranks on one card, by NCCL": sharing,
    "two ranks on one card, as CUDA graphs": graphs_by_gloo,
    "ts.check of a model on the card": checked,
    "step of a rank": partial(on_ranks, make=_rank_step),
    "step of a rank by hand": partial(on_ranks, make=_step_by_hand),
    "step of a rank by DTensor": partial(on_ranks, make=_dtensor_step),
    "step of a rank, compiled": partial(on_ranks, make=_rank_step, compile={}),
    "step of a rank by hand, compiled": partial(on_ranks, make=_step_by_hand, compile={}),
    "step of a rank by DTensor, compiled": partial(on_ranks, make=_dtensor_step, compile={}),
    "step of a rank, as CUDA graphs": partial(on_ranks, make=_rank_step, compile=GRAPHS),
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
    parser.add_argument("--jobs", type=int, default=1, help="checks at a time, of those that are not timed")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    options = parser.parse_args()
    names, rows = [name for name in CHECKS if options.only in name], []
    timed = [name for name in names if name.startswith(TIMED)]
    for group, jobs in (([name for name in names if name not in timed], options.jobs), (timed, 1)):
        for name, found, _ in in_processes(partial(_found, options.device), group, LIMIT_SECONDS, jobs):
            # a text in place of what the function gives says what failed
            status, text = found if isinstance(found, tuple) else ("FAILED", found)
            rows.append(f"| {name} | {status} | {text.replace('|', '/')} |")
            print(f"{status:8} {name}: {text}", flush=True)
    if options.write:
        options.write.write_text("\n".join([HEADING + "| check | | found |", "|---|---|---|", *rows, ""]))
    return int(any("| FAILED |" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
