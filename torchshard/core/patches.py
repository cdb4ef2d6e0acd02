"""Replaces functions of PyTorch while any thread captures, for the few calls that no mode of PyTorch sees.

A TorchFunctionMode or TorchDispatchMode is local to its thread, and a capture uses those wherever it can. They see ops
on tensors alone: not `Function.apply`, whose forward they would see op by op, and not the functions that seed. A
replacement asks `current_recording()` first and calls the original in every thread that does not capture.
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
    """The original, as a descriptor if the owner is a class -> its replacement."""


class Patches:
    """A context manager that may be entered in several threads at once: the first one patches, the last one restores.

    The originals are looked up on entry rather than on import, because another library may have replaced them since.
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
                    continue  # another library has replaced it meanwhile: its wrapper calls ours, which passes through
                if own is _MISSING:
                    delattr(patch.owner, patch.name)
                else:
                    setattr(patch.owner, patch.name, own)
