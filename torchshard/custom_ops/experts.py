"""Ops of a graph that sends rows to the ranks of their experts; in the unsharded model they do nothing.

    sent, received, ends = expert_counts(ends, 2)     how many rows go to each expert, and come to a rank's
    rows = to_experts(rows, sent, received)           each expert's rows, of all ranks
    more = to_experts(more, sent, received, m)        the same of other rows, whose number is known by now
    rows = from_experts(rows, sent, received, n)      the n rows as they were

Rows are sorted by expert; `ends` [experts] has the end of each expert's rows. `rules.experts`
splits these ops: a rank then has the ends of its own experts, and `received` [own experts, ranks]
counts the rows that each rank sends to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COUNTS = "(Tensor ends, int ranks) -> (Tensor, Tensor, Tensor)"
torch.library.define("torchshard::expert_counts", _COUNTS)
torch.library.define(
    "torchshard::to_experts", "(Tensor(a) x, Tensor sent, Tensor received, SymInt? rows=None) -> Tensor(a)"
)
torch.library.define("torchshard::from_experts", "(Tensor(a) x, Tensor sent, Tensor received, SymInt n) -> Tensor(a)")


@torch.library.impl("torchshard::expert_counts", "CompositeImplicitAutograd")
def _counts(ends: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    sent = ends.diff(prepend=ends.new_zeros(1)).long()
    return sent, torch.stack([sent, *[torch.zeros_like(sent)] * (ranks - 1)], 1), ends.clone()


@torch.library.impl("torchshard::to_experts", "CompositeImplicitAutograd")
def _to_experts(x: Tensor, sent: Tensor, received: Tensor, rows: int | None = None) -> Tensor:
    return x.view_as(x)


@torch.library.impl("torchshard::from_experts", "CompositeImplicitAutograd")
def _from_experts(x: Tensor, sent: Tensor, received: Tensor, n: int) -> Tensor:
    return x.view_as(x)


EXPERT_COUNTS = torch.ops.torchshard.expert_counts.default
TO_EXPERTS = torch.ops.torchshard.to_experts.default
FROM_EXPERTS = torch.ops.torchshard.from_experts.default
