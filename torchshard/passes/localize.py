"""Global sizes become this rank's. Before this pass no graph knows its rank; after it the graph runs.

    before    view = view(q, [2, 8, 2, 4])        f32[2,8,2,4]  S(2)
    after     view = reshape(q, [2, 8, 1, 4])     f32[2,8,1,4]  S(2)

Where splitting an axis changes what an op computes, the rule's replacement takes the op's place; its last node takes
the op's name. Collectives get the name of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torchshard.core.layouts import Layout, local_shape
from torchshard.core.mesh import Coordinate
from torchshard.core.notation import Local, local_replacement
from torchshard.custom_ops.whole import WholeCall
from torchshard.distributed.ops import is_collective
from torchshard.ir.graph import drop_dead_code, emit, fake_mode, plain_shape, values
from torchshard.passes.propagate import Seen, propagate
from torchshard.rules.random import BY_ELEMENT

aten = torch.ops.aten


def localize(module: fx.GraphModule, coordinate: Coordinate, seen: Seen | None = None) -> bool:
    """Rewrites the graph for one rank; returns whether anything changed.

    Args:
        seen: what ops gave on fake values before; what they give here is added.
    """
    _localize_values(module, coordinate)
    for node in list(module.graph.nodes):
        if isinstance(node.target, WholeCall):
            node.target = node.target.with_own_modules()
        if is_collective(node.target):
            node.args = (*node.args[:-1], coordinate.group)
            continue
        choice, row = node.meta.get("choice"), node.meta.get("row")
        replacement = local_replacement(row, choice) if row is not None and choice is not None else None
        if replacement is not None:
            _replace(module, node, replacement, Local(row, choice, coordinate))
        elif node.target in BY_ELEMENT:
            _straighten(module, node)
        elif node.target is aten.view.default:
            node.target = aten.reshape.default  # a collective may have left its operand in another order of memory
    drop_dead_code(module)
    propagate(module, {} if seen is None else seen)
    return True


def _first_shape(node: fx.Node) -> tuple[Any, ...] | None:
    first = values(node)[0] if values(node) else None
    return plain_shape(first) if isinstance(first, Tensor) else None


def _localize_values(module: fx.GraphModule, coordinate: Coordinate) -> None:
    """Replaces meta['val'] by fake tensors of this rank's shapes; equal shape, dtype and device share one."""
    mode, made = fake_mode(module), dict[str, Tensor]()

    def held(value: Any, layout: Layout) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = local_shape(plain_shape(value), layout, coordinate.rank, coordinate.axis.size)
        looks = repr((shape, value.dtype, value.device))
        if looks not in made:
            with mode:
                made[looks] = torch.empty(shape, dtype=value.dtype, device=value.device)
        return made[looks]

    for node in module.graph.nodes:
        if node.op in ("placeholder", "call_function"):
            node.meta["global_shape"] = _first_shape(node)
            layouts: tuple[Layout, ...] = node.meta.get("layouts", ())
            local = [held(value, layout) for value, layout in zip(values(node), layouts, strict=False)]
            if local:
                val = node.meta["val"]
                node.meta["val"] = type(val)(local) if isinstance(val, (list, tuple)) else local[0]


def _straighten(module: fx.GraphModule, node: fx.Node) -> None:
    """Contiguous, as it is unsharded: a collective, or the lack of one, may have left it otherwise on this rank."""
    x: Any = node.args[0]
    with module.graph.inserting_before(node):
        node.args = (emit(module, aten.contiguous.default, (x,), node), *node.args[1:])


def _replace(module: fx.GraphModule, node: fx.Node, replacement: Any, local: Local) -> None:
    graph = module.graph
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def proxies(value: Any) -> Any:
        proxy: Any = lambda n: fx.Proxy(n, tracer)  # noqa: E731
        return fx.map_arg(value, proxy)

    before = set(graph.nodes)
    with graph.inserting_before(node):
        made = replacement(local, *proxies(node.args), **proxies(dict(node.kwargs)))
    origin = {k: node.meta[k] for k in ("module", "source", "needs_grad") if k in node.meta}
    for new in graph.nodes:
        if new not in before:
            new.meta = dict(origin) | {"inside": node.name}
    if isinstance(made, (tuple, list)):
        for part in list(node.users):
            index: Any = part.args[1]
            _stand_for(graph, part, made[index].node)
        graph.erase_node(node)
    else:
        _stand_for(graph, node, made.node)


def _stand_for(graph: fx.Graph, node: fx.Node, made: fx.Node) -> None:
    """The new node in place of the old one, under its name."""
    node.replace_all_uses_with(made)
    made.meta = node.meta
    name = node.name
    graph.erase_node(node)
    made.name = name
