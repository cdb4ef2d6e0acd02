"""A line on the terminal that says how far a long read or write is."""

from __future__ import annotations

import sys
import time
from typing import Final

_FIRST_SECONDS: Final = 2.0
_EVERY_SECONDS: Final = 0.5


class Progress:
    """Shows how many bytes are done, on rank 0, where standard error is a terminal, and only if it takes a while."""

    def __init__(self, what: str, rank: int) -> None:
        self._what, self._is_shown = what, rank == 0 and sys.stderr.isatty()
        self._next, self._has_written = time.monotonic() + _FIRST_SECONDS, False

    def show(self, done: int) -> None:
        """Shows the bytes that are done, at most twice in a second."""
        if self._is_shown and time.monotonic() >= self._next:
            self._next, self._has_written = time.monotonic() + _EVERY_SECONDS, True
            sys.stderr.write(f"\r{self._what}: {done / 2**30:.2f} GiB")
            sys.stderr.flush()

    def end(self) -> None:
        """Ends the line, if there is one."""
        if self._has_written:
            sys.stderr.write("\n")
