"""The fake values of a graph's nodes: tensors without data, with sizes that may be dynamic, and guards on these sizes.

A dynamic size is a SymInt on a fake tensor, and a sympy expression for rules and plans. `hint` is its number in the
example inputs, by which costs are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar, cast

import sympy
import torch
from torch import Tensor, fx

# Lets ops run their Python decompositions on dynamic sizes, as export does (PyTorch 2.13.0).
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import Argument, Target, map_aggregate

from torchshard.core.autocast import autocasting

T = TypeVar("T")
Size = int | torch.SymInt
"""A size in the shape of a fake tensor."""
Mode = FakeTensorMode | nullcontext[None]
"""The fake mode of a graph's values; a null context for a graph without tensors."""


def size_expr(size: Size | sympy.Expr) -> int | sympy.Expr:
    """Returns a size as an int, or as a sympy expression if it is dynamic."""
    if isinstance(size, int):
        return size
    expr = size.node.expr if isinstance(size, torch.SymInt) else size
    return int(expr) if isinstance(expr, sympy.Integer) else expr


def plain_shape(value: Tensor) -> tuple[int, ...]:
    """Returns a fake tensor's shape: ints for static sizes, SymInts for dynamic ones.

    PyTorch's type hints call a SymInt an int too.
    """
    # A SymInt whose expression is constant is a static size.
    exprs = [size_expr(size) for size in value.shape]
    return tuple(e if isinstance(e, int) else size for e, size in zip(exprs, value.shape, strict=True))


def hint(size: Size) -> int:
    """Returns a size as a number: the example inputs', or 1 if it depends on tensors' values.

    Within `sizes_as`, the sizes given there replace the example inputs'.
    """
    if isinstance(size, int):
        return size
    others = _other_sizes.get()
    if others is not None:
        number = size.node.expr.xreplace(others)
        if not number.is_Integer:
            number = number.xreplace(_parts_of(others, size.node.shape_env))
        if not number.is_Integer:  # the rest of the product has the example inputs' sizes
            number = number.xreplace(size.node.shape_env.backed_var_to_val)
        if number.is_Integer:
            return int(number)
    return 1 if size.node.hint is None else int(size.node.hint)


def _parts_of(sizes: Mapping[sympy.Symbol, sympy.Integer], env: ShapeEnv) -> dict[sympy.Symbol, sympy.Expr]:
    """Returns the local sizes of symbols that `localize` found to be multiples of a local size."""
    parts = ((env.replace(symbol).as_coeff_Mul(), size) for symbol, size in sizes.items())
    return {part: size / ranks for (ranks, part), size in parts}


_other_sizes: ContextVar[Mapping[sympy.Symbol, sympy.Integer] | None] = ContextVar("other sizes", default=None)


@contextmanager
def sizes_as(sizes: Mapping[sympy.Symbol, int]) -> Iterator[None]:
    """Within the block, `hint` and `nbytes` use these sizes instead of the example inputs'."""
    token = _other_sizes.set({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    try:
        yield
    finally:
        _other_sizes.reset(token)


def other_sizes() -> dict[sympy.Symbol, int]:
    """Returns the sizes of the enclosing `sizes_as`; {} outside of one."""
    return {symbol: int(size) for symbol, size in (_other_sizes.get() or {}).items()}


def nbytes(value: Tensor) -> int:
    """Returns the bytes of an unsharded value, with the sizes of the example inputs."""
    total = value.dtype.itemsize
    for size in value.shape:
        total *= hint(size)
    return total


def guards(mode: Mode) -> list[sympy.Basic]:
    """Returns the guards that PyTorch has added on the dynamic sizes of a fake mode, in order."""
    shape_env = getattr(mode, "shape_env", None)
    return [guard.expr for guard in shape_env.guards] if shape_env is not None else []


def has_new_guards(mode: Mode, known: Sequence[sympy.Basic]) -> bool:
    """Returns whether PyTorch added guards that do not follow from a known one, in local sizes."""
    added = guards(mode)[len(known) :]
    if not added:
        return False
    replace = mode.shape_env.replace  # type: ignore[union-attr]
    restated = {_reduced(replace(guard)) for guard in known}
    return not all(_follows(replace(guard), restated) for guard in added)


def _follows(guard: sympy.Basic, known: Collection[sympy.Basic]) -> bool:
    """Returns whether a guard, or one that it leaves the choice of, is known."""
    if isinstance(guard, sympy.Or):  # sizes broadcast: `a == 1 or a == b`
        return any(_follows(each, known) for each in guard.args)
    return _reduced(guard) in known


def _reduced(guard: sympy.Basic) -> sympy.Basic:
    """Divides an equation by its terms' common integer, so 4 a = 4 b and a = b compare equal."""
    if not isinstance(guard, sympy.Eq):
        return guard
    _, primitive = sympy.expand(guard.lhs - guard.rhs).as_content_primitive()
    return -primitive if primitive.could_extract_minus_sign() else primitive


@contextmanager
def faking(mode: Mode) -> Iterator[None]:
    """Runs the ops in the block on fake values, with symbolic sizes too, as `torch.export` does.

    Autocast is off, because graphs run without: their casts are explicit.
    """
    with mode, enable_python_dispatcher(), torch.no_grad(), autocasting(()):
        yield


def fake_value(mode: Mode, target: Target, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> object:
    """Returns the result of an op on the fake values of its arguments."""

    def fake(node: fx.Node) -> Argument:
        value: Argument = node.meta["val"]
        return value

    assert callable(target)
    with faking(mode):
        return target(*fx.map_arg(args, fake), **fx.map_arg(kwargs, fake))


def in_numbers(value: T) -> T:
    """Replaces dynamic sizes by those of the example inputs; tensors are replaced by new ones."""
    return cast(T, map_aggregate(cast(Argument, value), _in_numbers))


def _in_numbers(value: Argument) -> Argument:
    if isinstance(value, torch.SymInt):
        return hint(value)
    if not isinstance(value, Tensor):
        return value
    sizes = [hint(size) for size in value.shape]
    if value.layout != torch.strided:
        return torch.empty(sizes, dtype=value.dtype, layout=value.layout, device=value.device)
    strides = [hint(stride) for stride in value.stride()]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
