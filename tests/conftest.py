"""One thread per process, the same Hypothesis examples at each run, and no process group that outlives its test.

Tests of faults are marked `waits`: they measure how soon an error comes, so nothing that computes may run beside them.
All others may run in parallel, real ranks too.
`quick` marks what `make quick` runs, `nightly` what `make nightly` runs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import torchshard as ts
from tests.helpers import watch_for_bugs

NIGHTLY = frozenset((Path(__file__).parent / "nightly.txt").read_text().split("\n"))
"""Tests that take long, beside others of their kind that `make test` runs."""
settings.register_profile("torchshard", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("torchshard")


def pytest_configure() -> None:
    """Names the module that the process behind all forked ranks imports once; the process starts with the first."""
    os.environ["COLUMNS"] = "1000"  # whatever the terminal has
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each command that is run compiles all modules anew
    multiprocessing.set_forkserver_preload(["tests.warm"])
    watch_for_bugs()


def pytest_collection_finish() -> None:
    """Lets the garbage collector run less often, and not over the modules: that saves a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `NIGHTLY`."""
    for item in items:
        if item.nodeid.removeprefix("tests/") in NIGHTLY:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test begins and ends without a process group."""
    torch.set_num_threads(1)
    yield
    ts.distributed.destroy_process_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
