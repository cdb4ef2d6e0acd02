"""Reductions of tensors, in the order of ranks: every rank computes the same bits, in each run.

A dtype that a reduction does not support is refused before the call begins, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchshard.distributed.memory.board import Refused

ReduceKind = ReduceOp | ReduceOp.RedOpType

_COMBINED: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_HALVES = (torch.float16, torch.bfloat16)


@lru_cache
def _reduces(kind: ReduceOp.RedOpType, dtype: torch.dtype) -> bool:
    x = torch.zeros(2, dtype=dtype, device="cpu")
    try:
        _COMBINED[kind](x, x, out=torch.zeros_like(x))
    except (KeyError, RuntimeError):
        return False
    return True


def check_reduces(x: Tensor, op: ReduceKind) -> None:
    """Raises Refused if the backend does not reduce tensors of this dtype by `op`."""
    if not _reduces(_kind(op), x.dtype):
        raise Refused(f"ranks that talk through memory do not reduce {x.dtype} by {op_text(op)}")


def combine(x: Tensor, parts: Sequence[Tensor], op: ReduceKind) -> None:
    """Combines tensors, in their order, into one that shares no memory with them."""
    if not x.numel():
        return
    kind = _kind(op)
    fn = _COMBINED[kind]
    # sums of several half-precision tensors are computed in float32, so that they round once
    rounds_once = x.dtype in _HALVES and (len(parts) > 2 or kind == ReduceOp.AVG)
    first, *rest = parts
    if rounds_once or not rest or not x.is_contiguous():
        total = first.to(torch.float32 if rounds_once else x.dtype, copy=True)
    else:
        total = fn(first, rest.pop(0), out=x)
    for part in rest:
        fn(total, part, out=total)
    if kind == ReduceOp.AVG:
        total.div_(len(parts))
    if total is not x:
        x.copy_(total)


def op_text(op: ReduceKind) -> str:
    """Returns the name of a reduction: 'SUM' for torch.distributed's ReduceOp.SUM."""
    return _name(_kind(op))


@lru_cache
def _name(kind: ReduceOp.RedOpType) -> str:
    return str(kind).rpartition(".")[2]


def _kind(op: Any) -> ReduceOp.RedOpType:
    return getattr(op, "op", op)
