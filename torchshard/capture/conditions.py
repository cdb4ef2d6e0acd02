"""Numbers that forward takes from its buffers, as in `if self.observer_enabled[0] == 1`.

A graph can't contain a branch on a value of the call. A number that depends only on one-element
buffers, constants and random draws is different: such buffers are replicated, so the number is
known before the call and equal on all ranks. The graph contains the branch that the model takes for
this number, and serves calls with equal numbers:

    export records    eq = aten.eq.Scalar(aten.select.int(observer_enabled, 0, 0), 1), and forward asks bool(eq)
    a Condition is    these ops as a small graph, which computes the number from the buffers as they are before a call

Export in PyTorch 2.13 refuses to branch on a tensor's value, or makes both branches one region by
`torch.cond`. This module could go if export specialized a graph for such a number and returned it
as a guard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import is_fake

from torchshard.core.autocast import autocasting
from torchshard.core.hashing import hash_tensor
from torchshard.core.rng_states import keeping_rng_states

Number = bool | int | float
Numbers = tuple[tuple[str, Number], ...]
"""(the user's line, the number) of each condition."""


@dataclass(frozen=True, eq=False)
class Condition:
    """A number that forward takes from buffers, constants and random draws."""

    graph: fx.GraphModule
    """The ops that compute it, with forward's earlier draws and writes to the buffers."""
    buffers: tuple[str, ...]
    """The names of the graph's arguments."""
    draws: bool
    """Whether the number depends on random draws."""
    read: Callable[[Tensor], Number]
    """How forward reads the result: `bool`, `Tensor.item`."""
    where: str
    """The user's line."""

    @cached_property
    def text(self) -> str:
        """A text that is equal for equal conditions."""
        constants = list(map(hash_tensor, self.graph.buffers()))
        return f"{self.where}: {self.read.__name__} {self.graph.code} {self.buffers} {constants}"

    @torch.no_grad()
    def number(self, buffers: Mapping[str, Tensor]) -> Number:
        """Computes the number for these buffers and the RNG state, which stays unchanged."""
        own = [buffers[name].detach().clone() for name in self.buffers]  # the graph may write to them
        with keeping_rng_states(own) if self.draws else contextlib.nullcontext(), autocasting(()):
            return self.read(cast(Tensor, self.graph(*own)))


class Conditions:
    """The conditions of some calls, and their numbers for the latest values of the buffers."""

    def __init__(self) -> None:
        self._conditions: dict[str, Condition] = {}
        self._values: list[Number] | None = None
        self._numbers: dict[str, tuple[str, Number]] = {}

    def add(self, conditions: Iterable[Condition]) -> None:
        """Adds new conditions."""
        self._conditions = {one.text: one for one in conditions} | self._conditions
        self._values = None

    def numbers(self, buffers: Mapping[str, Tensor]) -> dict[str, tuple[str, Number]]:
        """Text -> line and current number of each condition; {} while a buffer has no value."""
        conditions = self._conditions.values()
        held = [buffers[name] for name in dict.fromkeys(name for one in conditions for name in one.buffers)]
        if any(t.is_meta or is_fake(t) for t in held):
            return {}
        values = [t.item() for t in held]
        # A draw depends on the RNG state, so such numbers are computed at each call.
        if values != self._values or any(one.draws for one in conditions):
            self._values = values
            self._numbers = {one.text: (one.where, one.number(buffers)) for one in conditions}
        return self._numbers
