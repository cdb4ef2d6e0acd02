"""One thread per process, the same Hypothesis examples at each run, and no process group that outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import torchshard as ts

settings.register_profile("torchshard", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("torchshard")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test begins and ends without a process group."""
    torch.set_num_threads(1)
    yield
    ts.distributed.destroy_process_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
