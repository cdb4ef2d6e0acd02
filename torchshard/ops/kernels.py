"""The functions that passes take from `distributed`, which registers them when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from torchshard.core.errors import InternalError
from torchshard.core.layouts import Layout


class RankInGroup(Protocol):
    """A process's place in a group."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""


class Pending(Protocol):
    """A communication under way."""

    def wait(self) -> Tensor:
        """Waits for its end and returns the result."""


class Exchange(Protocol):
    """The data that a rank sends, and the computation of the result from received data."""

    @property
    def sent(self) -> Tensor:
        """The tensor to send."""

    @property
    def result(self) -> Callable[[Tensor], Tensor]:
        """Computes the result."""

    def received(self, ranks: int) -> Tensor:
        """Returns the memory for received data."""


@dataclass(frozen=True)
class Kernels:
    """One rank's side of the collectives; arguments are those of `distributed.convert`."""

    lookup: Callable[[str], RankInGroup]
    """Returns the group of a name, real or simulated."""
    start: Callable[[str, Tensor, Layout, Layout, str], Pending]
    """Starts a conversion over the group of a name."""
    own_part: Callable[[str, Tensor, Layout, Layout, str], Tensor | Exchange]
    """Runs a conversion's kernel without sending."""
    functional: Callable[[str, Tensor, Layout, Layout, str], tuple[Tensor, Callable[[Tensor], Tensor]]]
    """Starts a conversion through PyTorch's functional collectives."""
    functional_max: Callable[[Tensor, str], Tensor]
    """Starts the elementwise maximum over the ranks through PyTorch's functional collectives."""
    computing: Callable[[object], Callable[..., Tensor]]
    """Returns the function that computes a collective operator without dispatcher and gradients."""
    cpu_backend: Callable[[], str]
    """Returns the backend for CPU tensors of this process."""


_registered: list[Kernels] = []


def register_kernels(functions: Kernels) -> None:
    """Makes these the kernels of this process."""
    _registered[:] = [functions]


def kernels() -> Kernels:
    """Returns the kernels of this process.

    Raises:
        InternalError: `torchshard.distributed` was not imported.
    """
    if not _registered:
        raise InternalError("no kernels of collectives are registered; import torchshard.distributed")
    return _registered[0]
