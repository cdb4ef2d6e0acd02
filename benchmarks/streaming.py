"""How fast do full parameters stream out of a sharded model? Compared with copies of as many bytes in each rank.

    copy      each rank copies full parameters that it has, a bucket at a time, into memory like the stream's
    stream    named_full_parameters()
    dict      full_state_dict(), which stores all of them
    DTensor   full_tensor() of the same slices, one parameter after the other; through gloo

A way begins at a barrier and ends when the slowest rank ends. Ways take turns within a round, and ratios are medians.

    python benchmarks/streaming.py
    python benchmarks/streaming.py --ranks 4 --bucket 16MiB --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from backends import begin, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import torchshard as ts
from torchshard.core import layouts
from torchshard.core.units import read_size
from torchshard.distributed.buckets import consecutive
from torchshard.runtime.streaming import Memory
from torchshard.weights.parameter import ShardedParameter


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def _seconds(way: Callable[[], object]) -> float:
    """The seconds of the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    way()
    slowest = torch.tensor([time.perf_counter() - begun])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def _rank(width: int, blocks: int, rounds: int, bucket: str, dtype: str) -> None:
    gloo = begin(None)
    torch.manual_seed(0)
    model = nn.Sequential(*[_Block(width) for _ in range(blocks)]).to(getattr(torch, dtype))
    sharded = ts.shard(model, "auto", (torch.randn(8, width, dtype=getattr(torch, dtype)),))
    full = list(sharded.full_state_dict().values())
    limit = read_size(bucket)
    assert limit is not None
    room = Memory(torch.device("cpu")), Memory(torch.device("cpu"))
    mesh = mesh_of(gloo)

    def placement(p: nn.Parameter) -> list[Shard]:
        if not isinstance(p, ShardedParameter) or not p.is_split:
            return []
        layout = p.sharding[0].layout
        assert isinstance(layout, layouts.Shard)
        return [Shard(layout.dim)]

    split = [DTensor.from_local(p.detach().as_subclass(Tensor), mesh, placement(p)) for p in sharded.parameters()
             if placement(p)]  # fmt: skip

    def copy() -> None:
        for turn, numbers in enumerate(consecutive([x.nbytes for x in full], limit / 2)):
            some = full[numbers.start : numbers.stop]
            for into, x in zip(room[turn % 2].take([(tuple(x.shape), x.dtype) for x in some]), some, strict=True):
                into.copy_(x)

    def stream() -> None:
        for _ in sharded.named_full_parameters(bucket=bucket):
            pass

    ways: dict[str, Callable[[], object]] = {
        "copy": copy,
        "stream": stream,
        "dict": sharded.full_state_dict,
        "DTensor": lambda: [x.full_tensor().numel() for x in split],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in ways.items():
            seconds = _seconds(way)
            times[name] += [seconds] * (number > 1)
    if dist.get_rank() == 0:
        total = sum(x.nbytes for x in full)
        print(f"{dist.get_world_size()} ranks, {total / 2**20:.0f} MiB, {len(full)} parameters, buckets of {bucket}")
        for name, of_way in times.items():
            of_copy = statistics.median(a / b for a, b in zip(times["copy"], of_way, strict=True))
            print(f"  {name:8} {total / statistics.median(of_way) / 1e9:6.1f} GB/s, {of_copy:.2f} of the copy's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bucket", default="64MiB")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    ts.distributed.launch(_rank, args.ranks, (args.width, args.blocks, args.rounds, args.bucket, args.dtype))


if __name__ == "__main__":
    main()
