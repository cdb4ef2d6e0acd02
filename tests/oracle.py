"""Calls of ops as data, which `torchshard.testing` runs unsharded and sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchshard.testing import Choice, OpCall, PlannedCall, Report


@dataclass(frozen=True)
class T:
    """An example tensor of a case, generated from a fixed seed at each run."""

    shape: tuple[int, ...]
    kind: str = "normal"
    """'normal', 'positive' (0.1 to 1), 'int' (below `high`), 'bool', 'apart' (all values differ), 'ties' (few values),
    'rows' (constant first row), 'masked' (the first columns are -inf), 'complex', 'definite' (symmetric positive
    definite matrices), 'pivots' (of a factorization without row swaps), or 'offsets' (ascending, at most `high`)."""
    high: int = 2
    grad: bool = True
    buffer: bool = False
    """Whether the tensor is a buffer of the model, which the op may write to."""

    def make(self) -> Tensor:
        if self.kind == "int":
            return torch.randint(self.high, self.shape)
        if self.kind == "bool":
            return torch.rand(self.shape) < 0.6
        if self.kind == "offsets":
            return torch.randint(self.high + 1, self.shape).sort().values.to(torch.int32)
        if self.kind == "pivots":
            return torch.arange(1, self.shape[-1] + 1, dtype=torch.int32).expand(self.shape).contiguous()
        made = torch.randn(self.shape, dtype=torch.complex128 if self.kind == "complex" else torch.float64)
        if self.kind == "definite":
            made = made @ made.mT + torch.eye(self.shape[-1], dtype=torch.float64)
        if self.kind == "positive":
            made = 0.9 * torch.rand(self.shape, dtype=torch.float64) + 0.1
        if self.kind == "apart":
            made = torch.randperm(made.numel()).to(torch.float64).reshape(self.shape) / 3 - 1
        if self.kind == "ties":
            made = torch.randint(3, self.shape) / torch.tensor(3, dtype=torch.float64) - 0.4
        if self.kind == "rows":  # the first row is constant
            made[0] = 0.1
        if self.kind == "masked":  # at least a rank's shard
            made[..., :3] = -torch.inf
        made.requires_grad_(self.grad and not self.buffer)
        return nn.Buffer(made) if self.buffer else made


@dataclass(frozen=True)
class Case:
    """One call of one op."""

    target: Any
    splits: str | None
    """The factors that the row allows to split, by its letters: "a b p+q"; None if the op must not have a row."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    hints: tuple[Any, ...] = ()
    """Further shards to try, after plain ones and ones with segments and units."""
    values: bool = True
    """False: the op's values are undefined (`empty`), only shapes are compared."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the `OpCall`."""

    def call(self, seed: int = 0) -> OpCall:
        """The call, with tensors generated from a seed."""
        torch.default_generator.manual_seed(seed)
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        args, kwargs = pytree.tree_unflatten([x.make() if isinstance(x, T) else x for x in leaves], spec)
        return OpCall(self.target, args, kwargs, self.hints, self.values, **self.options)


def row_and_choices(case: Case, world: int, *, in_parts: bool = True) -> tuple[Any, list[Choice]]:
    """The row of a case's op and all its choices, including those with parts and units."""
    return case.call().row_and_choices(world, in_parts=in_parts)


def build(case: Case, choice: Choice, world: int, seed: int = 0) -> PlannedCall:
    """The op's graph under one choice, with its collectives."""
    return case.call(seed).planned(choice, world)


def run(case: Case, choice: Choice, world: int, seed: int = 0) -> Report:
    """Compares one case under one choice with the unsharded op."""
    return case.call(seed).check(choice, world)
