"""Replaces global sizes with this rank's. Earlier passes know no rank; the localized graph runs.

    before    view = view(q, [2, 8, 2, 4])        f32[2,8,2,4]  S(2)
    after     view = reshape(q, [2, 8, 1, 4])     f32[2,8,1,4]  S(2)

If splitting a factor changes the op's computation, the rule's replacement replaces the op, and its
last node takes the op's name. Collectives get the name of the group. Numbers that are sizes stay
global: they are sizes of inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from torchshard.core.choices import replacement_on
from torchshard.core.layouts import I, Layout, Shard, is_whole, local_shape
from torchshard.core.mesh import Coordinate
from torchshard.core.rows import LocalFn
from torchshard.custom_ops.whole import WholeCall
from torchshard.ir.editing import drop_dead_code, emit, record_local
from torchshard.ir.effects import reads_memory
from torchshard.ir.fake_values import plain_shape
from torchshard.ir.graph import ORIGIN, fake_mode, is_own_collective, is_tensor, multiples_of, values
from torchshard.ops import OPS
from torchshard.passes.nodes import int_arg, node_arg, replace_node
from torchshard.passes.propagate import Seen, propagate
from torchshard.rules.random import BY_ELEMENT

aten = torch.ops.aten


def localize(module: fx.GraphModule, coordinate: Coordinate, seen: Seen | None = None) -> bool:
    """Rewrites the graph for one rank; returns whether anything changed.

    Args:
        seen: cached results of ops on fake values; results from this graph are added.
    """
    module.meta["group"] = coordinate.group
    _localize_values(module, coordinate)
    for node in list(module.graph.nodes):
        if isinstance(node.target, WholeCall):
            node.target = node.target.with_own_modules()
        if is_own_collective(node):
            node.args = (*node.args[:-1], coordinate.group)
            continue
        replacement = replacement_on(coordinate, node.meta.get("row"), node.meta.get("choice"))
        if replacement is not None:
            _replace(module, node, replacement)
        elif node.target in BY_ELEMENT or reads_memory(node):
            _keep_memory_orders(module, node)
        elif node.target is aten.view.default:
            # a collective may have changed its operand's order of memory, in which `view` may be
            # impossible
            node.target = aten.reshape.default
    for node in module.graph.nodes:
        if "at_experts" in node.meta:
            del node.meta["val"]  # its number of rows differs from its layout's
    drop_dead_code(module)
    propagate(module, Seen() if seen is None else seen)
    return True


def _localize_values(module: fx.GraphModule, coordinate: Coordinate) -> None:
    """Replaces meta['val'] with fake tensors of this rank's shapes.

    Values of equal shape, dtype and device share one.
    """
    mode, local_values = fake_mode(module.graph), dict[str, Tensor]()
    _assume_multiples(module, coordinate.axis.size)
    _keep_sizes(module, coordinate.axis.size)

    def localized(value: object, layout: Layout) -> object:
        if not isinstance(value, Tensor):
            return value
        shape = local_shape(plain_shape(value), layout, coordinate.rank, coordinate.axis.size)
        key = repr((shape, value.dtype, value.device))
        if key not in local_values:
            # sharing saves most of the time of this pass: a fake tensor takes longer to make than to look up
            with mode:
                local_values[key] = torch.empty(shape, dtype=value.dtype, device=value.device)
        return local_values[key]

    for node in module.graph.nodes:
        if node.op not in ("placeholder", "call_function"):
            continue
        results = values(node)
        node.meta["global_shapes"] = tuple(plain_shape(v) if isinstance(v, Tensor) else None for v in results)
        layouts: tuple[Layout, ...] = node.meta.get("layouts", ())
        local = [localized(value, layout) for value, layout in zip(results, layouts, strict=False)]
        if local:
            val = node.meta["val"]
            node.meta["val"] = type(val)(local) if isinstance(val, (list, tuple)) else local[0]


def _assume_multiples(module: fx.GraphModule, ranks: int) -> None:
    """Makes PyTorch's symbolic sizes multiples of the number of ranks, which each call checks."""
    multiples, sizes = multiples_of(module.graph), getattr(fake_mode(module.graph), "shape_env", None)
    if not multiples or sizes is None:
        return
    from torch._dynamo.source import ConstantSource  # importing it takes seconds; the capture has imported it already

    for symbol in sorted(multiples, key=str):
        known = sizes.replace(symbol)
        if known.is_Symbol:
            # PyTorch can't simplify ranks * (size // ranks) to size; with size = ranks * part it
            # can
            source, hint = ConstantSource(f"part of {known}"), int(sizes.backed_var_to_val[known])
            part = sizes.create_symbol(hint // ranks, source, DimDynamic.DYNAMIC)
            # `_set_replacement`: no public way to replace a size with an expression (PyTorch 2.13.0).
            sizes._set_replacement(known, ranks * part, "it is a multiple of the number of ranks")


def _keep_sizes(module: fx.GraphModule, ranks: int) -> None:
    """Multiplies sizes read from split values by the number of ranks: readers mean global sizes."""
    for source in list(module.graph.nodes):
        (layout, *_) = source.meta.get("layouts") or (I,)
        for node in list(source.users):
            if isinstance(layout, Shard) and node.target is aten.sym_size.int and node.args[1] == layout.dim:
                with module.graph.inserting_after(node):
                    whole = module.graph.call_function(operator.mul, (node, ranks))
                for user in [user for user in node.users if user is not whole]:
                    user.replace_input_with(node, whole)
                whole.meta = dict(node.meta)
                node.meta["val"] = node.meta["val"] // ranks


def _keep_memory_orders(module: fx.GraphModule, node: fx.Node) -> None:
    """Makes an op's operands have the memory order that they have in the unsharded model.

    Random numbers are drawn in the order of memory, which inserting or omitting a collective
    changes.
    """
    orders = node.meta.get("memory_orders", {})
    for i, operand in enumerate(node.all_input_nodes):
        if not is_tensor(operand) or operand.meta["val"].layout != torch.strided:
            continue
        if i in orders or not _is_by_index(operand):
            with module.graph.inserting_before(node):
                node.replace_input_with(operand, _in_order(module, operand, orders.get(i), node))


def _is_by_index(operand: fx.Node) -> bool:
    """Whether the memory order of a rank's value is its index order, as for slices and received data.

    A collective that sends no data passes its operand on.
    """
    while operand.target in OPS and OPS[operand.target].kernel == "none":
        operand = node_arg(operand)
    is_weight = operand.op == "placeholder" and operand.meta["kind"] == "parameter"
    return is_weight or operand.target in OPS or operand.meta["val"].ndim < 2


def _in_order(module: fx.GraphModule, operand: fx.Node, order: Sequence[int] | None, user: fx.Node) -> fx.Node:
    """The operand in a memory order of its dims; a split operand in the order of its indices."""
    if order is None or not is_whole(operand.meta["layouts"][0]):
        return _like(operand, emit(module, aten.contiguous.default, (operand,), user))
    permuted = emit(module, aten.permute.default, (operand, list(order)), user)
    permuted.meta |= {"layouts": operand.meta["layouts"], "global_shapes": (plain_shape(permuted.meta["val"]),)}
    laid_out = _like(permuted, emit(module, aten.contiguous.default, (permuted,), user))
    inverse = [order.index(dim) for dim in range(len(order))]
    return _like(operand, emit(module, aten.permute.default, (laid_out, inverse), user))


def _like(operand: fx.Node, made: fx.Node) -> fx.Node:
    """Copies a value's metadata to a node of the same value in another memory order."""
    made.meta |= {key: operand.meta[key] for key in ("layouts", "earlier", "global_shapes") if key in operand.meta}
    return made


def _replace(module: fx.GraphModule, node: fx.Node, replacement: LocalFn) -> None:
    """Traces a rule's replacement into the graph instead of the op."""
    graph, before = module.graph, node.prev
    with graph.inserting_before(node):
        result = record_local(graph, node, replacement, node.args, node.kwargs)
    origin = {k: node.meta[k] for k in ORIGIN if k in node.meta}
    node.meta["in_place_of"] = node.target
    while (before := before.next) is not node:
        before.meta = dict(origin) | {"inside": node.name, "in_place_of": node.target}
    if isinstance(result, (tuple, list)):
        for part in list(node.users):
            _replace_with_meta(part, result[int_arg(part, 1)].node)
        graph.erase_node(node)
    else:
        _replace_with_meta(node, result.node)


def _replace_with_meta(node: fx.Node, replacement: fx.Node) -> None:
    replacement.meta = node.meta
    replace_node(node, replacement)
