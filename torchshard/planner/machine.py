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
    latency: float = 2e-6
    """Seconds of one step around the ring."""
    launch: float = 3e-5
    """Seconds to start a collective and to wait for the last rank."""
    memory: float = 80 * 1024**3
    """Bytes of one device."""

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
        Machine("cpu-gloo", 40 * GIGA, 8 * GIGA, 0.8 * GIGA, 8e-5, 1.5e-4, 16 * 1024**3),
    )
}
"""name -> Machine: eight H100 on NVLink in bfloat16 (bus bandwidth as nccl-tests measures it), and ranks of one core
each on one machine that send through gloo. `torchshard.measure_machine` measures the one at hand."""


def read_machine(machine: Machine | str | None) -> Machine:
    """A Machine by its name; `h100x8` for None.

    Raises:
        InputError: no machine has that name.
    """
    if isinstance(machine, Machine):
        return machine
    name = "h100x8" if machine is None else machine
    if name not in MACHINES:
        near = difflib.get_close_matches(str(name), MACHINES, n=1, cutoff=0.3)
        raise InputError(
            f"{machine!r} is no machine",
            where="machine=",
            why=f"machines are {', '.join(MACHINES)}, or a torchshard.Machine(...)",
            attempt=repr(near[0]) if near else repr(next(iter(MACHINES))),
        )
    return MACHINES[name]
