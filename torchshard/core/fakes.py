"""Fake tensors without PyTorch's cache of what ops return.

For each new call the cache builds the result twice, to validate its entry. Where few calls repeat an earlier one, that
took a fifth of the time to capture a model, build its step graphs and check them.
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
    """Makes `torch.export` create its modes without the cache. The setting is global: for one thread at a time."""
    from torch._dynamo import config  # takes seconds, and every capture has imported it

    patched: AbstractContextManager[None] = config.patch(fake_tensor_cache_enabled=False)
    return patched
