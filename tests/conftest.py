"""Configures pytest: one thread per process, fixed Hypothesis examples, process groups destroyed after each test.

Tests of faults are marked `waits`: they measure how soon an error is raised, so they must not share the CPUs.
All others may run in parallel, including tests with real ranks.
`quick` marks the tests of `make quick`, `nightly` the slow tests of `make nightly`.
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
from tests.helpers import matches
from tests.resumed import Holds, one_cycle, trained
from torchshard.testing import fail_on_bugs

settings.register_profile("torchshard", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("torchshard")


def pytest_configure(config: pytest.Config) -> None:
    """Sets the module that the fork server of all ranks imports once; the server starts with the first rank."""
    config.addinivalue_line("markers", "nightly_cases(only, but): see `tests.helpers.nightly`")
    os.environ["COLUMNS"] = "1000"  # independent of the terminal's width
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each command compiles all modules
    multiprocessing.set_forkserver_preload(["tests.warm"])
    fail_on_bugs()


def pytest_collection_finish() -> None:
    """Makes the garbage collector run less often and skip imported modules, which saves a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that `tests.helpers.nightly` names.

    Raises:
        UsageError: a pattern matches no case, so the intended case would not be nightly.
    """
    unknown = set[tuple[str, str]]()
    known = set[tuple[str, str]]()
    for item in items:
        for mark in item.iter_markers("nightly_cases"):
            only, but = mark.args
            test, case = item.nodeid.partition("[")[0], item.callspec.id  # type: ignore[attr-defined]
            for pattern in (*only, *but):
                (known if matches(pattern, case) else unknown).add((test, pattern))
            if any(matches(pattern, case) for pattern in only) or (but and not any(matches(p, case) for p in but)):
                item.add_marker(pytest.mark.nightly)
    is_whole = not any("::" in arg for arg in config.args)
    if is_whole and unknown - known:
        raise pytest.UsageError(f"@nightly of cases that are none: {sorted(unknown - known)}")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test begins and ends without a process group."""
    torch.set_num_threads(1)
    yield
    ts.distributed.destroy_process_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a checkpoint of two layers, AdamW and a scheduler."""
    torch.manual_seed(0)
    model = Holds()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    ts.save(tmp_path, model, optimizer, scheduler=one_cycle(optimizer))
    return tmp_path


@pytest.fixture
def own_process_group() -> Iterator[None]:
    """A process group of this process alone."""
    ts.distributed.init_process_group()
    yield
    ts.distributed.destroy_process_group()
