"""What a step costs on a machine: how fast it computes, reads memory, and sends.

An op takes as long as its floating-point operations or its memory traffic, whichever takes longer (the roofline). A
collective of a value takes a start, a latency for each step around the ring, and its bytes over the link:

    time = launch + steps * latency + bytes / link_bandwidth        steps = (ranks - 1) times around the ring

Nothing overlaps. Sources: Williams, Waterman and Patterson, "Roofline" (2009); Hockney's alpha-beta model, with the
rings of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass

from torchshard.errors import InputError

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Machine:
    """A group's devices and the links between them; all ranks are alike."""

    name: str = "custom"
    flops: float = 400 * TERA
    """Floating-point operations per second of one device, as matrix products reach them."""
    memory_bandwidth: float = 2600 * GIGA
    """Bytes per second that one device reads or writes."""
    link_bandwidth: float = 370 * GIGA
    """Bytes per second that one device sends to the next of the ring."""
    latency: float = 1e-6
    """Seconds of one step around the ring."""
    launch: float = 3e-5
    """Seconds to start a collective and to wait for the last rank."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            least = 0.0 if field.name in ("latency", "launch") else math.ulp(0.0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise InputError(
                    f"{value!r} is no {field.name.replace('_', ' ')}",
                    where=f"Machine({field.name}=...)",
                    why="it is a positive number, in seconds, bytes, or operations per second",
                    attempt=f"{field.name}={field.default!r}",
                )


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h100x8"),
        Machine("cpu-gloo", 40 * GIGA, 8 * GIGA, 0.8 * GIGA, 8e-5, 1.5e-4),
    )
}
"""name -> Machine: eight H100 on NVLink in bfloat16 (bus bandwidth as nccl-tests measures it), and ranks of one core
each on one machine that send through gloo. `torchshard.measure_machine` measures the one at hand."""


@dataclass(frozen=True)
class Objective:
    """What the best plan is, as the user says it."""

    machine: Machine
    memory: float | None = None
    """Bytes that a rank's step may take; None: the weights as split as can be."""
    all_axes: bool = False
    """Whether batch and sequence may be split too."""


def objective(
    machine: Machine | str | None, memory: str | float | None = None, axes: str = "weights", device: str = "cuda"
) -> Objective:
    """Reads the user's knobs.

    Args:
        device: the type of the model's device: without `machine`, a CPU's ranks send through gloo.

    Raises:
        InputError: no machine has that name, `memory` is no size, or `axes` neither "weights" nor "all".
    """
    if axes not in ("weights", "all"):
        raise InputError(
            f"{axes!r} is no choice of axes",
            where="axes=",
            why='"weights": dims that weights bring into the model; "all": batch and sequence too',
            attempt="'weights' or 'all'",
        )
    default = "cpu-gloo" if device == "cpu" else "h100x8"
    return Objective(read_machine(default if machine is None else machine), read_size(memory), axes == "all")


_UNITS = {"B": 1, **{f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)},
          **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}}  # fmt: skip


def read_size(size: str | float | None) -> float | None:
    """Bytes: a number, or a text such as '24GiB' or '80 GB'.

    Raises:
        InputError: it is none.
    """
    if size is None or (isinstance(size, (int, float)) and not isinstance(size, bool) and 0 < size < math.inf):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*", size) if isinstance(size, str) else None
    if found is None or not float(found[1]):
        raise InputError(
            f"{size!r} is no size",
            where="memory=",
            why="it is a number of bytes, or a text with a unit",
            attempt="'24GiB'",
        )
    return float(found[1]) * _UNITS[found[2]]


def size_text(count: float) -> str:
    """'1.5 KiB' for 1536 bytes."""
    power = min(max(int(count).bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def read_machine(machine: Machine | str) -> Machine:
    """A Machine, or the one of that name.

    Raises:
        InputError: no machine has that name.
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str) or machine not in MACHINES:
        near = difflib.get_close_matches(str(machine), MACHINES, n=1, cutoff=0.3)
        raise InputError(
            f"{machine!r} is no machine",
            where="machine=",
            why=f"machines are {', '.join(MACHINES)}, or a torchshard.Machine(...)",
            attempt=repr(near[0]) if near else repr(next(iter(MACHINES))),
        )
    return MACHINES[machine]
