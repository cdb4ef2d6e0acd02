"""Times a training step whose batch the ranks divide, and the memory that it takes, beside PyTorch's DDP and FSDP2.

    unsharded               the whole batch, on every rank
    DDP                     torch.nn.parallel.DistributedDataParallel
    torchshard, replicate   ts.shard(model, {}, part, mesh="replicate")
    FSDP2                   torch.distributed.fsdp.fully_shard of each block
    torchshard, shard       ts.shard(model, {}, part, mesh="shard")

DDP and FSDP2 run on gloo, as they do without torchshard, or through its memory (`--others memory`).

With `--tp 2` groups of two ranks divide the weights too: FSDP2 is that of a model of parallelize_module, and ours have
`mesh={"dp": (..., "shard"), "tp": 2}`; DDP's ranks divide the batch alone, all of them.

The model is the stack of blocks of step_time.py; a step is forward, a loss and backward. Before anything is timed, all
must have the same gradients. Ways are timed in turn, round by round; the ratio to PyTorch's own way is the median of
the rounds' ratios; the slowest rank counts. The peak is the allocator's, of a step, beside the parameters.

    python benchmarks/mesh.py --widths 128 512 --ranks 2
    python benchmarks/mesh.py --widths 128 512 --ranks 4 --tp 2
    python benchmarks/mesh.py --backend gloo          # torchshard's ranks talk by gloo, too
    python benchmarks/mesh.py --others memory         # all talk through memory
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from backends import add_options, begin, mesh_of, others_group
from step_time import BATCH, BLOCKS, PLAN, SEQUENCE, Block, peak, slowest, step, timed, with_dtensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchshard as ts
from torchshard.weights.parameter import ShardedParameter

PYTORCHS = {"torchshard, replicate": "DDP", "torchshard, shard": "FSDP2"}
"""Our way -> the one of PyTorch that it is compared with."""
WARM_UP_ROUNDS = 3


def with_fsdp(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Each block a unit of its own, as PyTorch's tutorial has it."""
    along = mesh if mesh.ndim == 1 else mesh["dp"]
    copied: nn.Module = copy.deepcopy(model) if mesh.ndim == 1 else with_dtensor(model, mesh["tp"])
    for block in copied.children():
        fully_shard(block, mesh=along)
    fully_shard(copied, mesh=along)
    return copied


def models(plain: nn.Sequential, part: Tensor, tp: int, others: dist.ProcessGroup) -> dict[str, nn.Module]:
    """The model in each way."""
    parts, weights, plan = dist.get_world_size() // tp, {"tp": tp}, PLAN
    if tp == 1:
        weights, plan = {}, {}
    return {
        "unsharded": plain,
        "DDP": DistributedDataParallel(copy.deepcopy(plain), process_group=others),
        "torchshard, replicate": ts.shard(plain, plan, (part,), mesh={"dp": (parts, "replicate")} | weights),
        "FSDP2": with_fsdp(plain, mesh_of(others, tp)),
        "torchshard, shard": ts.shard(plain, plan, (part,), mesh={"dp": (parts, "shard")} | weights),
    }


def whole_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient of which each rank has a slice, or all."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    if gradient is None or not isinstance(parameter, ShardedParameter):
        return gradient
    return parameter.ranks.gathered(gradient.as_subclass(Tensor), parameter.sharding, parameter.whole)


def check_equal(runs: dict[str, Callable[[], object]], ways: dict[str, nn.Module]) -> None:
    """All ways give the unsharded model's gradients."""
    for run in runs.values():
        run()
    wanted = {name: p.grad for name, p in ways["unsharded"].named_parameters()}
    rounding = 1e-5 * max(gradient.abs().max().item() for gradient in wanted.values())
    for model in ways.values():
        for name, p in model.named_parameters():
            expected = wanted[name.removeprefix("module.")]
            torch.testing.assert_close(whole_gradient(p), expected, rtol=0, atol=rounding)


def measure(width: int, options: argparse.Namespace, others: dist.ProcessGroup) -> dict[str, Any]:
    """Seconds of each round, and the peak, of each way."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    x, target = torch.randn(2, BATCH * options.ranks, SEQUENCE, width)

    def part(ranks: int, number: int) -> tuple[Tensor, Tensor]:
        return x.chunk(ranks)[number], target.chunk(ranks)[number]

    own = part(options.ranks // options.tp, rank // options.tp)
    ways = models(nn.Sequential(*(Block(width) for _ in range(BLOCKS))), own[0], options.tp, others)
    runs = {name: partial(step, model, *own) for name, model in ways.items()}
    runs["unsharded"] = partial(step, ways["unsharded"], x, target)
    runs["DDP"] = partial(step, ways["DDP"], *part(options.ranks, rank))
    check_equal(runs, ways)
    one_round = lambda: [timed(runs[name], ways[name]) for name in ways]  # noqa: E731
    warm = slowest([one_round() for _ in range(WARM_UP_ROUNDS)])
    rounds = options.rounds or min(200, max(5, int(options.seconds / sum(warm[-1]))))
    found: dict[str, Any] = {"width": width, "names": [*ways], "rounds": slowest([one_round() for _ in range(rounds)])}
    found["peaks"] = {name: peak(runs[name], model) for name, model in ways.items()}
    return found


def rank_main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What one rank does."""
    warnings.filterwarnings("ignore")
    gloo = begin(options.backend, options.tp if options.tp > 1 else -1)
    return [measure(width, options, others_group(options.others, gloo)) for width in options.widths]


def lines(result: dict[str, Any]) -> list[str]:
    """A line for each way."""
    names, rounds = result["names"], result["rounds"]
    made = []
    for i, name in enumerate(names):
        text = f"{result['width']:>5}  {name:<22} {1e3 * statistics.median(r[i] for r in rounds):8.1f} ms"
        text += f"  peak {result['peaks'][name] / 2**20:7.1f} MiB"
        if name in PYTORCHS:
            other = names.index(PYTORCHS[name])
            low, middle, high = statistics.quantiles([r[i] / r[other] for r in rounds], n=4)
            memory = result["peaks"][name] / result["peaks"][PYTORCHS[name]]
            text += f"  {middle:.2f} ({low:.2f} to {high:.2f}) of {PYTORCHS[name]}'s time, {memory:.2f} of its memory"
        made.append(text)
    return made


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds per width; 0: as many as --seconds allow")
    parser.add_argument("--seconds", type=float, default=45.0, help="of timed rounds per width, where --rounds is 0")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="so many ranks of a group divide the weights")
    add_options(parser)
    options = parser.parse_args()
    for result in ts.distributed.launch(rank_main, options.ranks, (options,))[0]:
        print("\n".join(lines(result)), flush=True)


if __name__ == "__main__":
    main()
