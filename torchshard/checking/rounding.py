"""Measures rounding noise, and widens the dtypes of a graph until hardly any is left.

A check that compares two runs in bfloat16 must allow for differences of a few percent, and a
missing collective may change less than that. So the graph also runs with every floating dtype
widened to float64: there the two sides agree to 1e-10, or they are different programs. Some sums
cancel exactly on paper (the gradient of a key bias); only their rounding error remains, in float64
too. The expected noise is measured for each tensor: the unsharded graph runs again with each value,
and each gradient, moved by one unit in its last place at random.

Source: Parker, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic" (1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from torchshard.core.hashing import spread
from torchshard.core.modules import storage_id
from torchshard.core.types import Context
from torchshard.ir.editing import duplicate
from torchshard.ir.graph import fake_mode, is_float

NUDGE_SEED = 104729
"""The seed of the random moves, which use their own generator to leave the model's random numbers as
they are."""
SAMPLE_SIZE = 8
"""The number of elements of a result that suffices to recognise most ops that compute new values."""


class _Nudge(torch.autograd.Function):
    """Moves each element by one unit in its last place or not at all, and each element of its gradient too."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return _nudged(x, generator)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return _nudged(grad, ctx.generator), None


def _nudged(x: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(-1, 2, x.shape, dtype=torch.int8, generator=generator, device="cpu")
    moved = torch.addcmul(x, x, signs.to(x), value=torch.finfo(x.dtype).eps)
    return torch.where(moved.isfinite(), moved, x)  # masks hold -inf, and 0 * inf is NaN, which hides all noise


class Nudges(NamedTuple):
    """Selects the values that are moved by a unit in their last place."""

    generator: torch.Generator
    numbers: bool = False
    """Also move the numbers that an op writes, such as a bound of `clamp`, which may be all that a
    later op sees. A value may then leave the domain of an op, and its NaN would hide all other
    noise: so such a run comes in addition to one without."""


def nudged(node: fx.Node, value: Argument, operands: Sequence[Argument], nudges: Nudges) -> Argument:
    """A node's value as a different order of summation might have computed it.

    Values that an op only moves or picks from its operands stay, because `x >= topk(x)` must remain
    true. Buffers stay too, because a write must reach the buffer itself, not a copy.
    """
    if not is_float(value) or value.layout != torch.strided or node.meta.get("kind") == "buffer":
        return value
    if node.op == "call_function" and _is_moved(value, operands):
        return _with_nudged_numbers(value, operands, nudges.generator) if nudges.numbers else value
    return cast(Tensor, _Nudge.apply(value, nudges.generator))


def _with_nudged_numbers(value: Tensor, operands: Sequence[Argument], generator: torch.Generator) -> Tensor:
    written = torch.zeros_like(value, dtype=torch.bool)
    for number in operands:
        if isinstance(number, float):
            written |= value == number
    return torch.where(written, _Nudge.apply(value, generator), value) if bool(written.any()) else value


def _is_moved(value: Tensor, operands: Sequence[Argument]) -> bool:
    """Whether each element is zero or an element of an operand."""
    tensors = [x for x in operands if is_float(x)]
    if any(storage_id(value) == storage_id(x) for x in tensors if x.layout == torch.strided):
        return True
    numbers = [float(x) for x in operands if isinstance(x, (int, float))]
    written = torch.tensor([*numbers, 0.0], dtype=torch.float64, device="cpu")
    known = torch.cat([elements.to(value.device) for elements in (*map(_numbers, tensors), written)])
    elements = _numbers(value)
    # a sample first: most ops compute new values, and the search through all elements is slow
    sample = spread(elements, SAMPLE_SIZE)[:SAMPLE_SIZE]
    return bool((sample[:, None] == known).any(1).all()) and bool(torch.isin(elements, known).all())


def _numbers(value: Tensor) -> Tensor:
    """A tensor's elements as float64, complex ones as two."""
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.double().flatten()


# --- float64 ---------------------------------------------------------------------------------------------------------


def widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the precision of a floating dtype; integers stay."""
    return tensor.detach().to(_wide(tensor.dtype, dtype)).requires_grad_(tensor.requires_grad)


def _widened_argument(value: Argument, dtype: torch.dtype) -> Argument:
    if isinstance(value, Tensor):
        return widened(value, dtype)
    return _wide(value, dtype) if isinstance(value, torch.dtype) else value


def _wide(narrow: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    if narrow.is_complex:
        return dtype.to_complex()
    return dtype if narrow.is_floating_point else narrow


def widened_graph(module: fx.GraphModule, dtype: torch.dtype) -> fx.GraphModule:
    """Replaces every floating dtype in a copy of the graph, in arguments and fake values, by one dtype.

    before    h = to(x, bfloat16); m = full([8, 8], -3.4e38, dtype=float32)
    after     h = to(x, float64);  m = full([8, 8], -3.4e38, dtype=float64)
    """
    wide = duplicate(module)
    mode, values = fake_mode(wide.graph), dict[int, Argument]()

    def widened_value(value: Argument) -> Argument:
        if is_float(value) and id(value) not in values:
            with mode:  # values made in one fake mode can be shared
                values[id(value)] = widened(value, dtype)
        return values.get(id(value), value)

    for node in wide.graph.nodes:
        if "val" in node.meta:  # recording a backward reads the fake values
            node.meta["val"] = fx.node.map_aggregate(node.meta["val"], widened_value)
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, lambda a: _widened_argument(a, dtype))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _widened_argument(a, dtype))
    return wide
