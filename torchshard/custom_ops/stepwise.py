"""Ops that run collectives in the middle of their computation, a number of times that only the call tells.

    def steps(self, x):
        for row in x:
            whole = yield ALL_GATHER, (row, dim, parts, group)     a collective and its arguments; then its result

Such an op is a generator because it runs in two ways. In a process group, each rank runs the collectives that it
yields. In the simulation, where all ranks live in one process, the generators of all ranks advance to their next
collective, which is then computed for all of them at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from torchshard.custom_ops.fx_types import Argument, Target

Computation = Generator[tuple[Target, tuple[Argument, ...]], Tensor, Argument]
"""Yields collectives with their arguments, is sent their results, and returns the result of the op."""


@dataclass(frozen=True)
class Stepwise(ABC):
    """An op that runs collectives in the middle of its computation."""

    group: str = field(kw_only=True)
    """The name of the group that they are over."""
    collective: Callable[[Target], Target] = field(default=lambda op: op, kw_only=True)
    """Maps a collective's operator to the function that is called for it, such as one that records the call."""

    @abstractmethod
    def steps(self, *args: Argument) -> Computation:
        """The computation of one rank."""

    @abstractmethod
    def collectives(self, *args: Argument) -> Iterable[tuple[Target, tuple[Argument, ...], int]]:
        """The collectives that `steps` yields for these arguments: (operator, its arguments, how often).

        Counted, not run: a price must not take as long as the computation.
        """

    def __call__(self, *args: Argument) -> Argument:
        """Runs the op in a process group."""
        steps = self.steps(*args)
        result: Argument = None  # a generator is started by sending None
        while True:
            try:
                op, operands = steps.send(result)
            except StopIteration as done:
                return done.value
            result = self.collective(op)(*operands)
