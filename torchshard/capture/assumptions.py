"""Checks whether tensors satisfy a graph's assumptions: shapes, size ranges, export's guards.

PyTorch 2.13 checks these guards in `ExportedProgram.module()`, which raises an error. Here the
answer must be a bool, because other sizes get another graph, and it also covers sizes that ranks
divide. The module could go if export returned its guards as a predicate of the inputs' shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from torchshard.core.layouts import BATCH
from torchshard.ir.fake_values import hint, size_expr
from torchshard.ir.graph import is_tensor

Shape = list[int | sympy.Expr]


class Divided(NamedTuple):
    """How a dynamic size may be split across ranks."""

    ranks: int
    part: int
    """A rank's elements in each call of the graph: 1; 2 for two or more; 0 if ranks can't split the size."""
    least: int
    """The fewest elements that a rank may have."""

    def admits(self, size: int) -> bool:
        """Returns whether a size is split as in the graph, whose parts of one element broadcast."""
        return _part(size, self.ranks, self.least) == self.part


def _part(size: int, ranks: int, least: int) -> int:
    """A rank's elements: 0, 1, or 2 for more; see `Divided`."""
    part = 0 if size % ranks else min(size // ranks, 2)
    return part if part >= least else 0


def divided_sizes(graph: fx.Graph, dims: Mapping[int, int]) -> dict[sympy.Symbol, Divided]:
    """Finds the dynamic sizes of some dims of the call's tensors, which may be split across ranks.

    A size that occurs in several of the dims, such as the length in a tensor of positions, must be
    divisible by the number of ranks of each. A rank may have one element of a batch, but not of a
    sequence.

    Args:
        dims: dim -> the number of ranks.
    """
    found: dict[sympy.Symbol, Divided] = {}
    for node in graph.find_nodes(op="placeholder"):
        shape = node.meta["val"].shape if node.meta["kind"] == "input" and is_tensor(node) else ()
        for dim, ranks in dims.items():
            size = shape[dim] if dim < len(shape) else 0
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                known = found.get(size.node.expr, Divided(1, 1, 1))
                all_ranks, least = math.lcm(ranks, known.ranks), max(known.least, 1 if dim == BATCH else 2)
                found[size.node.expr] = Divided(all_ranks, _part(hint(size), all_ranks, least), least)
    return found


def multiples(sizes: Mapping[sympy.Symbol, Divided]) -> frozenset[sympy.Symbol]:
    """Returns the sizes, of `divided_sizes`, that ranks may split in this call."""
    return frozenset(size for size, known in sizes.items() if known.part)


class Assumption(Protocol):
    """A check of whether a graph computes the model on given tensors and numbers."""

    def __call__(
        self, values: Sequence[Tensor | int], *, divided: bool = True, more: Sequence[sympy.Basic] = ()
    ) -> bool:
        """Returns whether the graph is right for these values.

        Args:
            divided: whether the graph, as planned, splits sizes across ranks.
            more: guards on sizes that were added after the export.
        """


def assumption(graph: fx.Graph, exported: ExportedProgram, sizes_divided: Mapping[sympy.Symbol, Divided]) -> Assumption:
    """Builds the check of an exported graph's assumptions.

    Args:
        sizes_divided: sizes that must, or must not, be divisible by a number of ranks.
    """
    inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    shapes: list[Shape] = [list(map(size_expr, v.shape if isinstance(v, Tensor) else (v,))) for v in inputs]
    bounds = {symbol: (r.lower, r.upper) for symbol, r in exported.range_constraints.items()}
    # `_guards_code`: export has no public form of its guards as expressions of the sizes (PyTorch 2.13.0).
    guards = [compile(text, "<guard>", "eval") for text in exported._guards_code]
    scope = {"math": math, "torch": torch, "__builtins__": {"max": max, "min": min, "abs": abs, "int": int}}

    def assumes(values: Sequence[Tensor | int], *, divided: bool = True, more: Sequence[sympy.Basic] = ()) -> bool:
        sizes: dict[sympy.Expr, int] = {}
        if not all(_has_shape(value, shape, sizes) for value, shape in zip(values, shapes, strict=True)):
            return False
        if divided and not all(known.admits(sizes[size]) for size, known in sizes_divided.items()):
            return False
        if not all(low <= sizes[symbol] <= high for symbol, (low, high) in bounds.items() if symbol in sizes):
            return False
        # A guard on sizes that these values do not give stays symbolic, and passes.
        if any(guard.xreplace(sizes) is sympy.false for guard in more):
            return False
        # Guards name the arguments L['tensors'][0] and so on, after the flat forward's parameter.
        arguments = {"tensors": tuple(values)}
        return all(eval(guard, scope, {"L": arguments}) for guard in guards)

    return assumes


def _has_shape(value: Tensor | int, shape: Shape, sizes: dict[sympy.Expr, int]) -> bool:
    """Whether a tensor has a shape; for a number, whether it equals the shape's only entry.

    Args:
        sizes: the values that earlier tensors give to dynamic sizes; new ones are added.
    """
    own = value.shape if isinstance(value, Tensor) else (value,)
    if len(shape) != len(own):
        return False
    for size, required in zip(own, shape, strict=True):
        if size != (required if isinstance(required, int) else sizes.setdefault(required, size)):
            return False
    return True
