"""Finds dynamic sizes of the inputs that a graph implicitly requires to be equal, or fixed.

    before    view(memory, [length, 4 * a, 8])     f32[length, 4*a, 8*b//a]     a, b: the batches of two inputs
    after     view(memory, [length, 4 * a, 8])     f32[length, 4*a, 8]          a is b

`F.multi_head_attention_forward` views the keys with the batch size of the queries. Export does not
conclude that the two are equal, and the quotients in its sizes can't be split. If a product of sizes
is fixed, such as `batch * length` by the size of a buffer, export does not fix the factors. They must
be fixed: a shard of the batch would not match the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

InputDim = tuple[int, int]
"""(number of an input tensor, its dim)."""


def equal_sizes(exported: ExportedProgram) -> list[list[InputDim]]:
    """Groups of input dims; the graph assumes one size for each group, as in the example."""
    dims, hints = _dynamic_dims(exported)
    groups = {symbol: {symbol} for symbol in dims}
    for numerator, denominator in _quotients(exported):
        for symbol in numerator.free_symbols & dims.keys():
            if denominator in dims and hints[symbol] == hints[denominator]:
                union = groups[symbol] | groups[denominator]
                groups.update(dict.fromkeys(union, union))
    merged = {frozenset(group) for group in groups.values() if len(group) > 1}
    return sorted(_dims_of(group, dims) for group in merged)


def fixed_sizes(exported: ExportedProgram) -> list[InputDim]:
    """Input dims with a fixed sum or product, such as one compared with a buffer's size."""
    dims, fixed = _dynamic_dims(exported)[0], set[sympy.Symbol]()
    for guard in _guards(exported):
        if isinstance(guard, sympy.Eq) and guard.rhs.is_Integer and guard.lhs.is_polynomial():
            fixed |= guard.lhs.free_symbols & dims.keys()
    return sorted(_dims_of(frozenset(fixed), dims))


def _guards(exported: ExportedProgram) -> list[sympy.Basic]:
    """The assumptions about sizes that export has made."""
    found = (value for node in exported.graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))
    sizes: Iterator[object] = (size for value in found if isinstance(value, Tensor) for size in value.shape)
    env = next((size.node.shape_env for size in sizes if isinstance(size, SymInt)), None)
    return [] if env is None else [guard.expr for guard in env.guards]


def _dims_of(group: frozenset[sympy.Symbol], dims: dict[sympy.Symbol, list[InputDim]]) -> list[InputDim]:
    return sorted(dim for symbol in group for dim in dims[symbol])


def _dynamic_dims(exported: ExportedProgram) -> tuple[dict[sympy.Symbol, list[InputDim]], dict[sympy.Symbol, int]]:
    """Dynamic size -> the dims that have it, and dynamic size -> its value in the example."""
    dims: dict[sympy.Symbol, list[InputDim]] = {}
    hints: dict[sympy.Symbol, int] = {}
    kinds = {spec.arg.name: spec.kind for spec in exported.graph_signature.input_specs}
    inputs = [n for n in exported.graph.nodes if n.op == "placeholder" and kinds[n.name] is InputKind.USER_INPUT]
    for index, node in enumerate(inputs):
        value = node.meta["val"]
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                dims.setdefault(size.node.expr, []).append((index, dim))
                hints[size.node.expr] = size.node.hint
    return dims, hints


def _quotients(exported: ExportedProgram) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """(numerator, denominator) of each quotient in the graph's sizes."""
    for node in exported.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, Tensor) else ():
                if isinstance(size, SymInt):
                    yield from (quotient.args for quotient in size.node.expr.atoms(FloorDiv))
