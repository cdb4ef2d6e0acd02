"""A progress bar for long reads and writes.

reading weights  ############--------   8.12 of 13.48 GiB
"""

from __future__ import annotations

import sys
import time
from typing import Final

_FIRST_SECONDS: Final = 2.0
_EVERY_SECONDS: Final = 0.5
_WIDTH: Final = 20


class Progress:
    """Shows the bytes done after the first seconds, on rank 0, if standard error is a terminal."""

    def __init__(self, what: str, rank: int, total: int) -> None:
        """Starts the clock.

        Args:
            total: this rank's total bytes.
        """
        self._what, self._total, self._is_shown = what, max(total, 1), rank == 0 and sys.stderr.isatty()
        self._next, self._has_written = time.monotonic() + _FIRST_SECONDS, False

    def show(self, done: int) -> None:
        """Updates the bar, at most twice a second."""
        if self._is_shown and time.monotonic() >= self._next:
            self._next, self._has_written = time.monotonic() + _EVERY_SECONDS, True
            full = min(_WIDTH * done // self._total, _WIDTH)
            bar = "#" * full + "-" * (_WIDTH - full)
            sys.stderr.write(f"\r{self._what}  {bar}  {done / 2**30:.2f} of {self._total / 2**30:.2f} GiB")
            sys.stderr.flush()

    def end(self) -> None:
        """Ends the line if the bar was shown."""
        if self._has_written:
            sys.stderr.write("\n")
