"""Fake tensors without PyTorch's cache of op results.

For each new call the cache builds the result twice, to validate its entry. If few calls repeat,
that takes a fifth of the time to capture a model, build its step graphs and check them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


def new_fake_mode(**options: Any) -> FakeTensorMode:
    """Returns a `FakeTensorMode` without the cache."""
    mode = FakeTensorMode(**options)
    mode.cache_enabled = False
    return mode


def modes_without_cache() -> AbstractContextManager[None]:
    """Makes `torch.export` create modes without the cache: a global setting, for one thread at a time."""
    # `fake_tensor_cache_enabled` has no public switch (PyTorch 2.13.0).
    from torch._dynamo import config  # takes seconds, and every capture has imported it already

    patched: AbstractContextManager[None] = config.patch(fake_tensor_cache_enabled=False)
    return patched
