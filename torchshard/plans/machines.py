"""Machines by name: what vendors and others measured of them, and what a training step sustains of that.

A GPU's `flops` are `SUSTAINED` of the fastest product that anyone measured (MAMF, Bekman, "Machine Learning
Engineering", ml-engineering/compute/accelerator, 2026): a step computes products one after the other for hours, of
other shapes, at the clock that power and heat allow. It reads and writes `STREAMED` of the memory's bandwidth.
docs/machines.md has each number's source, and how far published training runs are from what the planner predicts.
"""

from __future__ import annotations

import difflib
import math
import os
from typing import Literal, TypeAlias

from torchshard.core.errors import InputError
from torchshard.plans.machine import Machine, Transfer

GIGA, TERA = 1e9, 1e12
MachineName = Literal[
    "h100x8", "h100x8-500w", "h200x8", "b200x8", "gb200x72", "a100x8", "mi300x8", "h100x8-pcie", "a100x8-pcie",
    "l40sx8", "rtx4090x8", "cpu-memory", "cpu-gloo",
]  # fmt: skip

SUSTAINED = 0.8
"""What a step sustains of the fastest product: 636 of H100's 795 TFLOPS (15 published runs: docs/machines.md)."""
STREAMED = 0.9
"""What ops that only read and write reach of the memory's bandwidth: BabelStream's triad, 3.0 of H100's 3.35 TB/s."""
HOST_OVERHEAD = 13.7e-6
"""Seconds of an eager op on the host: two layers of Llama 3 8B on one H200, forward and backward (docs/gpu.md)."""
KERNEL = 2e-6
"""Seconds between two kernels of a stream that the host has begun in time."""

NVSWITCH = (
    *(Transfer("all_reduce", ranks, latency * 1e-6, rate * GIGA)
      for ranks, latency, rate in ((2, 10, 324), (4, 15, 236), (8, 31, 267))),
    *(Transfer("all_gather", ranks, latency * 1e-6, rate * GIGA)
      for ranks, latency, rate in ((2, 8, 537), (4, 17, 434), (8, 30, 394))),
    Transfer("all_to_all", 8, 50e-6, 380 * GIGA),
)  # fmt: skip
"""Hopper over NVSwitch: fits to nccl-tests (AutoParallel's `nccl_cost_model.py`, 2026)."""


def _gpus(
    name: str,
    product: float,
    float32: float,
    attention: float,
    memory: float,
    link: float,
    network: float,
    tiles: int,
    *,
    hosts: int = 8,
    transfers: tuple[Transfer, ...] = (),
    error: float = math.inf,
) -> Machine:
    """Returns hosts of GPUs.

    Args:
        product, float32: TFLOPS of the fastest bfloat16 product, and of float32 (PyTorch's default does without TF32).
        attention: TFLOPS of FlashAttention 2, forward and backward.
        memory, link, network: GB/s of the memory, of one GPU's links one way, and of a host's network cards.
        tiles: the multiprocessors.
        error: on the published runs of docs/machines.md.
    """
    return Machine(
        name,
        flops=SUSTAINED * product * TERA,
        memory_bandwidth=STREAMED * memory * GIGA,
        link_bandwidth=0.8 * link * GIGA,
        latency=1e-6,
        launch=1e-5,
        op_overhead=KERNEL,
        domain=hosts,
        network_bandwidth=0.85 * network * GIGA,
        network_latency=5e-6,
        float32_flops=SUSTAINED * float32 * TERA,
        attention_flops=attention * TERA,
        tiles=tiles,
        start_up=350,
        host_overhead=HOST_OVERHEAD,
        error=error,
        transfers=transfers,
    )


_AT_500_W = (500 / 700) ** (2 / 3)
"""The clock of an H100 at 500 of its 700 W: power grows with the clock's voltage too, about as its power of 1.5."""

MACHINES = {
    machine.name: machine
    for machine in (
        _gpus("h100x8", 794.5, 67, 335, 3350, 450, 400, 132, transfers=NVSWITCH, error=0.04),
        _gpus(
            "h100x8-500w", 794.5 * _AT_500_W, 67, 335 * _AT_500_W, 2400, 450, 400, 132, transfers=NVSWITCH, error=0.06
        ),
        _gpus("h200x8", 794.5, 67, 335, 4800, 450, 400, 132, transfers=NVSWITCH, error=0.22),
        _gpus("b200x8", 1745, 80, 740, 8000, 900, 400, 148),
        _gpus("gb200x72", 1822, 80, 770, 8000, 900, 3600, 148, hosts=72),
        _gpus("a100x8", 271.2, 19.5, 200, 2039, 300, 200, 108, error=0.02),
        _gpus("mi300x8", 668.4, 163.4, 280, 5300, 448, 400, 304),
        _gpus("h100x8-pcie", 794.5 * 756 / 989, 51, 256, 2000, 64, 50, 114),
        _gpus("a100x8-pcie", 252.9, 19.5, 186, 1935, 32, 50, 108),
        _gpus("l40sx8", 271, 91.6, 200, 864, 32, 50, 142),
        _gpus("rtx4090x8", 141, 82.6, 100, 1008, 32, 25, 128),
        Machine("cpu-memory", 100 * GIGA, 10 * GIGA, 4.0 * GIGA, 1e-5, 1e-4, 1e-5, 10 * GIGA, 5 * GIGA, error=0.06),
        Machine("cpu-gloo", 100 * GIGA, 10 * GIGA, 1.0 * GIGA, 8e-5, 1.5e-3, 2.5e-5, 6 * GIGA, 5 * GIGA, error=0.16),
    )
}
"""Machines by name. The GPU machines are hosts of eight GPUs: on NVLink (AMD's Infinity Fabric) with a network card of
400 Gbit/s for each GPU (A100: 200), or on PCIe with two cards of 200 Gbit/s; "gb200x72" is a rack on one NVLink.
"h100x8-500w" is the board with HBM2e at 500 W of Meta's Grand Teton, on which torchtitan is measured.
"cpu-memory" and "cpu-gloo" are ranks of one core each on one machine, which communicate through its memory or over
gloo. `torchshard.measure_machine` measures the present machine, except for a network."""


def read_machine(machine: MachineLike) -> Machine:
    """Returns a Machine from itself, its name in `MACHINES`, or its file.

    Raises:
        InputError: it is not a machine.
    """
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, os.PathLike) or (isinstance(machine, str) and machine.endswith(".json")):
        return Machine.load(machine)
    if not isinstance(machine, str) or machine not in MACHINES:
        near = difflib.get_close_matches(str(machine), MACHINES, n=1, cutoff=0.3)
        raise InputError(
            f"{machine!r} is no machine",
            where="machine=",
            why=f"machines are {', '.join(MACHINES)}, a torchshard.Machine(...), or the file of one, x.json",
            attempt=repr(near[0]) if near else repr(next(iter(MACHINES))),
        )
    return MACHINES[machine]


MachineLike: TypeAlias = Machine | MachineName | os.PathLike[str]
"""A Machine, its name in `MACHINES`, or the path of its file."""
