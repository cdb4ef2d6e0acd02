"""Pointwise ops: one rule for all ops with PyTorch's tag `pointwise`, and for some without it."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from torchshard.core.rows import Row
from torchshard.custom_ops.carry import CARRY
from torchshard.custom_ops.fx_types import Target
from torchshard.custom_ops.store import STORE
from torchshard.custom_ops.with_value import WITH_VALUE
from torchshard.rules.registry import Call, broadcast, letters, rule, spaced

aten = torch.ops.aten

rule(CARRY, row="... -> ...")

JOINTLY = {aten.add.Tensor, aten.sub.Tensor, aten.where.self, WITH_VALUE}
"""Ops linear in all operands (except a condition) jointly: P + P is P, but P + R is not."""
EACH = {aten.mul.Tensor}
"""Ops linear in each operand."""
FIRST = {aten.neg.default, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
"""Ops linear in the first operand."""
SAME = (
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh_copy.default,
)
"""Ops that return their operand element for element."""
CASTS = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)
UNTAGGED = (
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.masked_fill.Tensor, aten.rsub.Tensor,
    aten.floor_divide.default, aten.floor_divide.Scalar, aten.hardswish.default, aten.log_sigmoid.default,
    aten.broadcast_tensors.default, aten._prelu_kernel.default, aten.angle.default, aten.polygamma.default,
    aten.complex.default, aten.polar.default, WITH_VALUE,
    *(op.default for name in dir(aten) if name.startswith("special_") for op in [getattr(aten, name)]
      if "polynomial" in name or "bessel" in name or "airy" in name),
)  # fmt: skip
"""Pointwise ops that PyTorch does not tag."""
_LIKE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.zero.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
)


@rule(*UNTAGGED)
def pointwise(call: Call) -> Row:
    """`f32[2,8,16], f32[16] -> f32[2,8,16]     a b c, c -> a b c`; dims of size one are broadcast."""
    shape = call.results[0].shape
    names = letters(len(shape))
    operands = [broadcast(names, t.shape, shape) for t in call.tensors]
    right = spaced(*([names] * len(call.results)))
    return call.row(f"{spaced(*operands)} -> {right}", linear=_linear(call))


def _linear(call: Call) -> list[set[int]]:
    n = len(call.tensors)
    if call.target is aten.where.self:
        return [{1, 2}] if n == 3 else []
    if call.target in JOINTLY:  # if the second operand is a number, each rank would add it to its partial sum
        return [{0, 1}] if n == 2 else []
    if call.target in EACH:
        return [{i} for i in range(n)]
    # a quotient that is rounded is not linear
    return [{0}] if call.target in FIRST and call.args.get("rounding_mode") is None else []


@rule(*SAME)
def same(call: Call) -> Row:
    """`f32[2,8] -> f32[2,8]     ... -> ...`, linear."""
    linear = [{0}] if call.target not in (aten.detach.default, aten.detach_.default) else []
    return call.row("... -> ...", linear=linear)


@rule(*CASTS, *_LIKE)
def same_shape(call: Call) -> Row:
    """`f32[2,8] -> bf16[2,8]     ... -> ...`; not linear: a cast of partial sums is not the cast of the sum."""
    names = letters(len(call.results[0].shape))
    whole = call.tensors[0].shape
    # type_as(x, other) reads only the dtype of its second operand, which may have any shape
    others = []
    for i, t in enumerate(call.tensors[1:]):
        others.append(names if t.shape == whole else [f"!y{i}_{j}" for j in range(len(t.shape))])
    return call.row(f"{spaced(names, *others)} -> {spaced(names)}")


@rule(aten.copy_.default, STORE)
def copy_(call: Call) -> Row:
    """`f32[8], f32[8] -> f32[8]     a, a -> a`: the buffer keeps its layout; the value is converted to it.

    `store` writes to parameters and returns nothing: `a, a ->`.
    """
    names = spaced(letters(len(call.tensors[0].shape)))
    return call.row(f"{names}, {names} -> {names if call.results else ''}", mutates={0})


def is_pointwise(target: Target | str) -> bool:
    """Returns whether the op has PyTorch's tag `pointwise`, without random numbers or writes."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return False
    return all(str(r.type) == "Tensor" for r in target._schema.returns)  # aten.equal returns one bool
