"""The time of a training step of a stack of GPT blocks on two ranks or four, several ways, interleaved in one run:

    unsharded     the plain model, whole on every rank
    by hand       local weights and two autograd Functions, as Megatron-LM has them: the all-reduce of a column-wise
                  layer's backward runs while the gradients of the weights are computed
    DTensor       torch.distributed.tensor.parallel.parallelize_module
    tp_plan       Hugging Face's, of a model of transformers made of the same blocks
    torchshard    torchshard.shard with a dict plan; its ranks talk through memory, all others by gloo
    by hand, memory    the same as by hand, through torchshard's memory
    ..., compiled the same with torch.compile; torchshard's is objective={"compile": True}

Before anything is timed, all must give the same loss and the same gradients. A step is forward, loss and backward; each
begins at a barrier and ends when the slowest rank ends. Ratios are taken round by round. Collectives are counted as
they run, and beside them those in which ranks compare what they do. `cpu` is the process's CPU time, the median of rank
0's rounds, by which a noisy machine can be told from a slow step.

    python benchmarks/step_time.py --widths 128 512 --rounds 20 --json step_time.json
    python benchmarks/step_time.py --ranks 4 --widths 128
    python benchmarks/step_time.py --backend gloo    # torchshard's ranks talk by gloo, too
    python benchmarks/step_time.py --others memory   # DTensor's through memory (in one process it has one backend)
    python benchmarks/step_time.py --memory          # the peak of a step with a sequence of 2,048, with checkpoints
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from backends import MEMORY, add_options, begin, mesh_of, others_group, sent, through_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, parallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

import torchshard as ts

BLOCKS, BATCH, SEQUENCE, HEAD = 4, 4, 128, 32
LONG = 2048
"""The sequence with which memory is measured."""
COLUMN, ROW = ("q", "k", "v", "up"), ("o", "down")
PLAN = {f"*.{name}": "column" for name in COLUMN} | {f"*.{name}": "row" for name in ROW}
SPLIT = {f"{n}.{p}": 0 for n in COLUMN for p in ("weight", "bias")} | {f"{n}.weight": 1 for n in ROW}
COMPILED = ", compiled"
NAMES = (
    "unsharded", "by hand", f"by hand{MEMORY}", "DTensor", "tp_plan", "torchshard",
    f"unsharded{COMPILED}", f"DTensor{COMPILED}", f"torchshard{COMPILED}",
)  # fmt: skip
WARM_UP_ROUNDS = 2


# --- the model, four ways --------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        x = x + self.o(attention(self.q(h), self.k(h), self.v(h)))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Columns(torch.autograd.Function):
    """Column-wise products of one value; its gradient is summed over the ranks while those of the weights are made.

    As Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication, for several weights that take the same value.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor, *weights_and_biases: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = x.flatten(0, -2)
        grads = tuple(grad.flatten(0, -2) for grad in grads)
        total = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            total.addmm_(grad, weight)
        work = dist.all_reduce(total, group=ctx.group, async_op=True)
        pairs = [(grad.t() @ flat, grad.sum(0)) for grad in grads]
        work.wait()
        return (None, total.view_as(x), *(one for pair in pairs for one in pair))


class Reduce(torch.autograd.Function):
    """The sum over the ranks, in place; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class HandBlock(Block):
    """A Block with this rank's slices of another's weights."""

    def __init__(self, whole: Block, rank: int, group: dist.ProcessGroup) -> None:
        super().__init__(whole.q.in_features)
        self.group = group
        self.load_state_dict(whole.state_dict())
        for path, dim in SPLIT.items():
            parameter = self.get_parameter(path)
            own = parameter.data.chunk(dist.get_world_size(), dim)[rank]
            parameter.data = own.clone(memory_format=torch.contiguous_format)

    def forward(self, x: Tensor) -> Tensor:
        mixed = attention(*self._columns(self.ln1(x), self.q, self.k, self.v))
        x = x + (Reduce.apply(self.group, F.linear(mixed, self.o.weight)) + self.o.bias)
        (inner,) = self._columns(self.ln2(x), self.up)
        return x + (Reduce.apply(self.group, F.linear(F.gelu(inner), self.down.weight)) + self.down.bias)

    def _columns(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        parameters = (p for layer in layers for p in (layer.weight, layer.bias))
        made: tuple[Tensor, ...] = Columns.apply(self.group, x, *parameters)
        return made


class Checkpointed(nn.Sequential):
    """Blocks of which each is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def with_dtensor(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """The norms give replicated DTensors, so that q, k and v share one all-reduce of the gradient."""
    replicated = {"output_layouts": Replicate(), "desired_output_layouts": Replicate(), "use_local_output": False}
    styles = {f"*.{name}": parallel.ColwiseParallel() for name in COLUMN}
    styles |= {f"*.{name}": parallel.RowwiseParallel() for name in ROW}
    styles |= {f"*.{name}": parallel.PrepareModuleOutput(**replicated) for name in ("ln1", "ln2")}
    return parallel.parallelize_module(copy.deepcopy(model), mesh, styles)


class Stack(PreTrainedModel):
    """The blocks as a model of transformers, whose `tp_plan` splits them."""

    config_class = PretrainedConfig
    base_model_prefix = ""
    _tp_plan = {f"blocks.*.{n}": "colwise" for n in COLUMN} | {f"blocks.*.{n}": "rowwise" for n in ROW}

    def __init__(self, config: PretrainedConfig, blocks: nn.Sequential) -> None:
        super().__init__(config)
        self.blocks = blocks
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The blocks have their values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def with_tp_plan(model: nn.Sequential) -> nn.Module:
    """On the world, whatever the others' group: Hugging Face's makes its mesh itself."""
    stack = Stack(PretrainedConfig(), copy.deepcopy(model))
    config, _, mesh = stack.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size()))
    split: nn.Module = stack.maybe_distribute_model(stack, config, mesh)
    return split


def implementations(
    width: int, x: Tensor, rank: int, names: Sequence[str], gloo: dist.ProcessGroup, others: dist.ProcessGroup
) -> dict[str, nn.Module]:
    model = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    world: Any = dist.group.WORLD
    make: dict[str, Callable[[], Any]] = {
        "unsharded": lambda: model,
        "by hand": lambda: nn.Sequential(*(HandBlock(block, rank, gloo) for block in model)),
        f"by hand{MEMORY}": lambda: nn.Sequential(*(HandBlock(block, rank, world) for block in model)),
        "DTensor": lambda: with_dtensor(model, mesh_of(others)),
        "tp_plan": lambda: with_tp_plan(model),
        "torchshard": lambda: ts.shard(model, PLAN, (x,)),
        f"unsharded{COMPILED}": lambda: torch.compile(copy.deepcopy(model)),
        f"DTensor{COMPILED}": lambda: torch.compile(with_dtensor(model, mesh_of(others))),
        f"torchshard{COMPILED}": lambda: ts.shard(model, PLAN, (x,), objective={"compile": True}),
    }
    return {name: make[name]() for name in names}


# --- the same numbers ------------------------------------------------------------------------------------------------


def step(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), target)
    loss.backward()
    return loss.detach()


def local_slice(whole: Tensor, like: Tensor, rank: int) -> Tensor:
    """This rank's slice of a whole tensor, along the dim that `like` is smaller in."""
    for dim, (size, held) in enumerate(zip(whole.shape, like.shape, strict=True)):
        whole = whole if size == held else whole.narrow(dim, rank * held, held)
    return whole


def check_equal(models: dict[str, nn.Module], x: Tensor, target: Tensor, rank: int) -> None:
    losses = {name: step(model, x, target) for name, model in models.items()}
    wanted = {_path(path): parameter.grad for path, parameter in models["unsharded"].named_parameters()}
    rounding = 1e-5 * max(grad.abs().max().item() for grad in wanted.values())
    for name, model in models.items():
        torch.testing.assert_close(losses[name], losses["unsharded"])
        for path, parameter in model.named_parameters():
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(grad, local_slice(wanted[_path(path)], grad, rank), rtol=0, atol=rounding)


def _path(name: str) -> str:
    """A parameter's name in the plain stack."""
    return name.removeprefix("_orig_mod.").removeprefix("blocks.")


# --- counting and timing ---------------------------------------------------------------------------------------------


def timed(run: Callable[[], Any], model: nn.Module) -> float:
    model.zero_grad(set_to_none=True)
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def on_cpu(run: Callable[[], float]) -> tuple[float, float]:
    """What a function returns, and the seconds of this process's CPU that it took."""
    start = time.process_time()
    return run(), time.process_time() - start


def slowest(seconds: list[list[float]]) -> list[list[float]]:
    """A step ends when the slowest rank ends."""
    held = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return held.tolist()


def measure(width: int, options: argparse.Namespace, rank: int, gloo: dist.ProcessGroup) -> dict[str, Any]:
    torch.manual_seed(0)
    x, target = torch.randn(BATCH, SEQUENCE, width), torch.randn(BATCH, SEQUENCE, width)
    known = [name for name in NAMES if through_memory() or not name.endswith(MEMORY)]
    names = [name for name in known if not options.only or name in ("unsharded", "by hand", *options.only)]
    models = implementations(width, x, rank, names, gloo, others_group(options.others, gloo))
    check_equal(models, x, target, rank)
    runs = {name: partial(step, model, x, target) for name, model in models.items()}
    one_round = lambda: [on_cpu(partial(timed, runs[name], models[name])) for name in names]  # noqa: E731
    warm = slowest([[seconds for seconds, _ in one_round()] for _ in range(WARM_UP_ROUNDS)])
    rounds = options.rounds or min(200, max(5, int(options.seconds / sum(warm[-1]))))
    counts = {name: sent(runs[name]) for name in names}
    taken = [one_round() for _ in range(rounds)]
    cpu = {name: statistics.median(row[i][1] for row in taken) for i, name in enumerate(names)}
    return {
        "width": width,
        "names": names,
        "sent": counts,
        "rounds": slowest([[s for s, _ in row] for row in taken]),
        "cpu": cpu,
    }


def peaks(width: int, rank: int, gloo: dist.ProcessGroup) -> dict[str, Any]:
    """The bytes that a step of a long sequence takes beside the parameters, with each block computed again."""
    torch.manual_seed(0)
    x, target = torch.randn(1, LONG, width), torch.randn(1, LONG, width)
    plain = Checkpointed(*(Block(width) for _ in range(BLOCKS)))
    models = {
        "unsharded": plain,
        "by hand": Checkpointed(*(HandBlock(block, rank, gloo) for block in plain)),
        "DTensor": with_dtensor(plain, mesh_of(gloo)),
        "torchshard": ts.shard(plain, PLAN, (x,)),
    }
    found = {}
    for name, model in models.items():
        for _ in range(2):
            step(model, x, target)
        found[name] = peak(partial(step, model, x, target), model)
    return {"width": width, "peaks": found}


def peak(run: Callable[[], object], model: nn.Module) -> int:
    """The most that a step allocates at a time, by the allocator's own events."""
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    model.zero_grad(set_to_none=True)
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def rank_main(options: argparse.Namespace) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore")
    gloo = begin(options.backend)
    rank = dist.get_rank()
    if options.memory:
        return [peaks(width, rank, gloo) for width in options.widths]
    return [measure(width, options, rank, gloo) for width in options.widths]


# --- the table -------------------------------------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per implementation; ratios to the hand-written one are taken round by round."""
    names = result["names"]
    rows, hand = [], [times[names.index("by hand")] for times in result["rounds"]]
    for name, times in zip(names, zip(*result["rounds"], strict=True), strict=True):
        ratios = [a / b for a, b in zip(times, hand, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        spread = {"median": middle, "quartiles": (low, high), "range": (min(ratios), max(ratios))}
        row = {"width": result["width"], "name": name, "median_seconds": statistics.median(times)}
        row["cpu_seconds"] = result["cpu"][name]
        collectives, agreements = result["sent"][name]
        row |= {"collectives": collectives, "agreements": agreements}
        rows.append(row | {"rounds": len(times), "to_by_hand": spread})
    return rows


LINE = "{:>5}  {:<20} {:>9} {:>9}  {:>7}  {:<14} {:<15} {:>11}  {}"
HEADER = LINE.format("width", "step", "median", "cpu", "by hand", "quartiles", "range", "collectives", "agreement")


def table_line(row: dict[str, Any]) -> str:
    ratio = row["to_by_hand"]
    low_high, least_most = ("{:.3f}-{:.3f}".format(*ratio[key]) for key in ("quartiles", "range"))
    median, cpu = (f"{row[key] * 1e3:.1f} ms" for key in ("median_seconds", "cpu_seconds"))
    to_hand = f"{ratio['median']:.3f}"
    return LINE.format(
        row["width"], row["name"], median, cpu, to_hand, low_high, least_most, row["collectives"], row["agreements"]
    )


def memory_line(result: dict[str, Any]) -> str:
    texts = (f"{name} {peak / 2**20:.1f} MiB" for name, peak in result["peaks"].items())
    return f"{result['width']:>5}  {', '.join(texts)}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds per width; 0: as many as --seconds allow")
    parser.add_argument("--seconds", type=float, default=45.0, help="of timed rounds per width, where --rounds is 0")
    parser.add_argument("--ranks", type=int, default=2)
    add_options(parser)
    parser.add_argument(
        "--only", nargs="+", default=[], choices=NAMES, help="beside the unsharded and hand-written ones"
    )
    parser.add_argument("--memory", action="store_true", help="the peak of a step in place of its time")
    parser.add_argument("--json", type=Path, help="write the rows, unrounded, to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the ranks' profilers would report each start and stop
    results = ts.distributed.launch(rank_main, options.ranks, (options,))[0]
    if options.memory:
        print(f"{options.ranks} ranks; {BLOCKS} blocks in checkpoints, 1 x {LONG}, float32; peak beside parameters")
        print(*map(memory_line, results), sep="\n")
        return
    rows = [row for result in results for row in summary(result)]
    rounds = ", ".join(f"{len(result['rounds'])} at {result['width']}" for result in results)
    print(f"{options.ranks} ranks, 1 thread each; {BLOCKS} blocks, {BATCH} x {SEQUENCE}, float32; rounds: {rounds}")
    print(HEADER, *map(table_line, rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
