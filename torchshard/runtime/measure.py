"""Measures this machine: how fast the ranks of the group compute, read memory, and communicate.

The planner weighs computation against communication with a `Machine`. The presets describe common
machines; on another one, `objective={"machine": measure_machine()}` plans with measured numbers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchshard.core.conversions import step_args
from torchshard.core.errors import InputError
from torchshard.core.layouts import R, Shard
from torchshard.core.mesh import MODEL
from torchshard.core.types import is_count
from torchshard.distributed.consistency import verify_following_call
from torchshard.distributed.group import Group, lookup
from torchshard.distributed.ops import direct
from torchshard.distributed.wire import collective
from torchshard.ops import hashable
from torchshard.plans.machine import Machine, Transfer
from torchshard.plans.optimizers import OPTIMIZERS

_OPS = torch.ops.torchshard

ROUNDS = 15
"""The number of measurements of each time. The median counts; for collectives, the lower quartile."""
CALLS_PER_ROUND = 5
"""The number of collectives that are timed together."""
SMALL_COLLECTIVE, LARGE_COLLECTIVE = (2, 2), (4096, 1024)
"""float32 shapes of two collectives: latency takes the first one's time, bandwidth the second one's."""
COPIED = 1 << 24
"""The float32 elements that are copied to measure the memory bandwidth."""
WORK_WIDTH = 512
"""The width of the products between collectives."""
ATTENTION = 1, 8, 512, 64
"""Batch, heads, positions and features of the timed attention."""
_ATTENTION_FLOPS = 4 * math.prod(ATTENTION) * ATTENTION[2] / 2
FEW_ROWS, MANY_ROWS, COLUMNS = 2, 1024, 1024
"""The sizes of the small and the large value that elementwise ops are timed on."""
UPDATED = 1 << 21
"""The float32 elements of the parameter that AdamW updates."""
MIN_SECONDS = 1e-9
"""The minimum time: a clock can't distinguish shorter ones from 0, and bandwidths divide by them."""


def measure_machine(width: int = 1024) -> Machine:
    """Measures a Machine for this process's model-parallel group: a collective call that takes a few seconds.

    Products are timed in bfloat16 and in float32, attention in bfloat16. Collectives are timed as in a step: between
    products, after which ranks arrive at different times and with other data in their caches. Back to back, they would
    seem several times faster. The op overhead and the elementwise bandwidth result from a training step of a few ops,
    on few and on many elements. An update is that of `torch.optim.AdamW`. The slowest rank's times count, so all ranks
    get the same Machine. All ranks count as one domain: a network between some of them is not detected.

    Args:
        width: the width of the square matrices of the timed products.

    Raises:
        InputError: matrices of that width can't be multiplied.
        DistributedError: there is no group, or a rank is gone.
    """
    if not is_count(width):
        raise InputError(
            f"a product of matrices of width {width!r} can't be timed",
            where="measure_machine",
            why="the width is an int of 1 or more",
            attempt="measure_machine(width=1024)",
        )
    group = lookup(MODEL)
    device = device_of(group)
    times = _compute_times(device, width)
    if group.size > 1:
        verify_following_call(group, lambda: "measure_machine")
        times |= _collective_times(group, device)
    slowest = dict(zip(times, slowest_of(group, torch.tensor(list(times.values()), device=device)), strict=True))
    return Machine(
        f"a machine measured with {group.size} ranks",
        flops=2 * width**3 / slowest["product"],
        float32_flops=2 * width**3 / slowest["float32 product"],
        attention_flops=_ATTENTION_FLOPS / slowest["attention"],
        memory_bandwidth=2 * COPIED * 4 / slowest["copy"],
        op_overhead=0.0 if device.type == "cuda" else slowest["few elements"] / ELEMENTWISE_CALLS,
        host_overhead=slowest["few elements"] / ELEMENTWISE_CALLS if device.type == "cuda" else 0.0,
        elementwise_bandwidth=_elementwise_bytes() / slowest["many elements"],
        optimizer_bandwidth=UPDATED * OPTIMIZERS["adamw-plain"].moved(4) / slowest["update"],
        transfers=_transfers(slowest, group.size),
        **_links(slowest, group.size),
    )


def device_of(group: Group) -> torch.device:
    """Returns the device that the group's ranks compute on, by its backend."""
    on_gpu = group.process_group is not None and "nccl" in dist.get_backend_config(group.process_group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _compute_times(device: torch.device, width: int) -> dict[str, float]:
    """Returns the seconds that one rank needs for products, attention, a copy, elementwise ops, and an update."""
    whole, source = torch.randn(width, width, device=device), torch.randn(COPIED, device=device)
    matrix, heads = whole.bfloat16(), torch.randn(*ATTENTION, device=device).bfloat16()
    target = torch.empty_like(source)
    updated = torch.zeros(UPDATED, device=device, requires_grad=True)
    updated.grad = torch.ones_like(updated)
    few, many = (torch.randn(rows, COLUMNS, device=device, requires_grad=True) for rows in (FEW_ROWS, MANY_ROWS))
    return {
        "product": _typical(device, lambda: matrix @ matrix),
        "float32 product": _typical(device, lambda: whole @ whole),
        "attention": _typical(device, lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)),
        "copy": _typical(device, lambda: target.copy_(source)),
        "few elements": _typical(device, lambda: _elementwise(few)),
        "many elements": _typical(device, lambda: _elementwise(many)),
        "update": _typical(device, torch.optim.AdamW([updated]).step),
    }


def _collective_times(group: Group, device: torch.device) -> dict[str, float]:
    """Returns the seconds that a collective adds to a step, run as in graphs: all-reduce, and gather along dim 1."""
    work = torch.randn(WORK_WIDTH, WORK_WIDTH, device=device)
    reduce, gather = direct(_OPS.reduce.default), direct(_OPS.all_gather.default)
    times = {}
    for size, (rows, columns) in {"small": SMALL_COLLECTIVE, "large": LARGE_COLLECTIVE}.items():
        whole = torch.zeros(rows, columns, device=device)
        part = torch.zeros(rows, max(columns // group.size, 1), device=device)
        parts = hashable(step_args(Shard(1), R, (rows, part.shape[1] * group.size)))
        times[f"{size} reduce"] = _between(group, device, work, partial(reduce, whole, group.name))
        times[f"{size} gather"] = _between(group, device, work, partial(gather, part, *parts, group.name))
    return times


def _transfers(times: Mapping[str, float], world: int) -> tuple[Transfer, ...]:
    """Returns the measured collectives: the small value's time is all latency."""
    if world == 1:
        return ()
    nbytes = math.prod(LARGE_COLLECTIVE) * 4
    return tuple(
        Transfer(kernel, world, times[f"small {kind}"],
                 nbytes / max(times[f"large {kind}"] - times[f"small {kind}"], MIN_SECONDS))
        for kernel, kind in (("all_reduce", "reduce"), ("all_gather", "gather"))
    )  # fmt: skip


class _Links(TypedDict):
    link_bandwidth: float
    latency: float
    launch: float


def _links(times: Mapping[str, float], world: int) -> _Links:
    """Returns a Machine's numbers for collectives: an all-reduce goes around the ring twice, an all-gather once.

    The bandwidth is the lower of the two: a gather may also have to copy the received data into
    place.
    """
    if world == 1:
        return {"link_bandwidth": 1 / MIN_SECONDS, "latency": 0.0, "launch": 0.0}
    latency = max(times["small reduce"] - times["small gather"], 0.0) / (world - 1)
    sent = math.prod(LARGE_COLLECTIVE) * 4 * (world - 1) / world
    seconds = {kind: max(times[f"large {kind}"] - times[f"small {kind}"], MIN_SECONDS) for kind in ("reduce", "gather")}
    return {
        "link_bandwidth": min(2 * sent / seconds["reduce"], sent / seconds["gather"]),
        "latency": latency,
        "launch": max(times["small gather"] - (world - 1) * latency, 0.0),
    }


ELEMENTWISE_CALLS = 6
"""The ops of `_elementwise`: a norm, an activation, a sum, and the backward of each."""


def _elementwise(x: Tensor) -> None:
    """Runs a training step of elementwise ops and norms, mixed as in models."""
    h = F.layer_norm(x, x.shape[-1:])
    (x + F.gelu(h)).backward(x.detach())


def _elementwise_bytes() -> int:
    """Returns the bytes that `_elementwise` moves for many rows, as `planner.kernels.traffic` counts them.

    In forward a norm and an activation read and write one value each, the sum reads two; in backward the first two
    read the gradient and their operand and write a gradient, and the gradients of x, which has two users, are added.
    """
    values = (2 + 2 + 3) + (3 + 3 + 3)
    return values * MANY_ROWS * COLUMNS * torch.get_default_dtype().itemsize


def _typical(device: torch.device, run: Callable[[], object]) -> float:
    run()  # the first call also loads kernels and allocates memory
    return statistics.median(seconds_of(device, run) for _ in range(ROUNDS))


def seconds_of(device: torch.device, run: Callable[[], object]) -> float:
    """Returns the seconds of one call, with all kernels that it starts on a device."""
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return max(time.perf_counter() - start, MIN_SECONDS)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _between(group: Group, device: torch.device, work: Tensor, run: Callable[[], object]) -> float:
    """Returns the seconds that a collective adds to a product before it, without waits between the ranks."""

    def products(then: Callable[[], object]) -> None:
        for _ in range(CALLS_PER_ROUND):
            torch.mm(work, work)
            then()

    barrier, added = torch.zeros(1, device=device), []
    for _ in range(ROUNDS):
        # The ranks start each measurement together; otherwise one could wait for another's previous measurement.
        collective(group, dist.all_reduce, barrier)
        alone = seconds_of(device, lambda: products(lambda: None))
        collective(group, dist.all_reduce, barrier)
        added.append((seconds_of(device, lambda: products(run)) - alone) / CALLS_PER_ROUND)
    # The lower quartile: other programs on the machine make some rounds longer, never shorter.
    return max(statistics.quantiles(added, n=4)[0], MIN_SECONDS)


def slowest_of(group: Group, times: Tensor) -> list[float]:
    """Returns each time's maximum over the ranks."""
    if group.size > 1:
        collective(group, dist.all_reduce, times, op=dist.ReduceOp.MAX)
    return [float(t) for t in times]
