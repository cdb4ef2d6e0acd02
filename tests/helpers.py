"""Nightly cases, backends, memory and errors: helpers of several tests."""

from __future__ import annotations

import ctypes
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchshard as ts
from torchshard.testing import why_not_through_memory


def nightly(*only: str, but: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Marks cases of a parametrised test as nightly: the ids `only`, or all ids except `but`.

        @nightly("3-*")
        @pytest.mark.parametrize(...)

    `*` matches any text. `tests/conftest.py` reads the mark, and raises on an id without a case.
    """
    return pytest.mark.nightly_cases(only, but)


def holding(mesh: Mapping[str, int], data: Any) -> dict[str, Any]:
    """A mesh whose axes of the batch hold `data`: all but the last of several, or those that a dict names."""
    names = list(mesh)
    ways = data if isinstance(data, Mapping) else dict.fromkeys(names[:-1] or names, data)
    return {name: (size, ways[name]) if ways.get(name) else size for name, size in mesh.items()}


def matches(pattern: str, case: str) -> bool:
    """Whether a pattern of `nightly` matches the id of a case."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), case, re.DOTALL) is not None


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
"""The dtypes of models that are checked."""
NO_MEMORY = why_not_through_memory()
"""Why ranks of this machine can't communicate through memory; '' if they can."""
BACKENDS = ["gloo", pytest.param("memory", marks=pytest.mark.skipif(bool(NO_MEMORY), reason=NO_MEMORY))]


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]


class _Allocated(TorchDispatchMode):
    """Records the peak of allocated memory, read after each op. Profilers miss memory that gloo's threads free."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = ctypes.CDLL("libc.so.6").mallinfo2
        self._asked.restype = _Mallinfo
        self.before = self.most = self._now()

    def _now(self) -> int:
        info = self._asked()
        return int(info.field_7 + info.field_4)  # uordblks and hblkhd: in use, on the heap and mapped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, self._now())
        return result


def in_groups_of(rank: int, run: Callable[[int, int], Any], sizes: Sequence[int]) -> dict[Any, Any]:
    """Runs a function of this rank's number and the group's size in groups of each size; returns size -> result."""
    found = {}
    for size in sizes:
        ts.distributed.init_process_group(group_size=size)
        found[size] = run(rank % size, size)
        ts.distributed.destroy_process_group()
    return found


def allocated(step: Callable[[], None]) -> float:
    """The peak of allocated bytes while a step runs, minus the bytes allocated before it."""
    with _Allocated() as allocated:
        step()
    return allocated.most - allocated.before


def refused(fn: Callable[[], Any], text: str, kind: type[ts.ShardError] = ts.ShardError) -> bool:
    """Whether a call raises an error of this kind with this text; errors of other kinds propagate."""
    try:
        fn()
    except kind as error:
        return text in str(error)
    return False


def refused_input(fn: Callable[[], Any], text: str) -> bool:
    """Whether a call raises an InputError with this text."""
    return refused(fn, text, ts.InputError)


def command(*arguments: str) -> int:
    """Runs `torchshard` with these arguments, in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["torchshard", *arguments])
        runpy.run_module("torchshard", run_name="__main__")
    assert isinstance(end.value.code, int)
    return end.value.code
