"""Replaces functions of PyTorch while any thread captures, for the few calls that modes do not see.

A TorchFunctionMode or TorchDispatchMode is local to its thread, and a capture uses those wherever
possible. Modes see only ops on tensors. They would see the forward of `Function.apply` op by op,
not the call itself, and they miss the functions that seed. A replacement first asks
`current_recording()` and calls the original in every thread that does not capture.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One function to replace."""

    owner: ModuleType | type
    name: str
    replace: Callable[[object], object]
    """Takes the original (a descriptor if the owner is a class) and returns its replacement."""


class Patches:
    """A context manager that several threads may enter at once: the first patches, the last restores.

    The originals are looked up on entry, not on import, because another library may have replaced
    them since.
    """

    def __init__(self, *patches: Patch) -> None:
        self._patches, self._users, self._lock = patches, 0, threading.Lock()
        self._replaced: list[tuple[Patch, object, object]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for patch in self._patches:
                # an inherited attribute is not in vars(): to restore it, delete the replacement
                own = vars(patch.owner).get(patch.name, _MISSING)
                replacement = patch.replace(inspect.getattr_static(patch.owner, patch.name))
                setattr(patch.owner, patch.name, replacement)
                self._replaced.append((patch, own, replacement))

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            while self._replaced:
                patch, own, replacement = self._replaced.pop()
                if vars(patch.owner).get(patch.name) is not replacement:
                    continue  # replaced by another library meanwhile: its wrapper calls ours, which calls the original
                if own is _MISSING:
                    delattr(patch.owner, patch.name)
                else:
                    setattr(patch.owner, patch.name, own)
