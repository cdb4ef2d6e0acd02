"""One op on this rank's pieces, by its rule: with the row, the choice, the conversions and the replacement of graphs.

x I, weight S(0)     split n of "... k, n k -> ... n"     x becomes R by copy; the result is S(-1)
x I, weight S(1)     split k                              x becomes S(-1) by scatter; the result is P
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchshard.core.conversions import plan_conversion, step_args
from torchshard.core.layouts import I, Layout
from torchshard.core.notation import Choice, Local, Row, choices, local_replacement
from torchshard.distributed.eager import needs_gradient
from torchshard.distributed.group import Group
from torchshard.distributed.ops import direct, hashable
from torchshard.rules.registry import RULES, Call, TensorType

Piece = tuple[Tensor, Layout, tuple[int, ...]]
"""(what this rank holds, its layout, the global shape)."""


def run(op: Any, wanted: str, group: Group, *args: Any) -> Piece:
    """Runs an op split along an axis; whole, if its rule does not allow that.

    Args:
        op: an OpOverload with one result.
        wanted: the axis of the op's row.
        args: the op's arguments in order, a Piece for each tensor.
    """
    types = tuple(TensorType(a[2], a[0].dtype) if _is_piece(a) else a for a in args)
    row, choice = _chosen(op, wanted, group.size, types)
    targets = iter(choice.operands)
    local = [convert(a, next(targets), group)[0] if _is_piece(a) else a for a in args]
    replacement = local_replacement(row, choice) if row is not None else None
    if replacement is not None and row is not None:
        result = replacement(Local(row, choice, group.coordinate), *local)
    else:
        result = op(*local)
    return result, choice.results[0], _result_shape(op, types)


def _is_piece(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], Tensor)


def convert(piece: Piece, target: Layout, group: Group) -> Piece:
    """A piece in another layout."""
    x, source, shape = piece
    steps = plan_conversion(source, target, needs_grad=needs_gradient(x))
    assert steps is not None, (source, target)
    for step in steps:
        args = hashable(step_args(step.name, step.source, step.target, shape))
        op = getattr(torch.ops.torchshard, step.name).default
        x = (op if torch.compiler.is_compiling() else direct(op))(x, *args, group.name)
    return x, target, shape


@lru_cache(maxsize=4096)
def _chosen(op: Any, wanted: str, world: int, types: tuple[Any, ...]) -> tuple[Row | None, Choice]:
    names = [argument.name for argument in op._schema.arguments]
    results = (TensorType(_result_shape(op, types), _meta(op, types).dtype),)
    row = RULES[op](Call(op, dict(zip(names, types, strict=False)), results))
    held = [c for c in choices(row, world) if c.name == f"split {wanted}"] if row is not None else []
    count = sum(isinstance(t, TensorType) for t in types)
    return row, held[0] if held else Choice("I", (I,) * count, (I,))


def _meta(op: Any, types: Sequence[Any]) -> Tensor:
    """The op's result without memory."""
    given = [torch.empty(t.shape, dtype=t.dtype, device="meta") if isinstance(t, TensorType) else t for t in types]
    made: Tensor = op(*given)
    return made


@lru_cache(maxsize=4096)
def _result_shape(op: Any, types: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(_meta(op, types).shape)
