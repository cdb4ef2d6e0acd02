"""How a segment is found again: a key that is equal for segments that compute the same, such as a model's layers.

A segment's nodes are numbered, so that a key refers to its ops only by number; names of simulated groups and sizes that
depend on data are numbered in the order in which they appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import sympy
import torch
from torch import Tensor, fx

from torchshard.core.mesh import simulated
from torchshard.ir.fake_values import Size, size_expr
from torchshard.ir.graph import values
from torchshard.ops import DISPATCH


def simulated_groups(graph: fx.Graph) -> tuple[str, ...]:
    """The names of simulated groups, which differ from rank to rank."""
    given = (a for node in graph.nodes for a in node.args if isinstance(a, str))
    return tuple(dict.fromkeys(name for name in given if simulated(name) is not None))


def segment_key(graph: fx.Graph, groups: Sequence[str]) -> tuple[object, ...]:
    """A key that is equal for segments that compute the same on values of the same strides.

    Which simulated rank a segment belongs to does not change its key.
    """
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    own = sizes_found(graph)
    group = {name: f"group {i} of {name.split('/')[2]}" for i, name in enumerate(groups)}

    def text(node: fx.Node) -> str:
        args = [group.get(a, a) if isinstance(a, str) else a for a in node.args]
        return str(fx.map_arg((args, node.kwargs), lambda n: number[n]))

    return tuple(
        (
            node.target if node.op == "call_function" else node.op,
            text(node),
            tuple(value_type(value, own) for value in values(node)),
            bool(node.meta.get("needs_grad")),
        )
        for node in graph.nodes
    )


def sizes_found(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Symbol]:
    """Data-dependent sizes of a graph -> names in order of appearance, which equal graphs share."""
    found = [size_expr(n.meta["val"].shape[0]) for n in graph.find_nodes(op="call_function", target=DISPATCH)]
    return {size: sympy.Symbol(f"rows{i}") for i, size in reversed([*enumerate(found)]) if not isinstance(size, int)}


def value_type(value: object, sizes: Mapping[sympy.Symbol, sympy.Symbol] = MappingProxyType({})) -> object:
    """A key that is equal for values of the same shape, strides, dtype and device.

    Args:
        sizes: substitutions for dynamic sizes.
    """

    def sized(size: Size) -> int | sympy.Expr:
        expr = size_expr(size)
        return expr if isinstance(expr, int) else expr.xreplace(sizes)

    if not isinstance(value, Tensor):
        return str(sized(value)) if isinstance(value, torch.SymInt) else str(value)
    shape, strides = (tuple(map(sized, extents)) for extents in (value.shape, value.stride()))
    return shape, strides, value.dtype, value.device
