"""Ops that run collectives during their computation; the number depends on the call.

    def steps(self, x):
        for row in x:
            whole = yield ALL_GATHER, (row, dim, parts, group)     a collective and its arguments; then its result

Such an op is a generator because it runs in two ways. In a process group, each rank runs the
collectives that it yields. In the simulation, where all ranks are in one process, the generators of
all ranks advance to their next collective, which is then computed for all of them at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from torchshard.custom_ops.fx_types import Argument, Target

Computation = Generator[tuple[Target, tuple[Argument, ...]], Tensor, Argument]
"""Yields collectives with their arguments, is sent their results, and returns the op's result."""


@dataclass(frozen=True)
class Stepwise(ABC):
    """An op that runs collectives during its computation."""

    group: str = field(kw_only=True)
    """The name of the collectives' group."""
    collective: Callable[[Target], Target] = field(default=lambda op: op, kw_only=True)
    """Maps a collective's operator to the function to call for it, for example to record the call."""

    @abstractmethod
    def steps(self, *args: Argument) -> Computation:
        """Returns the computation of one rank."""

    @abstractmethod
    def collectives(self, *args: Argument) -> Iterable[tuple[Target, tuple[Argument, ...], int]]:
        """Returns the collectives that `steps` yields for these arguments: (op, arguments, count).

        They are counted, not run: a price must not take as long as the computation.
        """

    def __call__(self, *args: Argument) -> Argument:
        """Runs the op in a process group."""
        steps = self.steps(*args)
        result: Argument = None  # sending None starts a generator
        while True:
            try:
                op, operands = steps.send(result)
            except StopIteration as done:
                return done.value
            result = self.collective(op)(*operands)
