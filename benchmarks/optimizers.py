"""What does a step of Muon cost on slices? Compared with unsharded Muon's, and with AdamW's of the same slices.

    Muon          a step of torchshard's ranks: full matrices come to their owners, and go back
    unsharded     the same optimizer of the unsharded model, in each rank's process
    AdamW         a step of torchshard's ranks, which sends nothing

A step begins at a barrier and ends when the slowest rank ends. Ways take turns within a round, and ratios are medians.
`over a share` is Muon's time over the unsharded one's divided by the ranks, at most by the machine's cores. The state
that a rank stores, and the bytes that it sends, are counted.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --ranks 4 --width 512
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from backends import begin
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import torchshard as ts
from torchshard.distributed import owners
from torchshard.distributed.group import Group
from torchshard.distributed.kernels import Exchange
from torchshard.distributed.wire import Pending
from torchshard.weights.parameter import ShardedParameter


def _model(width: int, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)]
    return nn.Sequential(*layers)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def _seconds(step: Callable[[], object]) -> float:
    """The seconds of the slowest rank's step."""
    dist.barrier()
    begun = time.perf_counter()
    step()
    slowest = torch.tensor([time.perf_counter() - begun])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def _sent(step: Callable[[], object]) -> int:
    """The bytes that this rank sends to others in all-to-alls."""
    total, own = 0, owners.begun

    def counted(exchange: Exchange, group: Group) -> Pending:
        nonlocal total
        assert exchange.lengths is not None
        _, go = exchange.lengths
        total += sum(go) - go[group.rank]
        return own(exchange, group)

    with mock.patch.object(owners, "begun", counted):
        step()
    return total


def _expected(parameters: list[nn.Parameter], states: int) -> float:
    """The bytes that a rank sends on average: slices of parameter, gradient and states, and back without gradients."""
    world = dist.get_world_size()
    nbytes = sum(torch.Size(p.whole).numel() * p.itemsize for p in parameters if isinstance(p, ShardedParameter))
    return (2 + states + 1 + states) * nbytes * (world - 1) / world**2


def _rank(width: int, blocks: int, rounds: int) -> None:
    begin(None)
    model = _model(width, blocks)
    x = torch.randn(8, width)
    sharded = ts.shard(copy.deepcopy(model), "auto", (x,))
    for m in (model, sharded):
        m(x).square().sum().backward()
    world, split = dist.get_world_size(), [p for p in _matrices(sharded) if p.is_split]
    ways: dict[str, Optimizer] = {
        "Muon": torch.optim.Muon(_matrices(sharded), 1e-3),
        "unsharded": torch.optim.Muon(_matrices(model), 1e-3),
        "AdamW": torch.optim.AdamW(sharded.parameters(), 1e-3),
    }
    alone = dist.get_rank() == 0
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, optimizer in ways.items():
            seconds = _seconds(optimizer.step if name != "unsharded" or alone else lambda: None)
            times[name] += [seconds] * (number > 1)
    sent = torch.tensor([float(_sent(ways["Muon"].step))])
    dist.all_reduce(sent)
    if not alone:
        return
    share = min(world, os.cpu_count() or 1)
    ratio = statistics.median(a / (b / share) for a, b in zip(times["Muon"], times["unsharded"], strict=True))
    adam = statistics.median(a / b for a, b in zip(times["Muon"], times["AdamW"], strict=True))
    print(f"{world} ranks, {blocks} blocks of width {width}, {len(split)} of {len(_matrices(model))} matrices split")
    for name, of_way in times.items():
        print(f"  {name:10} {1e3 * statistics.median(of_way):8.1f} ms")
    print(f"  over a share {ratio:.2f}; over AdamW's {adam:.2f}")
    kept = [sum(t.numel() for s in ways[n].state.values() for t in s.values() if isinstance(t, Tensor)) for n in
            ("Muon", "unsharded")]  # fmt: skip
    print(f"  state {kept[0] / kept[1]:.2f} of the unsharded one's")
    print(f"  sent {sent.item() / world / 2**20:.2f} MiB a rank, expected {_expected(split, 1) / 2**20:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    ts.distributed.launch(_rank, args.ranks, (args.width, args.blocks, args.rounds))


if __name__ == "__main__":
    main()
