"""Refuses a forward that draws from Python's or NumPy's random numbers, or seeds a generator unseen by `seeding`.

A graph would keep the numbers of its capture for every call. Generators are global to the process, so such a forward is
found by comparing their states before and after the capture.

A forward that seeds a generator to the state that it is already in leaves no difference. So the capture starts from
states that nobody seeds to, if no other thread runs. This is safe for threads that start meanwhile: only a running
thread starts another, and the only one is busy with the capture, so it could be forward alone that starts one.

Beside other threads the states are only read, because another thread may draw at any time. If a state has changed, the
forward runs again to find out who changed it (see `_used_by`). A forward that seeds a generator to the state that it is
already in is not noticed there.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import nn

from torchshard.capture.seeding import seeds_inside_forward
from torchshard.core.errors import CaptureError

_UNUSUAL_SEED = 0x70C45A4D
_RERUNS = 3
_READING = {"getstate", "get_state", "initial_seed"}
"""Methods that don't change a generator."""


@contextlib.contextmanager
def changed_generators() -> Iterator[list[str]]:
    """Yields a list that holds, after the block, the names of the generators whose states have changed in it."""
    changed: list[str] = []
    with _unusual_states() if _is_only_thread() else contextlib.nullcontext():
        before = _states()
        try:
            yield changed
        finally:
            changed.extend(sorted(_changed_since(before)))


def check_generators(model: nn.Module, changed: list[str], run: Callable[[], object]) -> None:
    """Refuses a forward that uses a generator.

    Args:
        changed: the generators that have changed while it was captured.
        run: runs forward on fake tensors.

    Raises:
        CaptureError: forward draws from Python's or NumPy's random numbers, or seeds PyTorch's.
    """
    for _ in range(_RERUNS if changed and not _is_only_thread() else 0):
        used = _used_by(run)
        changed = [name for name in changed if name in used]
    if "torch" in changed:
        raise seeds_inside_forward(f"{type(model).__name__}.forward")
    if changed:
        raise CaptureError(
            f"forward draws random numbers from {changed[0]}",
            where=f"{type(model).__name__}.forward",
            why="a graph would keep the numbers of its capture for every call",
            attempt="torch.rand and the like with torch.where; or draw outside of the model and pass what was drawn "
            "(Hugging Face's speech models take mask_time_indices=), or switch it off (config.apply_spec_augment = "
            "False), or model.eval()",
        )


def _is_only_thread() -> bool:
    # The second also counts threads that were started without the threading module.
    return threading.active_count() == 1 and len(sys._current_frames()) == 1


def _states() -> dict[str, object]:
    """Name -> state of the generators that a process shares."""
    states: dict[str, object] = {"random": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    if numpy := sys.modules.get("numpy.random"):
        states["numpy.random"] = repr(numpy.get_state())
    return states


def _changed_since(before: dict[str, object]) -> set[str]:
    after = _states()
    return {name for name, state in before.items() if after[name] != state}


@contextlib.contextmanager
def _unusual_states() -> Iterator[None]:
    """Seeds the generators with an unusual seed inside the block, and restores their states afterwards."""
    numpy = sys.modules.get("numpy.random")
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy.get_state() if numpy else None
    random.seed("torchshard")
    # Not torch.manual_seed, which would also seed the generators of all GPUs.
    torch.default_generator.manual_seed(_UNUSUAL_SEED)
    if numpy:
        numpy.seed(_UNUSUAL_SEED)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy:
            numpy.set_state(numpy_state)


def _used_by(run: Callable[[], object]) -> set[str]:
    """The generators that a run draws from or seeds, although other threads may use them at the same time.

    A profile function sees the calls of its own thread alone, and the methods of Python's and PyTorch's generators are
    builtins, which it is told of. Those of NumPy are not: there the states are compared, so that another thread that
    draws from NumPy without a pause, in all of the reruns, gets the forward refused.
    """
    before = _states()
    if sys.getprofile() is not None:  # a profiler runs, and a thread has one profile function
        run()
        return _changed_since(before)
    called = _called_generators(run)
    return called | (_changed_since(before) & {"numpy.random"})


def _called_generators(run: Callable[[], object]) -> set[str]:
    # The functions of `random` are methods of one hidden object.
    names = {id(getattr(random.random, "__self__", None)): "random", id(torch.default_generator): "torch"}
    called: set[str] = set()

    def note(frame: FrameType, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__name__", "") not in _READING:
            name = names.get(id(getattr(function, "__self__", None)))
            called.update([name] if name else [])

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return called
