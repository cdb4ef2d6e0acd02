"""Refuses a forward that uses Python's or NumPy's RNG, or seeds one unseen by `seeding`.

A graph would repeat the numbers of its capture in every call. Generators are global to the process,
so their states before and after the capture are compared.

Seeding a generator to its current state leaves no difference. So, if no other thread runs, the
capture starts from unusual states. This is safe for threads that start meanwhile: only a running
thread starts another, and the only running one executes forward.

If other threads run, the states are only read, because any thread may draw at any time. If a state
has changed, forward runs again to find out whether it made the change (see `_used_by`). In this
case, seeding a generator to its current state goes unnoticed.
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
    """Yields a list; after the block it names the generators with changed states."""
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
        changed: the generators that changed during the capture.
        run: runs forward on fake tensors.

    Raises:
        CaptureError: forward draws from Python's or NumPy's random numbers, or seeds PyTorch's.
    """
    # A false error then needs another thread to use the generator in every rerun.
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
    # `_current_frames` also counts threads that were started without the threading module.
    return threading.active_count() == 1 and len(sys._current_frames()) == 1


def _states() -> dict[str, object]:
    """Name -> state of each generator that the process shares."""
    states: dict[str, object] = {"random": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    if numpy := sys.modules.get("numpy.random"):
        states["numpy.random"] = repr(numpy.get_state())
    return states


def _changed_since(before: dict[str, object]) -> set[str]:
    after = _states()
    return {name for name, state in before.items() if after[name] != state}


@contextlib.contextmanager
def _unusual_states() -> Iterator[None]:
    """Seeds the generators with an unusual seed, and restores their states after the block."""
    numpy = sys.modules.get("numpy.random")
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy.get_state() if numpy else None
    random.seed("torchshard")
    # torch.manual_seed would also seed the generators of all GPUs.
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
    """The generators that a run draws from or seeds, although other threads may use them too.

    A profile function sees only its own thread's calls. It sees the methods of Python's and
    PyTorch's generators, because these are builtins. It does not see NumPy's, so their states are
    compared: if another thread draws from NumPy during all of the reruns, forward is refused.
    """
    before = _states()
    if sys.getprofile() is not None:  # a thread has one profile function, which a profiler uses
        run()
        return _changed_since(before)
    called = _called_generators(run)
    return called | (_changed_since(before) & {"numpy.random"})


def _called_generators(run: Callable[[], object]) -> set[str]:
    # The functions of `random` are methods of one hidden instance.
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
