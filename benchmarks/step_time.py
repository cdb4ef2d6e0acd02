"""The time of a training step of a stack of GPT blocks on two ranks, four ways, interleaved in one run:

    unsharded     the plain model, whole on every rank
    by hand       local weights and two autograd Functions, as Megatron-LM has them
    DTensor       torch.distributed.tensor.parallel.parallelize_module
    torchshard    torchshard.shard with a dict plan

Before anything is timed, all four must give the same loss and the same gradients. A step is forward, loss and backward;
each begins at a barrier and ends when the slower rank ends. Collectives are counted by the profiler, as gloo ran them.

    python benchmarks/step_time.py --widths 128 512 --rounds 20 --json step_time.json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, parallel
from torch.profiler import ProfilerActivity, profile

import torchshard as ts

RANKS, BLOCKS, BATCH, SEQUENCE, HEAD = 2, 4, 4, 128, 64
COLUMN, ROW = ("q", "k", "v", "up"), ("o", "down")
PLAN = {f"*.{name}": "column" for name in COLUMN} | {f"*.{name}": "row" for name in ROW}
SPLIT = {f"{n}.{p}": 0 for n in COLUMN for p in ("weight", "bias")} | {f"{n}.weight": 1 for n in ROW}
NAMES = ("unsharded", "by hand", "DTensor", "torchshard")
WARM_UP_ROUNDS = 2
ITEM_BYTES = {"float": 4, "long int": 8}


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


class Copy(torch.autograd.Function):
    """The same value; the gradients of the ranks are summed, in place as Megatron-LM does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """The sum over the ranks, in place; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class HandBlock(Block):
    """A Block with this rank's slices of another's weights."""

    def __init__(self, whole: Block, rank: int) -> None:
        super().__init__(whole.q.in_features)
        self.load_state_dict(whole.state_dict())
        for path, dim in SPLIT.items():
            parameter = self.get_parameter(path)
            own = parameter.data.chunk(RANKS, dim)[rank]
            parameter.data = own.clone(memory_format=torch.contiguous_format)

    def forward(self, x: Tensor) -> Tensor:
        h = Copy.apply(self.ln1(x))
        mixed = attention(self.q(h), self.k(h), self.v(h))
        x = x + (Reduce.apply(F.linear(mixed, self.o.weight)) + self.o.bias)
        h = Copy.apply(self.ln2(x))
        return x + (Reduce.apply(F.linear(F.gelu(self.up(h)), self.down.weight)) + self.down.bias)


def with_dtensor(model: nn.Sequential) -> nn.Module:
    """The norms give replicated DTensors, so that q, k and v share one all-reduce of the gradient."""
    replicated = {"output_layouts": Replicate(), "desired_output_layouts": Replicate(), "use_local_output": False}
    styles = {f"*.{name}": parallel.ColwiseParallel() for name in COLUMN}
    styles |= {f"*.{name}": parallel.RowwiseParallel() for name in ROW}
    styles |= {f"*.{name}": parallel.PrepareModuleOutput(**replicated) for name in ("ln1", "ln2")}
    return parallel.parallelize_module(copy.deepcopy(model), init_device_mesh("cpu", (RANKS,)), styles)


def implementations(width: int, x: Tensor, rank: int) -> dict[str, nn.Module]:
    model = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    by_hand = nn.Sequential(*(HandBlock(block, rank) for block in model))
    return dict(zip(NAMES, (model, by_hand, with_dtensor(model), ts.shard(model, PLAN, (x,))), strict=True))


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
    wanted = {path: parameter.grad for path, parameter in models["unsharded"].named_parameters()}
    rounding = 1e-5 * max(grad.abs().max().item() for grad in wanted.values())
    for name, model in models.items():
        torch.testing.assert_close(losses[name], losses["unsharded"])
        for path, parameter in model.named_parameters():
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(grad, local_slice(wanted[path], grad, rank), rtol=0, atol=rounding)


# --- counting and timing ---------------------------------------------------------------------------------------------


def traffic(run: Callable[[], Any]) -> dict[str, int]:
    """The collectives of one step, on whatever thread they run; TorchShard's agreement is the int64 all-reduce."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        run()
    counted = dict.fromkeys(("collectives", "collective_bytes", "agreements", "agreement_bytes"), 0)
    for event in profiler.profiler.kineto_results.events():
        if event.name().startswith("gloo:"):
            (shape,), (dtype,) = event.shapes(), event.dtypes()
            kind = "agreement" if dtype == "long int" else "collective"
            counted[f"{kind}s"] += 1
            counted[f"{kind}_bytes"] += torch.Size(shape).numel() * ITEM_BYTES[dtype]
    return counted


def timed(run: Callable[[], Any], model: nn.Module) -> float:
    model.zero_grad(set_to_none=True)
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def slowest(seconds: list[list[float]]) -> list[list[float]]:
    """A step ends when the slower rank ends."""
    held = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return held.tolist()


def measure(width: int, rounds: int, seconds: float, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, target = torch.randn(BATCH, SEQUENCE, width), torch.randn(BATCH, SEQUENCE, width)
    models = implementations(width, x, rank)
    check_equal(models, x, target, rank)
    runs = {name: partial(step, model, x, target) for name, model in models.items()}
    one_round = lambda: [timed(runs[name], models[name]) for name in NAMES]  # noqa: E731
    warm = slowest([one_round() for _ in range(WARM_UP_ROUNDS)])
    rounds = rounds or min(200, max(5, int(seconds / sum(warm[-1]))))
    counts = {name: traffic(runs[name]) for name in NAMES}
    return {"width": width, "traffic": counts, "rounds": slowest([one_round() for _ in range(rounds)])}


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ts.distributed.init_process_group()
    results = [measure(width, options.rounds, options.seconds, rank) for width in options.widths]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


# --- the table -------------------------------------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per implementation; ratios to the hand-written one are taken round by round."""
    rows, hand = [], [times[NAMES.index("by hand")] for times in result["rounds"]]
    for name, times in zip(NAMES, zip(*result["rounds"], strict=True), strict=True):
        ratios = [a / b for a, b in zip(times, hand, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        spread = {"median": middle, "quartiles": (low, high), "range": (min(ratios), max(ratios))}
        row = {"width": result["width"], "name": name, "median_seconds": statistics.median(times)}
        rows.append(row | {"rounds": len(times), "to_by_hand": spread} | result["traffic"][name])
    return rows


LINE = "{:>5}  {:<11} {:>9}  {:>7}  {:<14} {:<15} {:>14}  {}"
HEADER = LINE.format("width", "step", "median", "by hand", "quartiles", "range", "collectives", "agreement")


def table_line(row: dict[str, Any]) -> str:
    ratio = row["to_by_hand"]
    low_high, least_most = ("{:.3f}-{:.3f}".format(*ratio[key]) for key in ("quartiles", "range"))
    sent = f"{row['collectives']}, {row['collective_bytes'] / 2**20:.2f} MiB"
    agreed = f"{row['agreements']}, {row['agreement_bytes']} B"
    median = f"{row['median_seconds'] * 1e3:.1f} ms"
    return LINE.format(row["width"], row["name"], median, f"{ratio['median']:.3f}", low_high, least_most, sent, agreed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds per width; 0: as many as --seconds allow")
    parser.add_argument("--seconds", type=float, default=45.0, help="of timed rounds per width, where --rounds is 0")
    parser.add_argument("--json", type=Path, help="write the rows, unrounded, to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the ranks' profilers would report each start and stop
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options, folder), RANKS)
        results = json.loads(Path(folder, "results.json").read_text())
    rows = [row for result in results for row in summary(result)]
    rounds = ", ".join(f"{len(result['rounds'])} at {result['width']}" for result in results)
    print(f"{RANKS} gloo ranks, 1 thread each; {BLOCKS} blocks, {BATCH} x {SEQUENCE}, float32; rounds: {rounds}")
    print(HEADER, *map(table_line, rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
