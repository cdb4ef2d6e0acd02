"""What rounding may change in a graph: how noisy each tensor is, and the same graph nearly without rounding.

A check that compares two runs in bfloat16 must allow for differences of a few percent, and a left-out collective may
change less than that. So the graph is also run with every floating dtype widened to float64, where both sides agree to
1e-10 or are different programs. Some sums cancel exactly on paper (the gradient of a key bias); what remains of them is
rounding error, in float64 too. How much of it to expect is measured for each tensor: the unsharded graph runs again
with each value, and each gradient, moved by one unit in its last place at random.

Source: Parker, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic" (1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchshard.ir.graph import duplicate

NUDGE_SEED = 104729
"""The seed of the random moves; they come from a generator of their own, so that the model's random numbers stay."""


FEW = 8
"""So many elements of a result tell most ops that compute from those that move."""


def is_float(value: Any) -> bool:
    """Whether a value is a floating or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class _Nudge(torch.autograd.Function):
    """Moves each element by one unit in its last place, or not at all, and each element of its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return _nudged(x, generator)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _nudged(grad, ctx.generator), None


def _nudged(x: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(-1, 2, x.shape, dtype=torch.int8, generator=generator)
    return torch.addcmul(x, x, signs.to(x.dtype), value=torch.finfo(x.dtype).eps)


def nudged(node: fx.Node, value: Any, operands: Sequence[Any], generator: torch.Generator) -> Any:
    """A node's value as another order of summation might have left it.

    What an op only moves or picks from its operands stays: `x >= topk(x)` must go on to hold. Buffers stay too, for a
    write to one must reach it.
    """
    if not is_float(value) or value.layout != torch.strided or node.meta.get("kind") == "buffer":
        return value
    if node.op == "call_function" and _is_moved(value, operands):
        return value
    return _Nudge.apply(value, generator)


def _is_moved(value: Tensor, operands: Sequence[Any]) -> bool:
    """Whether each element is one of the operands', or zero; some are looked at first, for few ops only move."""
    tensors = [x for x in operands if is_float(x)]
    if any(value.untyped_storage()._cdata == x.untyped_storage()._cdata for x in tensors if x.layout == torch.strided):
        return True
    numbers = [float(x) for x in operands if isinstance(x, (int, float))]
    known = torch.cat([*map(_numbers, tensors), torch.tensor([*numbers, 0.0], dtype=torch.float64)])
    held = _numbers(value)
    some = held[:: max(1, len(held) // FEW)][:FEW]
    return bool((some[:, None] == known).any(1).all()) and bool(torch.isin(held, known).all())


def _numbers(value: Tensor) -> Tensor:
    held = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    held = torch.view_as_real(held.resolve_conj()) if held.is_complex() else held
    return held.double().flatten()


# --- float64 ---------------------------------------------------------------------------------------------------------


def widened(value: Any, dtype: torch.dtype) -> Any:
    """A tensor, or a dtype, in the precision of a floating dtype; other values as they are."""
    if isinstance(value, Tensor):
        held = value.detach().to(_wide(value.dtype, dtype))
        return held.requires_grad_(value.requires_grad)
    return _wide(value, dtype) if isinstance(value, torch.dtype) else value


def _wide(held: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    if held.is_complex:
        return dtype.to_complex()
    return dtype if held.is_floating_point else held


def widened_graph(module: fx.GraphModule, dtype: torch.dtype) -> fx.GraphModule:
    """The graph with every floating dtype among its arguments replaced by one; the argument is left as it was.

    before    h = to(x, bfloat16); m = full([8, 8], -3.4e38, dtype=float32)
    after     h = to(x, float64);  m = full([8, 8], -3.4e38, dtype=float64)
    """
    held = duplicate(module)
    for node in held.graph.nodes:
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, lambda a: widened(a, dtype))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: widened(a, dtype))
    return held
