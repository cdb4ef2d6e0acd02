"""The handle of a call: a communication that has begun, as torch.distributed waits for it.

There are no threads: a call ends in `wait`, or in `is_completed` after all ranks have begun it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_NO_TIMEOUT = timedelta(0)


class _Communication(Protocol):
    def is_completed(self) -> bool: ...

    def wait(self, seconds: float | None) -> None: ...


class MemoryWork(dist.Work):
    """A communication under way."""

    def __init__(self, communication: _Communication | None, results: Sequence[Tensor]) -> None:
        """Stores a communication, or None if it is complete.

        Args:
            results: the value of a future after the communication has ended.
        """
        super().__init__()
        self._communication, self._results = communication, results

    def is_completed(self) -> bool:
        """Returns whether it has ended, so `wait` would return at once."""
        return self._communication is None or self._communication.is_completed()

    def is_success(self) -> bool:
        """Returns whether it has ended without an error."""
        if not self.is_completed():
            return False
        try:
            return self.wait()
        except RuntimeError:
            return False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits for the end.

        Raises:
            RuntimeError: another rank does something else, has ended, or timed out.
        """
        if self._communication is not None:
            self._communication.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        return True

    def synchronize(self) -> None:
        """Waits for the end."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Returns the filled tensors."""
        return list(self._results)

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a completed future: without a thread, it must end the communication first."""
        future = torch.futures.Future[Any]()
        try:
            self.wait()
            future.set_result(list(self._results))
        except Exception as error:
            future.set_exception(error)
        return future

    def source_rank(self) -> int:
        """Returns the sender of a message received from any rank."""
        return int(getattr(self._communication, "rank", -1))

    _source_rank = source_rank
