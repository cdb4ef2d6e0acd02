"""Which autocast is on in a thread, and how to switch it.

Graphs hold explicit casts in its place (`passes.explicit_casts`), so that they run the same in and out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

Autocast = tuple[tuple[str, torch.dtype], ...]
"""The device types that autocast is on for, and what it casts to; () where it is off."""
_DEVICES = ("cpu", "cuda")


def current_autocast() -> Autocast:
    """That of this thread."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))


@contextmanager
def autocasting(wanted: Autocast) -> Iterator[None]:
    """Autocast for these devices, and for no others; without its cache, in which casts of parameters go unseen."""
    dtypes, current = dict(wanted), dict(current_autocast())
    with ExitStack() as stack:
        for device in _DEVICES:
            if dtypes.get(device) != current.get(device):
                on = device in dtypes
                stack.enter_context(torch.autocast(device, dtypes.get(device), enabled=on, cache_enabled=False))
        yield
