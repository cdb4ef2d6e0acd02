"""Machines: how fast their ranks compute, read memory, and send.

An op takes its overhead plus the time of its floating-point operations or of its memory traffic,
whichever is longer (the roofline). A collective takes a start, a latency for each step around the
ring, and its bytes over the link:

    time = launch + steps * latency + bytes / link_bandwidth        steps = (ranks - 1) times around the ring

Ranks beyond one domain send over the network. Each step then has the network's latency, because a
ring is as fast as its slowest link, and the network's bandwidth limits all traffic across it.
`planner.timeline` computes how much of this the computation hides. Sources: Williams, Waterman and
Patterson, "Roofline" (2009); Hockney's alpha-beta model, with the rings of Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from torchshard.core.errors import InputError
from torchshard.core.files import write_text

GIGA, TERA = 1e9, 1e12
MachineName = Literal[
    "h100x8", "h200x8", "b200x8", "a100x8", "mi300x8", "h100x8-pcie", "a100x8-pcie", "cpu-memory", "cpu-gloo"
]  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A group's devices and the links between them; all ranks are equal."""

    name: str = "custom"
    flops: float = 400 * TERA
    """Floating-point operations per second of one device, as achieved by matrix products."""
    memory_bandwidth: float = 2600 * GIGA
    """Bytes per second that one device reads or writes."""
    link_bandwidth: float = 370 * GIGA
    """Bytes per second that one device sends to its neighbour in the ring."""
    latency: float = 1e-6
    """Seconds of one step around the ring."""
    launch: float = 3e-5
    """Seconds to start a collective and to wait for the last rank."""
    op_overhead: float = 0.0
    """Seconds that an op takes at any size; 0 if the host is always ahead of the device."""
    elementwise_bandwidth: float = math.inf
    """Bytes per second that ops other than products read and write; infinite if they are fused."""
    domain: float = math.inf
    """The number of ranks on these links (an NVLink domain, or a host); a network joins domains."""
    network_bandwidth: float = math.inf
    """Bytes per second that the ranks of one domain together send to another."""
    network_latency: float = 0.0
    """Seconds of one step around a ring that crosses the network."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            # times may be 0, but rates divide: they must be positive
            least = 0.0 if field.default == 0.0 or field.name in ("latency", "launch") else math.ulp(0.0)
            most = math.inf if field.default == math.inf else sys.float_info.max
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
                raise InputError(
                    f"{value!r} is no {field.name.replace('_', ' ')}",
                    where=f"Machine({field.name}=...)",
                    why=f"it is a number {'from' if least == 0.0 else 'above'} 0, in seconds, bytes, operations per "
                    "second, or ranks",
                    attempt=f"{field.name}={field.default!r}",
                )

    @property
    def fields(self) -> dict[str, object]:
        """Its fields by name, for JSON: without infinite numbers, which JSON can't express."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value != math.inf}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the machine as JSON.

        Raises:
            InputError: the file can't be written; a previous file is left unchanged.
        """
        write_text(path, json.dumps(self.fields, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Machine:
        """Returns the machine that `save` wrote.

        Raises:
            InputError: the file can't be read, or is not a machine.
        """
        try:
            return Machine(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{os.fspath(path)!r} holds no machine",
                where="machine=",
                why=str(error),
                attempt="a file that Machine.save or the command torchshard measure wrote",
            ) from None

    def across(self, ranks: int) -> Machine:
        """Returns the machine as seen by a ring with neighbours `ranks` apart.

        There are `ranks` such rings side by side, and those in one domain share its network.
        """
        rings = min(ranks, self.domain)
        domain = self.domain if self.domain == math.inf else max(self.domain // ranks, 1)
        return dataclasses.replace(self, domain=domain, network_bandwidth=self.network_bandwidth / rings)

    def link(self, ranks: int) -> tuple[float, float]:
        """Returns the bandwidth and the latency of a ring of `ranks` ranks."""
        if ranks <= self.domain:
            return self.link_bandwidth, self.latency
        return min(self.link_bandwidth, self.network_bandwidth), max(self.latency, self.network_latency)


H100 = Machine("h100x8", domain=8, network_bandwidth=340 * GIGA, network_latency=8e-6)


def _host(name: str, flops: float, memory: float, link: float, network: float) -> Machine:
    """Returns hosts of eight other devices, at the same fractions of their sheet as H100s."""
    return dataclasses.replace(
        H100,
        name=name,
        flops=H100.flops * flops / 989,
        memory_bandwidth=H100.memory_bandwidth * memory / 3350,
        link_bandwidth=H100.link_bandwidth * link / 450,
        network_bandwidth=H100.network_bandwidth * network / 400,
    )


MACHINES = {
    machine.name: machine
    for machine in (
        H100,
        # per device: TFLOPS without sparsity, GB/s of memory, GB/s of links one way; per host: GB/s
        # of network
        _host("h200x8", 989, 4800, 450, 400),
        _host("b200x8", 2250, 8000, 900, 400),
        _host("a100x8", 312, 2039, 300, 200),
        _host("mi300x8", 1307, 5300, 448, 400),
        _host("h100x8-pcie", 756, 2000, 64, 50),
        _host("a100x8-pcie", 312, 1935, 32, 50),
        Machine("cpu-memory", 100 * GIGA, 10 * GIGA, 4.0 * GIGA, 1e-5, 1e-4, 1e-5, 10 * GIGA),
        Machine("cpu-gloo", 100 * GIGA, 10 * GIGA, 1.0 * GIGA, 8e-5, 1.5e-3, 2.5e-5, 6 * GIGA),
    )
}
"""Machines by name. The GPU machines are hosts of eight GPUs, in bfloat16: on NVLink (AMD's
Infinity Fabric) with a network card of 400 Gbit/s for each GPU (A100: 200), or on PCIe with two
cards of 200 Gbit/s. "cpu-memory" and "cpu-gloo" are ranks of one core each on one machine, which
communicate through its memory or over gloo. H100s are known to achieve 0.4 of their sheet's products
and 0.8 of its bytes (bus bandwidths as nccl-tests measures them); the others are assumed to achieve
the same fractions. Sources: the vendors' sheets of A100 and H100 (SXM and PCIe), H200 SXM, HGX
B200, MI300X. `torchshard.measure_machine` measures the present machine, except for a network."""


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
