"""Functional overloads of PyTorch's in-place and out= operators."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


def functional_overload(target: OpOverload[..., object]) -> OpOverload[..., object] | None:
    """Returns the functional overload that computes the same, or None if PyTorch lacks one.

    `add.Tensor` for `add_.Tensor`, `div.Tensor` for `div.out`.
    """
    # `_overloadname`, `_overloadpacket`: no public way to find an op's family and overload (PyTorch 2.13.0).
    name, overload = target._schema.name.split("::")[1], target._overloadname
    types = [str(a.type) for a in target._schema.arguments if not a.is_out]
    family = getattr(aten, name.rstrip("_"), None) if name.endswith("_") else target._overloadpacket
    overloads = [getattr(family, name) for name in family.overloads()] if family is not None else []
    pure = [o for o in overloads if not o._schema.is_mutable]
    fitting = [o for o in pure if [str(a.type) for a in o._schema.arguments] == types]
    return next((o for o in fitting if o._overloadname == overload), fitting[0] if fitting else None)
