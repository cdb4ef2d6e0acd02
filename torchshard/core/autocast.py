"""Reads and sets the autocast state of the current thread.

Graphs have explicit casts instead of autocast regions (`passes.explicit_casts`), so a graph
computes the same inside and outside autocast. Python code that a graph calls as one op still runs
in the autocast state of its capture, so that state is saved and restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

Autocast = tuple[tuple[str, torch.dtype], ...]
"""(device type, dtype that autocast casts to) for each device type with autocast enabled."""
_DEVICES = ("cpu", "cuda")


def current_autocast() -> Autocast:
    """Returns the autocast state of this thread."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))


@contextmanager
def autocasting(state: Autocast) -> Iterator[None]:
    """Runs a block in exactly this autocast state: the listed devices enabled, all others disabled.

    The weight cache is off: a cast that autocast takes from the cache is not dispatched, so tracing
    would miss it.
    """
    dtypes, current = dict(state), dict(current_autocast())
    with ExitStack() as stack:
        for device in _DEVICES:
            if dtypes.get(device) != current.get(device):
                enabled = device in dtypes
                stack.enter_context(torch.autocast(device, dtypes.get(device), enabled=enabled, cache_enabled=False))
        yield
