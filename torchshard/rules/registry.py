"""The table of rules: from an op to the function that gives its row.

A rule is a pure function from a `Call` (the op with its global shapes) to a Row, or None where it has none for these
arguments. It sees no graph and no process group.

    @rule(aten.linear.default)
    def linear(call):
        return call.row("... k, n k -> ... n", linear=({0}, {1}))
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchshard.core.layouts import Size
from torchshard.core.notation import Row, bind
from torchshard.custom_ops.whole import entry


@dataclass(frozen=True)
class TensorType:
    """What a rule may know of a tensor: `f32[2,8,16]`."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One op with its arguments by name; tensors appear as TensorType, sizes are global."""

    target: Any
    args: Mapping[str, Any]
    results: tuple[TensorType, ...]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @property
    def tensors(self) -> list[TensorType]:
        """The tensor operands, in the order of the arguments."""
        return [t for value in self.args.values() for t in _tensors_in(value)]

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What a replacement is called with, by the names of the op's arguments."""
        return dict(zip(self.args, args, strict=False)) | dict(kwargs)

    def row(self, text: str, *, linear: Iterable[Iterable[int]] = (), **options: Any) -> Row:
        """The row of this op; see `notation.bind`."""
        return bind(
            text,
            [t.shape for t in self.tensors],
            [r.shape for r in self.results],
            options.pop("sizes", None),
            linear=tuple(frozenset(s) for s in linear),
            mutates=frozenset(options.pop("mutates", ())),
            reduced=frozenset(options.pop("reduced", ())),
            **options,
        )


def _tensors_in(value: Any) -> list[TensorType]:
    if isinstance(value, TensorType):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors_in(item)]
    return []


RuleFn = Callable[[Call], Row | None]
RULES: dict[Any, RuleFn] = {}
"""OpOverload, or its name where its library may not be there, -> rule."""
ROWS: dict[Any, Row | None] = {}
"""The rows of the calls that were seen, by rule and call: the layers of a model are alike."""


def rule(*targets: Any, row: str | None = None, **options: Any) -> Callable[[RuleFn], RuleFn]:
    """Registers a rule for some ops: a function from Call to Row, or with `row=` just the row.

    >>> @rule(torch.ops.aten.relu.default)
    ... def relu(call):
    ...     return call.row("... -> ...")

    Args:
        targets: the OpOverloads, e.g. `torch.ops.mylib.scale.default`, or their names: "mylib.scale.default"; or
            `torch.autograd.Function` subclasses, whose forward and backward must then be right on slices.
    """

    def register(fn: RuleFn) -> RuleFn:
        RULES.update(dict.fromkeys(targets, fn))
        return fn

    if row is not None:
        register(lambda call: call.row(row, **options))
    return register


def rule_of(target: Any) -> RuleFn | None:
    """The rule that is registered for an op, by itself or by its name; for a call kept whole, by its Function."""
    found: RuleFn | None = entry(RULES, target)
    return found


def letters(n: int, used: str = "") -> list[str]:
    """n axis names that are not in `used`."""
    names = [*string.ascii_lowercase, *(f"x{i}" for i in range(n))]
    return [name for name in names if name not in used][:n]


def positive(dim: int, ndim: int) -> int:
    """A dim counted from 0."""
    return dim + ndim if dim < 0 else dim


def dims_of(call: Call, name: str, ndim: int) -> list[int]:
    """An argument that is one dim, several, or None for all."""
    value = call.args.get(name)
    if not ndim:
        return []  # PyTorch lets a scalar have dims 0 and -1
    if value is None or value == []:
        return list(range(ndim))
    return [positive(d, ndim) for d in (value if isinstance(value, (list, tuple)) else [value])]


def broadcast(names: Sequence[str], own: Sequence[Size], whole: Sequence[Size]) -> list[str]:
    """The names of the last dims of a broadcast shape as one of its operands has them: 1 where it is stretched."""
    held = zip(names[len(names) - len(own) :], own, whole[len(whole) - len(own) :], strict=True)
    return [name if size == full or size != 1 else "1" for name, size, full in held]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a sum is taken in, as PyTorch does: one of halves may be too large for a half."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cast(x: Any, own: torch.dtype, dtype: torch.dtype) -> Any:
    """`x`, which is of the dtype `own`, in another; no op where it is of that already."""
    return x if dtype == own else torch.ops.aten.to.dtype(x, dtype)


def sum_dtype(call: Call) -> torch.dtype | None:
    """What an op that has a `dtype` argument takes its sums in: what that says, but for halves float32."""
    result = call.results[0].dtype
    return call.args.get("dtype") if wide(result) == result else wide(result)


def block(names: Sequence[str], dims: Iterable[int]) -> list[str]:
    """The names with those at `dims` marked as not to be split."""
    closed = set(dims)
    return [f"!{name}" if i in closed else name for i, name in enumerate(names)]


def spaced(*tensors: Iterable[str]) -> str:
    """Several lists of dims as one side of a row."""
    return ", ".join(" ".join(dims) for dims in tensors)
