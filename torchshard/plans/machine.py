"""Machines: how fast their ranks compute, read memory, and send.

An op takes its overhead plus the time of its floating-point operations or of its memory traffic,
whichever is longer (the roofline). A collective that was not measured takes a start, a latency for each
step around the ring, and its bytes over the link:

    time = launch + steps * latency + bytes / link_bandwidth        steps = (ranks - 1) times around the ring

Between domains each host adds steps of the network's latency, of a tree for an all-reduce and of a ring
otherwise, and the network's bandwidth limits all traffic across it. `planner.timeline` computes how much
of this the computation hides. Sources: Williams, Waterman and Patterson, "Roofline" (2009); Hockney's
alpha-beta model, with the rings and trees of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchshard.core.errors import InputError
from torchshard.core.files import write_text
from torchshard.core.types import is_count, is_number, is_of

TILE = 128, 256
"""Rows and columns of a product's result that one multiprocessor of a GPU computes at once: cuBLAS' usual tile."""


class Transfer(NamedTuple):
    """A collective's measured time: `latency` + bytes of the whole value / `bandwidth`."""

    kernel: str
    """'all_reduce', 'all_gather' (also a reduce-scatter's), or 'all_to_all'."""
    ranks: int
    latency: float
    bandwidth: float


KERNELS = "all_reduce", "all_gather", "all_to_all"
"""The kernels that transfers are measured of; a reduce-scatter takes an all-gather's time."""


def _read_transfer(given: Sequence[object]) -> Transfer:
    """Reads a Transfer, from itself or a sequence of its fields.

    Raises:
        InputError: it is none.
    """
    kernel, ranks, latency, bandwidth = given if isinstance(given, (tuple, list)) and len(given) == 4 else [None] * 4
    if is_count(ranks) and is_number(latency) and is_number(bandwidth) and bandwidth and kernel in KERNELS:
        return Transfer(str(kernel), ranks, latency, bandwidth)
    raise InputError(
        f"{given!r} is no measured collective",
        where="Machine(transfers=...)",
        why=f"each is (kernel, ranks, latency in seconds, bytes per second); kernels are {', '.join(KERNELS)}",
        attempt='("all_reduce", 8, 3.1e-5, 2.67e11)',
    )


@dataclass(frozen=True)
class Machine:
    """A group's devices and the links between them; all ranks are equal."""

    name: str = "custom"
    flops: float = 500e12
    """Floating-point operations per second of one device, as achieved by products of large bfloat16 matrices."""
    memory_bandwidth: float = 3000e9
    """Bytes per second that one device reads or writes."""
    link_bandwidth: float = 360e9
    """Bytes per second that one device sends to its neighbour in the ring."""
    latency: float = 1e-6
    """Seconds of one step around the ring."""
    launch: float = 3e-5
    """Seconds to start a collective and to wait for the last rank."""
    op_overhead: float = 0.0
    """Seconds that a kernel takes at any size, beside its work."""
    elementwise_bandwidth: float = math.inf
    """Bytes per second that ops other than products read and write, if that is less than `memory_bandwidth`."""
    optimizer_bandwidth: float = math.inf
    """Bytes per second that an optimizer's step reads and writes, if that is less than `memory_bandwidth`."""
    domain: float = math.inf
    """The number of ranks on these links (an NVLink domain, or a host); a network joins domains."""
    network_bandwidth: float = math.inf
    """Bytes per second that the ranks of one domain together send to another."""
    network_latency: float = 0.0
    """Seconds of one step between hosts, of a ring or a tree."""
    float32_flops: float = math.inf
    """The rate of products in float32 or wider; if infinite, `flops` counts for these too."""
    attention_flops: float = math.inf
    """The rate of attention's products, if it is lower; a causal one has half of the operations."""
    tiles: float = 0.0
    """The number of `TILE`s of a product's result that are computed at once. At 0, products of all shapes run at the
    same rate."""
    start_up: float = 0.0
    """The depth of products at which a tile takes as long to begin and end as to multiply."""
    host_overhead: float = 0.0
    """Seconds that the host needs to start one kernel, while the device runs earlier ones. At 0 it is always ahead."""
    error: float = math.inf
    """How far predicted steps are from measured ones, as the mean |ratio - 1|; infinite: none were compared."""
    transfers: tuple[Transfer, ...] = ()
    """Collectives as they were measured within a domain; those of other kinds go around the ring."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "transfers", tuple(map(_read_transfer, self.transfers)))
        for field in dataclasses.fields(self)[1:-1]:
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

    @staticmethod
    def of(fields: Mapping[str, object]) -> Machine:
        """Returns the machine with these `fields`.

        Raises:
            TypeError: one is unknown.
            InputError: one has no number, or a wrong one.
        """
        return Machine(**dict[str, Any](fields))

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
            return Machine.of(is_of(dict, json.loads(Path(path).read_text(encoding="utf-8"))))
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

    def begins(self, kernel: str, ranks: int) -> float:
        """Returns the seconds of an empty collective: a ring's steps, or a tree's for an all-reduce between hosts."""
        times = 2 if kernel == "all_reduce" else 1
        if ranks <= self.domain:
            measured = self._measured(kernel, ranks)
            return self.launch + times * (ranks - 1) * self.latency if measured is None else measured.latency
        hosts = ranks / self.domain
        steps = math.log2(hosts) if kernel == "all_reduce" else hosts - 1
        return self.begins(kernel, int(self.domain)) + times * steps * self.network_latency

    def sends(self, kernel: str, nbytes: float, sent: float, ranks: int) -> float:
        """Returns the seconds in which a collective's bytes pass the slowest link.

        Args:
            nbytes: of the whole value.
            sent: by the rank that sends the most, around a ring.
        """
        measured = self._measured(kernel, min(ranks, self.domain))
        within = sent / self.link_bandwidth if measured is None else nbytes / measured.bandwidth
        return within if ranks <= self.domain else max(within, sent / self.network_bandwidth)

    def _measured(self, kernel: str, ranks: float) -> Transfer | None:
        """Returns the entry of `transfers` for a number of ranks, between two in proportion to the ranks' logarithm.

        None outside of the measured numbers, where rings say more.
        """
        kernel = "all_gather" if kernel == "reduce_scatter" else kernel
        known = [each for each in self.transfers if each.kernel == kernel]
        below = max((each for each in known if each.ranks <= ranks), default=None)
        above = min((each for each in known if each.ranks >= ranks), default=None)
        if below is None or above is None:
            return None
        if below.ranks == above.ranks:
            return below
        share = math.log2(ranks / below.ranks) / math.log2(above.ranks / below.ranks)
        latency, bandwidth = (a + share * (b - a) for a, b in zip(below[2:], above[2:], strict=True))
        return Transfer(kernel, int(ranks), latency, bandwidth)
