"""Which of the inputs' dynamic sizes a graph can only hold for if they are equal.

    before    view(memory, [length, 4 * a, 8])     f32[length, 4*a, 8*b//a]     a, b: the batches of two inputs
    after     view(memory, [length, 4 * a, 8])     f32[length, 4*a, 8]          they are one size

PyTorch's attention views its keys by the batch of its queries; export does not ask whether the two are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

Place = tuple[int, int]
"""(number of an input tensor, its dim)."""


def equal_sizes(exported: ExportedProgram) -> list[list[Place]]:
    """Groups of the inputs' dims, each of which one size is taken to be; those of one example size alone."""
    places, hints = _places(exported)
    groups = {symbol: {symbol} for symbol in places}
    for numerator, denominator in _quotients(exported):
        for symbol in numerator.free_symbols & places.keys():
            if denominator in places and hints[symbol] == hints[denominator]:
                union = groups[symbol] | groups[denominator]
                groups.update(dict.fromkeys(union, union))
    found = {frozenset(group) for group in groups.values() if len(group) > 1}
    return [sorted(place for symbol in group for place in places[symbol]) for group in sorted(found, key=str)]


def _places(exported: ExportedProgram) -> tuple[dict[Any, list[Place]], dict[Any, int]]:
    """Where the inputs have each dynamic size, and what it is in the example."""
    places: dict[Any, list[Place]] = {}
    hints: dict[Any, int] = {}
    kinds = {spec.arg.name: spec.kind for spec in exported.graph_signature.input_specs}
    inputs = [n for n in exported.graph.nodes if n.op == "placeholder" and kinds[n.name] is InputKind.USER_INPUT]
    for index, node in enumerate(inputs):
        for dim, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int) and size.node.expr.is_Symbol:
                places.setdefault(size.node.expr, []).append((index, dim))
                hints[size.node.expr] = size.node.hint
    return places, hints


def _quotients(exported: ExportedProgram) -> Iterator[tuple[Any, Any]]:
    """The numerators and denominators of the sizes in a graph that are quotients."""
    for node in exported.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, Tensor) else ():
                if not isinstance(size, int):
                    yield from (quotient.args for quotient in size.node.expr.atoms(FloorDiv))
