"""Drops the warnings that `torch.export` logs in the thread that captures.

They refer to the exported program and its dims, which the user does not know; TorchShard's own
warnings name the model.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator


class _DropWarnings(logging.Filter):
    """Drops records below ERROR in threads that capture."""

    def __init__(self) -> None:
        super().__init__()
        self.local = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to keep a record."""
        return record.levelno >= logging.ERROR or not getattr(self.local, "quiet", False)


_FILTER = _DropWarnings()
# The loggers of `torch._export` and of dynamic sizes are named by their modules (PyTorch 2.13.0).
_LOGGERS = ("torch._export.non_strict_utils", "torch.fx.experimental.symbolic_shapes")
"""They warn of sizes of one, which are static here too, and of guards, which `Captured.assumes` checks at each call."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops the warnings inside the block.

    The filter stays on the loggers: removing it while another thread logs could make that thread
    skip another filter.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)
    previous = getattr(_FILTER.local, "quiet", False)
    _FILTER.local.quiet = True
    try:
        yield
    finally:
        _FILTER.local.quiet = previous
