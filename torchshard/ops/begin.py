"""Collectives in two nodes of a graph: `Begin` starts one, `wait` ends it; nodes between them overlap with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch._ops import OpOverload

from torchshard.ops.declared import OPS, OpArgs, hashable, layouts_of
from torchshard.ops.kernels import Exchange, Pending, kernels


@dataclass(frozen=True)
class Begin:
    """The target of a node that begins a collective without gradients; a `wait` node ends it."""

    op: OpOverload[..., object]
    in_place: bool
    """Whether the result reuses the operand's memory, as an all-reduce can."""
    __module__: str = __name__

    @property
    def __name__(self) -> str:
        """The name in a graph's code and in listings."""
        return f"begin_{OPS[self.op].name}"

    def __call__(self, x: Tensor, *args: int | str | Sequence[int]) -> Pending:
        own = hashable(args)
        return kernels().start(self._kernel, x, *layouts_of(OPS[self.op].name, own), cast(str, own[-1]))

    @property
    def _kernel(self) -> str:
        kernel = OPS[self.op].kernel
        return f"{kernel}_" if self.in_place else kernel

    def part(self, x: Tensor, args: OpArgs) -> Tensor | Exchange:
        """Returns the rank's part of the collective without sending it."""
        return kernels().own_part(self._kernel, x, *layouts_of(OPS[self.op].name, args), cast(str, args[-1]))


def wait(pending: Pending) -> Tensor:
    """Returns the result of a collective that was begun."""
    return pending.wait()
