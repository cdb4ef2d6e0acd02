"""Progress of planning: a bar on a terminal with tqdm installed, otherwise lines on stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Protocol, TextIO


@contextlib.contextmanager
def progress(*, is_logged: bool, several: bool = False) -> Iterator[None]:
    """Shows progress from the log, unless the log itself is shown.

    Args:
        several: whether several plans are made, so the number of stages is unknown.
    """
    if is_logged:
        yield
        return
    from torchshard.compiler.prepare import STAGES

    logger = logging.getLogger("torchshard.compiler")
    with contextlib.ExitStack() as stack:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                bar = tqdm(
                    total=None if several else len(STAGES), desc=STAGES[0], delay=2, leave=False, bar_format=_BAR
                )
                handler = Follow(stack.enter_context(bar))
        stack.callback(logger.setLevel, logger.level)
        stack.callback(logger.removeHandler, handler)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        yield


_BAR = "{desc} {bar:20} {n_fmt}/{total_fmt} {elapsed}"


class ProgressBar(Protocol):
    """The part of `tqdm.tqdm` that is used here."""

    def set_description_str(self, desc: str) -> None:
        """Sets the text before the bar."""

    def update(self) -> object:
        """Advances the bar by one stage."""

    def write(self, s: str, file: TextIO) -> object:
        """Prints a line above the bar."""


class Follow(logging.Handler):
    """Advances a bar with each logged stage."""

    def __init__(self, bar: ProgressBar) -> None:
        super().__init__()
        self.bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_result", False):
            self.bar.write(record.getMessage(), sys.stderr)
            return
        self.bar.set_description_str(record.getMessage())
        self.bar.update()
