"""Fake tensors without PyTorch's cache of what ops return.

The cache makes the result of each new call twice, to check the entry. Where most calls are new, as those of a model
whose equal layers are captured once are, it took a fifth of the time of a capture, a step's graphs and their checks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


def new_fake_mode(**options: Any) -> FakeTensorMode:
    """A `FakeTensorMode` without the cache."""
    mode = FakeTensorMode(**options)
    mode.cache_enabled = False
    return mode


def modes_without_cache() -> AbstractContextManager[None]:
    """Inside the block PyTorch's own code makes modes without the cache; for one thread at a time."""
    from torch._dynamo import config  # takes seconds, and every capture has imported it

    patched: AbstractContextManager[None] = config.patch(fake_tensor_cache_enabled=False)
    return patched
