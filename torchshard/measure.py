"""Measures the machine at hand: how fast the ranks of the group compute, read memory, and send to each other."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.distributed.checks import announce
from torchshard.distributed.groups import MODEL, Group, lookup
from torchshard.distributed.wire import collective
from torchshard.errors import InputError
from torchshard.planner.machine import Machine

ROUNDS = 5
"""Each time is the best of so many."""
SMALL, LARGE, COPIED = 4, 1 << 22, 1 << 24
"""Elements of float32: of a collective that is all latency, of one that is all bandwidth, and of what is copied."""
LEAST = 1e-9
"""Seconds that a clock can't tell from none."""


def measure_machine(width: int = 1024, dtype: torch.dtype = torch.float32) -> Machine:
    """The Machine that the model-parallel group of this process is; a collective call, a second or two long.

    Latency, launch and bandwidth are fitted to the times of a small all-reduce, a small all-gather and a large
    all-reduce; what the slowest rank measured counts, so that all ranks get the same Machine.

    Args:
        width: of the square matrices whose product is timed.
        dtype: theirs.

    Raises:
        InputError: there is no matrix product of that width or dtype.
        DistributedError: there is no group, or a rank is gone.
    """
    if type(width) is not int or width < 1 or not dtype.is_floating_point:
        raise InputError(
            f"a product of matrices of width {width!r} in {dtype} can't be timed",
            where="measure_machine",
            why="the width is 1 or more, the dtype a floating one",
            attempt="measure_machine(width=1024, dtype=torch.float32)",
        )
    group = lookup(MODEL)
    on_gpu = group.process_group is not None and "nccl" in dist.get_backend_config(group.process_group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    a, held = torch.randn(width, width, device=device).to(dtype), torch.randn(COPIED, device=device)
    into, small, large = torch.empty_like(held), torch.ones(SMALL, device=device), torch.ones(LARGE, device=device)
    gathered = torch.empty(SMALL * group.size, device=device)
    times = {
        "product": _best(device, lambda: a @ a),
        "copy": _best(device, lambda: into.copy_(held)),
        "small": _sent(group, device, lambda: collective(group, dist.all_reduce, small)),
        "gather": _sent(group, device, lambda: collective(group, dist.all_gather_single, gathered, small)),
        "large": _sent(group, device, lambda: collective(group, dist.all_reduce, large)),
    }
    slowest = dict(zip(times, _largest(group, torch.tensor(list(times.values()), device=device)), strict=True))
    others = max(group.size - 1, 1)
    latency = max(slowest["small"] - slowest["gather"], 0.0) / others
    sent = 2 * LARGE * 4 * (group.size - 1) / group.size
    return Machine(
        f"measured on {group.size} ranks",
        flops=2 * width**3 / slowest["product"],
        memory_bandwidth=2 * COPIED * 4 / slowest["copy"],
        link_bandwidth=max(sent, 1.0) / max(slowest["large"] - slowest["small"], LEAST),
        latency=latency,
        launch=max(slowest["gather"] - others * latency, 0.0),
    )


def _best(device: torch.device, run: Callable[[], object]) -> float:
    return min(_once(device, run) for _ in range(ROUNDS))


def _once(device: torch.device, run: Callable[[], object]) -> float:
    _settle(device)
    start = time.perf_counter()
    run()
    _settle(device)
    return max(time.perf_counter() - start, LEAST)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sent(group: Group, device: torch.device, run: Callable[[], object]) -> float:
    """The best time of a collective, the ranks beginning together."""
    if group.size == 1:
        return LEAST
    announce(group, lambda: "measure_machine")
    together = torch.zeros(1, device=device)

    def once() -> float:
        collective(group, dist.all_reduce, together)
        return _once(device, run)

    return min(once() for _ in range(ROUNDS))


def _largest(group: Group, times: Tensor) -> list[float]:
    if group.size > 1:
        collective(group, dist.all_reduce, times, op=dist.ReduceOp.MAX)
    return [float(t) for t in times]
