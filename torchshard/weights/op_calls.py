"""The row of an op's call on tensors, and the choice that accepts their layouts.

    call_of(aten.add.Tensor, {"self": x, "other": y}, sum)     the `Call` that the op's rule reads
    planned(call, [[S(0)], [S(0)]], size=2)                    its row, and the choice S(0), S(0) -> S(0)

The planner reads rows of a graph's nodes; here the calls are those of a running function.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from torchshard.core.choices import choices
from torchshard.core.layouts import I, Shard, is_whole
from torchshard.core.overloads import functional_overload
from torchshard.core.rows import Choice, Row
from torchshard.custom_ops.fx_types import Args, Argument, Kwargs
from torchshard.rules import Call, TensorType, has_rule, is_random, row_of
from torchshard.rules.pointwise import pointwise


def tensors_in(value: object) -> list[Tensor]:
    """Returns the tensors among the leaves of a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def planned(
    call: Call, given: Sequence[Collection[object]], size: int, tags: Sequence[torch.Tag] = ()
) -> tuple[Row, Choice] | None:
    """Returns an op's row and the choice that accepts the operands' layouts; None if no choice does.

    Args:
        given: the layouts that each operand fits.
        size: the number of ranks.
        tags: the tags of the called op; the target of `call` may be its functional overload.
    """
    row = row_of(call)
    if row is None and torch.Tag.pointwise in tags and not is_random(call.target):
        row = pointwise(call)
    if row is None:
        return None
    hints = [(i, layout) for i, layouts in enumerate(given) for layout in layouts if isinstance(layout, Shard)]
    for choice in choices(row, size, hints):
        wanted = (I if is_whole(layout) else layout for layout in choice.operands)
        if all(layout in layouts for layout, layouts in zip(wanted, given, strict=True)):
            return row, choice
    return None


def call_of(target: OpOverload, named: Kwargs, made: object) -> Call:
    """Returns the `Call` of an op for its rule.

    Args:
        named: the arguments by name; defaults are added.
    """
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    bound = {**defaults, **named}
    typed = pytree.tree_map_only(Tensor, lambda t: TensorType(tuple(t.shape), t.dtype), bound)
    results = tuple(TensorType(tuple(t.shape), t.dtype) for t in tensors_in(made))
    return Call(target, {a.name: typed[a.name] for a in target._schema.arguments if a.name in typed}, results)


def bound(target: OpOverload, args: Args, kwargs: Kwargs) -> dict[str, Argument]:
    """Returns the arguments of an op's call by their names."""
    return {**dict(zip((a.name for a in target._schema.arguments), args, strict=False)), **kwargs}


def without_writes(func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[OpOverload, dict[str, Argument]]:
    """Returns the functional overload of an op without a rule, or the op itself, and the arguments by name."""
    named = bound(func, args, kwargs)
    functional = functional_overload(func) if func._schema.is_mutable and not has_rule(func) else None
    if functional is None:
        return func, named
    values = [named[a.name] for a in func._schema.arguments if a.name in named and not a.is_out]
    names = [a.name for a in func._schema.arguments if a.name in named and not a.is_out]
    # the first argument has another name in some pairs: dropout_ calls it `self`, dropout calls it `input`
    return functional, dict(zip((functional._schema.arguments[0].name, *names[1:]), values, strict=True))
