"""Sizes in bytes and times in seconds: read from texts, and written as texts."""

from __future__ import annotations

import math
import re

from torchshard.core.errors import InputError

_UNITS = {"B": 1, **{f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)},
          **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}}  # fmt: skip


def read_size(size: str | float | None, option: str = "memory") -> float | None:
    """Returns a number of bytes, from a number or a text such as '24GiB' or '80 GB'.

    Raises:
        InputError: it is not a size.
    """
    if size is None or (isinstance(size, (int, float)) and not isinstance(size, bool) and 0 < size < math.inf):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*", size) if isinstance(size, str) else None
    if found is None or not float(found[1]):
        raise InputError(
            f"{size!r} is no size",
            where=f"{option}=",
            why="it is a number of bytes, or a text with a unit: B, KB, MB, GB, TB, KiB, MiB, GiB or TiB",
            attempt="'24GiB'",
        )
    return float(found[1]) * _UNITS[found[2]]


def size_text(count: float) -> str:
    """Returns '1.5 KiB' for 1536 bytes."""
    power = min(max(int(count).bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def time_text(seconds: float, sign: str = "") -> str:
    """Returns '2.58 s', '25.8 ms', '310 us', '4.00 ns': three digits, at most three before the point.

    Args:
        sign: "+" to write the sign of a positive number.
    """
    rounded = abs(float(f"{seconds:.3g}"))
    if 0 < rounded < TIMES[-1][0]:
        return f"<1 {TIMES[-1][1]}"
    unit, name = next((unit for unit in TIMES if rounded >= unit[0]), TIMES[0])
    number = seconds / unit
    return f"{number:{sign}#.3g} {name}" if 0 < rounded < 100 * unit else f"{number:{sign},.0f} {name}"


TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
