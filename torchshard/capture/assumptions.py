"""Checks whether tensors satisfy the assumptions that a graph makes: shapes, ranges of sizes, and export's guards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from torchshard.ir.graph import size_expr

Shape = list[int | sympy.Expr]


def assumption(graph: fx.Graph, exported: ExportedProgram) -> Callable[[Sequence[Tensor | int]], bool]:
    """A function that says whether the graph computes the model on the given tensors and numbers."""
    inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    shapes: list[Shape] = [list(map(size_expr, v.shape if isinstance(v, Tensor) else (v,))) for v in inputs]
    bounds = {symbol: (r.lower, r.upper) for symbol, r in exported.range_constraints.items()}
    guards = [compile(text, "<guard>", "eval") for text in exported._guards_code]
    scope = {"math": math, "torch": torch, "__builtins__": {"max": max, "min": min, "abs": abs, "int": int}}

    def assumes(values: Sequence[Tensor | int]) -> bool:
        sizes: dict[sympy.Expr, int] = {}
        if not all(_has_shape(value, shape, sizes) for value, shape in zip(values, shapes, strict=True)):
            return False
        if not all(low <= sizes[symbol] <= high for symbol, (low, high) in bounds.items() if symbol in sizes):
            return False
        # Export's guards name the arguments L['tensors'][0] and so on, after the parameter of the flat forward.
        arguments = {"tensors": tuple(values)}
        return all(eval(guard, scope, {"L": arguments}) for guard in guards)

    return assumes


def _has_shape(value: Tensor | int, shape: Shape, sizes: dict[sympy.Expr, int]) -> bool:
    """Whether a tensor has a shape, or a number the value that one of it would have.

    Args:
        sizes: the values that dynamic sizes have in earlier tensors; new ones are added.
    """
    own = value.shape if isinstance(value, Tensor) else (value,)
    if len(shape) != len(own):
        return False
    for size, required in zip(own, shape, strict=True):
        if size != (required if isinstance(required, int) else sizes.setdefault(required, size)):
            return False
    return True
