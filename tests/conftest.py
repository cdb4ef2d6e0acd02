"""One thread per process, and no process group that outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchshard as ts


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test begins and ends without a process group."""
    torch.set_num_threads(1)
    yield
    ts.distributed.destroy_process_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
