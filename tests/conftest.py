"""One thread per process, the same Hypothesis examples at each run, and no process group that outlives its test.

Tests that start ranks are marked `ranks`: these wait for each other more than they compute, so that two tests may run
at once. Those of faults are marked `waits` too: they measure how soon an error comes, so that nothing that computes may
run beside them. All others may run in parallel.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import torchshard as ts

_NAMES = "by_hand collectives eager_faults examples faults habits launch multi_node nn objects primitives ranks"
RANKS = {f"test_{name}" for name in (*_NAMES.split(), "run_ranks")}
"""The files whose tests start ranks; in other files single tests are marked."""
WAITS = {"test_faults", "test_eager_faults"}
"""Of these, the files whose tests wait for timeouts."""

settings.register_profile("torchshard", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("torchshard")


def pytest_configure() -> None:
    """Names the module that the process behind all forked ranks imports once; the process starts with the first."""
    multiprocessing.set_forkserver_preload(["tests.warm"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that start ranks."""
    for item in items:
        if item.path.stem in RANKS:
            item.add_marker("ranks")
        if item.path.stem in WAITS:
            item.add_marker("waits")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test begins and ends without a process group."""
    torch.set_num_threads(1)
    yield
    ts.distributed.destroy_process_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
