"""Measures the machine at hand: how fast the ranks of the group compute, read memory, and send to each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.mesh import MODEL
from torchshard.distributed.consistency import verify_following_call
from torchshard.distributed.group import Group, lookup
from torchshard.distributed.wire import collective
from torchshard.plans.machine import Machine

ROUNDS, CALLS = 15, 5
"""Each time is the median of so many; of collectives the lower quartile, of so many calls each."""
SMALL, LARGE, COPIED = 4, 1 << 22, 1 << 24
"""Elements of float32: of a collective that is all latency, of one that is all bandwidth, and of what is copied."""
BETWEEN = 512
"""The width of the products between collectives."""
ROWS, COLUMNS = (2, 1024), 1024
"""Of the small and the large value that elementwise ops are timed on."""
LEAST = 1e-9
"""Seconds that a clock can't tell from none."""


def measure_machine(width: int = 1024, dtype: torch.dtype = torch.float32) -> Machine:
    """The Machine that the model-parallel group of this process is; a collective call, a few seconds long.

    Collectives are timed as a step makes them: between products, after which ranks arrive at different times and with
    other data in their caches; back to back they would seem several times faster. The overhead of an op and the
    bandwidth of elementwise ones are those of a training step of a few, of few elements and of many. What the slowest
    rank measured counts, so that all ranks get the same Machine. All ranks count as one domain: a network between some
    of them is not told apart.

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
    few, many = (torch.randn(rows, COLUMNS, device=device, requires_grad=True) for rows in ROWS)
    times = {
        "product": _typical(device, lambda: a @ a),
        "copy": _typical(device, lambda: into.copy_(held)),
        "few elements": _typical(device, lambda: _elementwise(few)) / ELEMENTWISE_CALLS,
        "many elements": _typical(device, lambda: _elementwise(many)),
    }
    if group.size > 1:
        verify_following_call(group, lambda: "measure_machine")
        work = torch.randn(BETWEEN, BETWEEN, device=device)
        times |= {
            "small": _between(group, device, work, lambda: collective(group, dist.all_reduce, small)),
            "gather": _between(group, device, work, lambda: collective(group, dist.all_gather_single, gathered, small)),
            "large": _between(group, device, work, lambda: collective(group, dist.all_reduce, large)),
        }
    slowest = dict(zip(times, _largest(group, torch.tensor(list(times.values()), device=device)), strict=True))
    return Machine(
        f"measured on {group.size} ranks",
        flops=2 * width**3 / slowest["product"],
        memory_bandwidth=2 * COPIED * 4 / slowest["copy"],
        op_overhead=slowest["few elements"],
        elementwise_bandwidth=_moved(many) / slowest["many elements"],
        **_links(slowest, group.size),
    )


def _links(times: Mapping[str, float], world: int) -> dict[str, float]:
    """What a Machine says of collectives: a small all-reduce goes around the ring twice, an all-gather once."""
    if world == 1:
        return {"link_bandwidth": 1 / LEAST, "latency": 0.0, "launch": 0.0}
    latency = max(times["small"] - times["gather"], 0.0) / (world - 1)
    sent = 2 * LARGE * 4 * (world - 1) / world
    return {
        "link_bandwidth": sent / max(times["large"] - times["small"], LEAST),
        "latency": latency,
        "launch": max(times["gather"] - (world - 1) * latency, 0.0),
    }


def _elementwise(x: Tensor) -> None:
    """A training step of ops that are no products, as models mix them."""
    h = F.layer_norm(x, x.shape[-1:])
    (x + F.gelu(h)).backward(x.detach())


ELEMENTWISE_CALLS = 6
"""A norm, an activation, a sum, and the backward of each."""


def _moved(x: Tensor) -> int:
    """Bytes that it reads and writes, as `planner.costs` counts: operands and results, as many in the backward."""
    return 2 * (2 + 2 + 3) * x.numel() * x.element_size()


def _typical(device: torch.device, run: Callable[[], object]) -> float:
    run()
    return statistics.median(_once(device, run) for _ in range(ROUNDS))


def _once(device: torch.device, run: Callable[[], object]) -> float:
    _settle(device)
    start = time.perf_counter()
    run()
    _settle(device)
    return max(time.perf_counter() - start, LEAST)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _between(group: Group, device: torch.device, work: Tensor, run: Callable[[], object]) -> float:
    """What a collective adds to a product before it, the ranks going on without waiting for each other."""

    def products(then: Callable[[], object]) -> None:
        for _ in range(CALLS):
            torch.mm(work, work)
            then()

    together, added = torch.zeros(1, device=device), []
    for _ in range(ROUNDS):
        collective(group, dist.all_reduce, together)
        alone = _once(device, lambda: products(lambda: None))
        collective(group, dist.all_reduce, together)
        added.append((_once(device, lambda: products(run)) - alone) / CALLS)
    return max(statistics.quantiles(added, n=4)[0], LEAST)  # what else the machine does, makes the others longer


def _largest(group: Group, times: Tensor) -> list[float]:
    if group.size > 1:
        collective(group, dist.all_reduce, times, op=dist.ReduceOp.MAX)
    return [float(t) for t in times]
