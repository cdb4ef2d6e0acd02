"""An op of a rank's graph that communicates in the middle of what it computes, as often as its operands say.

    def steps(self, x):
        for row in x:
            whole = yield ALL_GATHER, (row, *ends, group)          a collective and its arguments; then its result

In a process group each collective is made; where all ranks run in one process, they meet at it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Steps = Generator[tuple[Any, tuple[Any, ...]], Tensor, Any]
"""Yields collectives, is sent their results, and returns the op's."""


@dataclass(frozen=True)
class Stepwise(ABC):
    """Such an op."""

    collective: Callable[[Any], Any] = field(default=lambda op: op, kw_only=True)
    """What is called in the place of a collective's operator."""

    @abstractmethod
    def steps(self, *args: Any) -> Steps:
        """What a rank does."""

    def __call__(self, *args: Any) -> Any:
        """The op in a process group."""
        steps, result = self.steps(*args), None
        while True:
            try:
                op, given = steps.send(result)  # type: ignore[arg-type]
            except StopIteration as done:
                return done.value
            result = self.collective(op)(*given)
