"""Copies of tensors for a background writer, in bounded memory."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from torchshard.core.errors import InputError


class Copies:
    """A queue of copied tensors; `put` blocks while the copies use too much memory."""

    def __init__(self, most_bytes: float) -> None:
        self._most, self.held_bytes = most_bytes, 0
        self._tensors: deque[tuple[str, Tensor] | InputError | None] = deque()
        self.changed, self._is_closed = threading.Condition(), False

    def put(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor to the CPU when it fits; one over the limit waits for an empty queue."""
        bytes_ = tensor.numel() * tensor.itemsize
        with self.changed:
            self.changed.wait_for(
                lambda: self._is_closed or not self.held_bytes or self.held_bytes + bytes_ <= self._most
            )
            if self._is_closed:
                return
            self.held_bytes += bytes_
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
        with self.changed:
            self._tensors.append((name, copied))
            self.changed.notify_all()

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Runs the block that puts all tensors; a failure in it also raises in the consumer."""
        try:
            yield
        except BaseException as error:
            self._end(InputError("a tensor can't be copied", where="ts.save(..., wait=False)", why=str(error)))
            raise
        self._end(None)

    def _end(self, failure: InputError | None) -> None:
        with self.changed:
            self._tensors.append(failure)
            self.changed.notify_all()

    def close(self) -> None:
        """Drops the queued copies; from now on `put` returns at once."""
        with self.changed:
            self._is_closed = True
            self._tensors.clear()
            self.changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self._tensors))
                entry = self._tensors.popleft()
            if entry is None:
                return
            if isinstance(entry, InputError):
                raise entry
            bytes_ = entry[1].numel() * entry[1].itemsize
            yield entry
            del entry
            with self.changed:
                self.held_bytes -= bytes_
                self.changed.notify_all()
