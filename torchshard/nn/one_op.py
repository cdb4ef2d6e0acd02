"""Runs one op on this rank's slices by its rule: row, choice, conversions, replacement.

    x I, weight S(0)     split n of "... k, n k -> ... n"     x becomes R by copy; the result is S(-1)
    x I, weight S(1)     split k                              x becomes S(-1) by scatter; the result is P

`torchshard.nn` thus shares its sharding mathematics with graphs, and a bug in a rule shows in both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from torchshard.core.choices import choices, replacement_on
from torchshard.core.conversions import plan_conversion, step_args
from torchshard.core.layouts import I, Layout
from torchshard.core.rows import Choice, Row
from torchshard.distributed.eager import needs_gradient
from torchshard.distributed.group import Group
from torchshard.distributed.ops import direct
from torchshard.ops import hashable
from torchshard.rules.registry import RULES, Call, TensorType


class Piece(NamedTuple):
    """This rank's share of a tensor: a slice, the full value, or a partial sum."""

    tensor: Tensor
    layout: Layout
    shape: tuple[int, ...]
    """The global shape."""


Setting = bool | int | float | None
"""An argument of an op that is not a tensor, or None for an omitted tensor."""


def run(op: OpOverload, axis: str, group: Group, *args: Piece | Setting) -> Piece:
    """Runs an op split along a factor, or on gathered operands if its rule forbids that split.

    Args:
        op: an op with one result.
        axis: a factor of the op's row.
        args: the op's arguments in order.
    """
    types = tuple(TensorType(a.shape, a.tensor.dtype) if isinstance(a, Piece) else a for a in args)
    row, choice = _row_and_choice(op, axis, group.size, types)
    layouts = iter(choice.operands)
    operands = [convert(a, next(layouts), group) if isinstance(a, Piece) else a for a in args]
    result = (replacement_on(group.coordinate, row, choice) or op)(*operands)
    return Piece(result, choice.results[0], _result_type(op, types).shape)


def convert(piece: Piece, target: Layout, group: Group) -> Tensor:
    """Returns the tensor in another layout."""
    x, source, shape = piece
    steps = plan_conversion(source, target, needs_grad=needs_gradient(x))
    assert steps is not None, (source, target)
    for step in steps:
        args = hashable(step_args(step.source, step.target, shape))
        op = getattr(torch.ops.torchshard, step.name).default
        # torch.compile traces only operators; otherwise a direct call saves the dispatcher's time.
        x = (op if torch.compiler.is_compiling() else direct(op))(x, *args, group.name)
    return x


# Cached, because a training loop runs the same few ops with the same shapes at each step.
@lru_cache(maxsize=4096)
def _row_and_choice(
    op: OpOverload, axis: str, world: int, types: tuple[TensorType | Setting, ...]
) -> tuple[Row | None, Choice]:
    names = [argument.name for argument in op._schema.arguments]
    row = RULES[op](Call(op, dict(zip(names, types, strict=False)), (_result_type(op, types),)))
    split = [choice for choice in choices(row, world) if choice.name == f"split {axis}"] if row is not None else []
    operands = sum(isinstance(t, TensorType) for t in types)
    return row, split[0] if split else Choice("I", (I,) * operands, (I,))


@lru_cache(maxsize=4096)
def _result_type(op: OpOverload, types: tuple[TensorType | Setting, ...]) -> TensorType:
    """Returns the type of an op's result, found by running it on the meta device."""
    args = [torch.empty(t.shape, dtype=t.dtype, device="meta") if isinstance(t, TensorType) else t for t in types]
    result = cast(Tensor, op(*args))
    return TensorType(tuple(result.shape), result.dtype)
