"""Reduces the kinds of nodes before planning, so that rules and passes have fewer cases.

    before    h = linear(x, w, b); s = slice(h, 1, 0, 9223372036854775807); c = to(s, float32)
    after     h_linear = linear(x, w); h = add(h_linear, b)

In order: makes autocast's casts explicit, decomposes composite ops, makes views and writes
functional, splits off biases, puts random draws in the order of indices, chains concatenations, and
recognises causal masks. Comments in `normalize` explain the order.

The pass also drops asserts, and casts and slices that change nothing. Asserts about sizes are
checked before each call (`Captured.assumes`); the others would gather their operands for no result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch._ops import OpOverloadPacket
from torch.fx.node import Target

from torchshard.core.errors import CaptureError
from torchshard.ir.editing import drop_dead_code, emit
from torchshard.ir.graph import bound_args, op_name, values, where
from torchshard.passes.causal import restore_causal
from torchshard.passes.chain import chain_cats
from torchshard.passes.decompose import decompose
from torchshard.passes.explicit_casts import explicit_casts
from torchshard.passes.functionalize import functionalize
from torchshard.passes.memory_order import by_index, note_memory_orders
from torchshard.passes.nodes import int_arg
from torchshard.passes.rewrites import DRAWS, REWRITES, TRANSPOSED, VIEWS, Rewrite, as_convolution, drawn_from_sizes
from torchshard.rules.random import BY_ELEMENT

aten = torch.ops.aten

_ASSERTS = {
    aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default, aten.sym_constrain_range.default,
}  # fmt: skip


def normalize(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed.

    Raises:
        CaptureError: an op returns lists within its results, or writes to an input, a parameter or a constant.
    """
    _check_results(module)
    changed = _drop_asserts(module)
    # Casts come first: autocast's treatment is known for the op that the model calls, not for its
    # parts.
    changed |= explicit_casts(module)
    changed |= decompose(module)
    changed |= _replace(module, dict.fromkeys(TRANSPOSED, as_convolution))
    changed |= _replace(module, VIEWS)
    changed |= _one_by_one(module)
    changed |= functionalize(module)
    changed |= decompose(module)  # again: in-place ops could not be decomposed before
    changed |= _replace(module, REWRITES)
    changed |= note_memory_orders(module)
    changed |= _replace(module, dict.fromkeys((*BY_ELEMENT, *DRAWS), by_index))
    changed |= _replace(module, dict.fromkeys(DRAWS, drawn_from_sizes))
    changed |= chain_cats(module)
    changed |= restore_causal(module)
    changed |= drop_dead_code(module)
    module.recompile()
    return changed


def _check_results(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function" and any(isinstance(v, (list, tuple)) for v in values(node)):
            raise CaptureError(
                f"{node.target} returns a list within its results",
                where=where(node),
                why="a layout is of one tensor, and such a list has as many as its values say",
                attempt="an op that returns its tensors one by one, or this one outside of the model",
            )


def _replace(module: fx.GraphModule, rewrites: Mapping[Target, Rewrite]) -> bool:
    changed = False
    for node in list(module.graph.nodes):
        rewrite = rewrites.get(node.target)
        if rewrite is None:
            continue
        with module.graph.inserting_before(node):
            replacement = rewrite(module, node)
        if replacement is not None:
            changed = True
            node.replace_all_uses_with(replacement)
            module.graph.erase_node(node)
    return changed


def _one_by_one(module: fx.GraphModule) -> bool:
    """`_foreach_mul_([a, b], [c, d])` is `mul_(a, c)` and `mul_(b, d)`."""
    packets = {n: getattr(aten, op_name(n).removeprefix("_foreach_"), None) for n in module.graph.nodes}
    found = {n: packet for n, packet in packets.items() if op_name(n).startswith("_foreach_") and packet is not None}
    for node, packet in found.items():
        with module.graph.inserting_before(node):
            made = [_on_one(module, node, packet, i) for i in range(len(bound_args(node)["self"]))]
        for user in list(node.users):
            user.replace_all_uses_with(made[int_arg(user, 1)])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    return bool(found)


def _on_one(module: fx.GraphModule, node: fx.Node, packet: OpOverloadPacket, i: int) -> fx.Node:
    """Applies a `_foreach_` op to the items at one index of its lists."""
    own = {name: v[i] if isinstance(v, (list, tuple)) else v for name, v in bound_args(node).items()}
    schemas = [getattr(packet, name)._schema for name in packet.overloads()]
    by_name = {a.name for schema in schemas for a in schema.arguments if a.kwarg_only}
    if "scalars" in own and "value" in by_name:  # `value` is the name in `addcmul`
        own["value"] = own.pop("scalars")
    named = {name: own.pop(name) for name in by_name & own.keys()}
    args, kwargs = fx.map_arg((tuple(own.values()), named), lambda n: n.meta["val"])
    # `_jit_resolve_packet`, `_qualified_op_name`: the overload that a packet's call runs (PyTorch 2.13.0).
    overload = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return emit(module, getattr(packet, overload), tuple(own.values()), node, **named)


def _drop_asserts(module: fx.GraphModule) -> bool:
    asserts = [n for n in module.graph.nodes if n.target in _ASSERTS or op_name(n) == "_assert_scalar"]
    # TorchScript decompositions, which `torch.func` runs for some ops, read sizes that are known
    sizes = [n for n in module.graph.nodes if n.target is aten.size.default and not any(u.users for u in n.users)]
    for node in [*asserts, *(number for size in sizes for number in size.users), *sizes]:
        module.graph.erase_node(node)
    return bool(asserts or sizes)
