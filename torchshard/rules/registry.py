"""The table of rules, and helper functions for rules.

A rule is a pure function from a `Call`, an op with its global shapes, to a Row, or to None if it
does not support the arguments. It sees neither the graph nor the process group, so it can be tested
on its own, and a user's rule can't depend on either.

    @rule(aten.linear.default)
    def linear(call):
        return call.row("... k, n k -> ... n", linear=({0}, {1}))
"""

from __future__ import annotations

import string
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch._ops import OpOverloadPacket

from torchshard.core.errors import RuleError
from torchshard.core.layouts import Size
from torchshard.core.notation import RowKeywords, bind
from torchshard.core.rows import Row
from torchshard.custom_ops.fx_types import Argument, Target, Traced
from torchshard.custom_ops.whole import OpKey, entry


@dataclass(frozen=True)
class TensorType:
    """A tensor's type, as rules see it: `f32[2,8,16]`."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """A call of one op: its arguments by name, with a TensorType for each tensor. All sizes are global."""

    target: Target
    args: Mapping[str, Argument]
    results: tuple[TensorType, ...]
    multiples: frozenset[Size] = frozenset()
    """The dynamic sizes that are multiples of the number of ranks."""

    def __getitem__(self, name: str) -> Argument:
        return self.args[name]

    @property
    def tensors(self) -> list[TensorType]:
        """The tensor operands, in the order of the arguments."""
        return [t for value in self.args.values() for t in _tensors_in(value)]

    def bound(self, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> dict[str, Argument]:
        """Returns a replacement's arguments by the names of the op's arguments."""
        return dict(zip(self.args, args, strict=False)) | dict(kwargs)

    def row(self, text: str, *, sizes: Mapping[str, Size] | None = None, **options: Unpack[RowKeywords]) -> Row:
        """Returns the row of this op with this text; see `notation.bind`."""
        shapes = [t.shape for t in self.tensors], [r.shape for r in self.results]
        return bind(text, *shapes, sizes, self.multiples, **options)


def _tensors_in(value: Argument) -> list[TensorType]:
    if isinstance(value, TensorType):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors_in(item)]
    return []


RuleFn = Callable[[Call], Row | None]
RULES: dict[OpKey, RuleFn] = {}
"""Op, or the name of an op in a library that may not be installed -> rule."""
ROWS: dict[Hashable, Row | None] = {}
"""A cache of rows by rule and call: most layers of a model repeat other layers' calls."""


def rule(*targets: OpKey, row: str | None = None, **options: Unpack[RowKeywords]) -> Callable[[RuleFn], RuleFn]:
    """Registers a rule for ops, as a decorator of a function from Call to Row, or by a row's text.

    >>> @rule(torch.ops.aten.relu.default)
    ... def relu(call):
    ...     return call.row("... -> ...")

    Args:
        targets: OpOverloads such as `torch.ops.mylib.scale.default`, or their names,
            "mylib.scale.default"; or subclasses of `torch.autograd.Function` whose forward and
            backward are correct on slices.
        row: the text of the row, if it is the same for all shapes; the op is then registered at
            once.
        options: fields of `torchshard.core.rows.RowOptions`, with `row=` only.

    Raises:
        RuleError: a target is an overload packet, not one overload; or a non-function is decorated.
    """
    for target in targets:
        if isinstance(target, OpOverloadPacket):
            overloads = ", ".join(f"{target}.{name}" for name in target.overloads())
            raise RuleError(f"{target} is no op, but the name of its overloads", where="rule", attempt=overloads)

    def register(fn: RuleFn) -> RuleFn:
        if not callable(fn):
            raise RuleError(f"{fn!r:.80} is no rule", where="rule", attempt="a function from Call to a row, or row=...")
        RULES.update(dict.fromkeys(targets, fn))
        return fn

    if row is not None:

        def of_row(call: Call) -> Row:
            return call.row(row, **options)

        of_row.__qualname__ = f"row={row!r}"
        register(of_row)
    return register


def rule_of(target: Target | str) -> RuleFn | None:
    """Returns the rule registered for an op or its name; for a WholeCall, for its function."""
    return entry(RULES, target)


def letters(n: int, used: str = "") -> list[str]:
    """Returns n factor names that are not in `used`."""
    names = [*string.ascii_lowercase, *(f"x{i}" for i in range(n))]
    return [name for name in names if name not in used][:n]


def positive(dim: int, ndim: int) -> int:
    """Returns a dim counted from 0; the given dim may be negative."""
    return dim + ndim if dim < 0 else dim


def dims_of(call: Call, ndim: int) -> list[int]:
    """Returns the dims in the argument `dim`: one, several, or all if it is None or empty."""
    value = call.args.get("dim")
    if not ndim:
        return []  # PyTorch accepts dims 0 and -1 for a scalar
    if value is None or value == []:
        return list(range(ndim))
    return [positive(d, ndim) for d in (value if isinstance(value, (list, tuple)) else [value])]


def broadcast(names: Sequence[str], own: Sequence[Size], whole: Sequence[Size]) -> list[str]:
    """Returns one operand's factor names in a broadcast: "1" for each of its dims that is expanded.

    Args:
        names: the factor names of the broadcast shape.
        own: the shape of the operand.
        whole: the broadcast shape.
    """
    aligned = zip(names[len(names) - len(own) :], own, whole[len(whole) - len(own) :], strict=True)
    return [name if size == full or size != 1 else "1" for name, size, full in aligned]


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which PyTorch's kernels accumulate sums: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cast(x: Traced, source: torch.dtype, dtype: torch.dtype) -> Traced:
    """Returns `x`, of dtype `source`, in another dtype; adds no op if they are equal."""
    return x if dtype == source else torch.ops.aten.to.dtype(x, dtype)


def sum_dtype(call: Call) -> torch.dtype | None:
    """Returns the dtype of an op's partial sums: its `dtype`, or float32 for half-precision results."""
    result = call.results[0].dtype
    return call.args.get("dtype") if acc_dtype(result) == result else acc_dtype(result)


def unsplittable(names: Sequence[str], dims: Iterable[int]) -> list[str]:
    """Returns the names, with those at `dims` marked as unsplittable."""
    marked = set(dims)
    return [f"!{name}" if i in marked else name for i, name in enumerate(names)]


def spaced(*tensors: Iterable[str]) -> str:
    """Returns the dims of several tensors as the text of one side of a row."""
    return ", ".join(" ".join(dims) for dims in tensors)
