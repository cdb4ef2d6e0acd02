"""Readable names for a graph's dynamic sizes, `f32[batch,length,256]`, and the known equalities of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import sympy
from torch import Tensor, fx

from torchshard.core.layouts import dtype_text
from torchshard.core.sharding import UNSHARDED, Sharding, split_text
from torchshard.ir.effects import carried_inputs
from torchshard.ir.fake_values import Size, hint, size_expr
from torchshard.ir.graph import fake_mode, is_tensor, placeholders

WORDS = ("batch", "length")
"""The first dim of a call's tensors, and later dims; a second size of one kind is `length_2`."""
PAST = "past"
"""The length of a carried value, such as a cache."""

Names = Mapping[sympy.Symbol, sympy.Expr]
"""Symbol -> the size in words: if the batch is `2*s0`, then `s0` is `batch/2`."""


def size_names(graph: fx.Graph) -> Names:
    """Returns the names of a graph's dynamic sizes; in a rank's graph, of the global sizes."""
    module = graph.owning_module
    named: Mapping[str, Size] = {} if module is None else module.meta.get("named_sizes", {})
    names: dict[sympy.Symbol, sympy.Expr] = {}
    for word, size in named.items():
        times, symbol = sympy.sympify(size_expr(size)).as_coeff_Mul()
        if isinstance(symbol, sympy.Symbol):
            names.setdefault(symbol, sympy.Symbol(word) / times)
    return names


def name_sizes(module: fx.GraphModule) -> None:
    """Names dynamic sizes by their dims in the call's tensors, also for graphs made of this one."""
    graph = module.graph
    taken = [node for node in placeholders(graph) if node.meta["kind"] == "input" and is_tensor(node)]
    carried = set(carried_inputs(graph))
    named: dict[str, Size] = {}
    # inputs come first: a size that a carried value has too is named after the input
    for node in sorted(taken, key=carried.__contains__):
        for dim, size in enumerate(node.meta["val"].shape):
            expr = size_expr(size)
            if not isinstance(expr, int) and expr not in map(size_expr, named.values()):
                word = PAST if node in carried else WORDS[min(dim, len(WORDS) - 1)]
                words = (word, *(f"{word}_{i}" for i in range(2, len(named) + 2)))
                named[next(word for word in words if word not in named)] = size
    module.meta["named_sizes"] = named


def call_sizes(module: fx.GraphModule, parts: int = 1) -> list[str]:
    """Returns the sizes of the call that a graph was captured from: 'batch 2', 'length 128'.

    Fixed sizes are included.

    Args:
        parts: the number of shards of the batch; the graph has one of them.
    """
    taken = (node for node in placeholders(module.graph) if node.meta["kind"] == "input" and is_tensor(node))
    first = next((node.meta["val"] for node in taken if node.meta["val"].ndim), None)
    sizes: dict[str, Size] = {}
    if first is not None:
        # the second dim of token ids is a length; for floats it may be features or channels
        words = WORDS[:1] if first.is_floating_point() else WORDS
        sizes = dict(zip(words, first.shape, strict=False))
    all_sizes = sizes | module.meta.get("named_sizes", {})
    kinds = {word: word.partition("_")[0] for word in all_sizes}
    found = {word: hint(size) * (parts if kinds[word] == WORDS[0] else 1) for word, size in all_sizes.items()}
    return [f"{word} {found[word]:,}" for word, kind in kinds.items() if word == kind or found[word] != found[kind]]


def value_text(
    value: object,
    names: Names = MappingProxyType({}),
    shape: Sequence[Size] | None = None,
    held: Sharding = UNSHARDED,
) -> str:
    """Returns 'f32[batch,length,16]' for a tensor, 'batch*length' for a number, '' for None.

    Args:
        shape: the global shape, if the tensor has a local one.
        held: the tensor's sharding: 'f32[batch,length,16@tp]'.
    """
    if isinstance(value, Tensor):
        sizes = [_text(size, names) for size in (value.shape if shape is None else shape)]
        return split_text(sizes, held, dtype_text(value.dtype))
    return "" if value is None else _text(value, names)


def _text(size: object, names: Names) -> str:
    expr = getattr(getattr(size, "node", None), "expr", None)
    return str(size) if expr is None else str(expr.xreplace(names))


Equal = Mapping[sympy.Symbol, sympy.Expr]
"""Known equalities of dynamic sizes: symbol -> another symbol, or an expression."""


def equal_sizes(module: fx.GraphModule) -> Equal:
    """Returns the known equalities of a graph's sizes.

    Call this before planning, which adds more: `ir.data.graph_data` must write only the earlier ones.
    """
    return dict(getattr(getattr(fake_mode(module.graph), "shape_env", None), "replacements", {}))
