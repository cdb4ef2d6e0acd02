"""Reduces the kinds of nodes before planning, so that rules and passes have fewer cases.

    before    h = linear(x, w, b); s = slice(h, 1, 0, 9223372036854775807); c = to(s, float32)
    after     h_linear = linear(x, w); h = add(h_linear, b)

In order: makes autocast's casts explicit, decomposes composite ops, makes views and writes
functional, splits off biases, puts random draws in the order of indices, chains concatenations, and
recognises causal masks. Comments in `normalize` explain the order.

The pass also drops asserts, and casts and slices that change nothing. Asserts about sizes are
checked before each call (`Captured.assumes`); the others would gather their operands for no result.
A bias becomes an addition of its own: after a row-parallel product, the ranks must add it once, not
once per rank. Ops that create tensors "like" another take only its sizes, so that they need no
collective for it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.node import Argument, Target

from torchshard.core.errors import CaptureError
from torchshard.ir.editing import drop_dead_code, emit, name_after
from torchshard.ir.graph import bound_args, op_name, values, where
from torchshard.passes.causal import restore_causal
from torchshard.passes.chain import chain_cats
from torchshard.passes.decompose import decompose
from torchshard.passes.explicit_casts import explicit_casts
from torchshard.passes.functionalize import functionalize
from torchshard.passes.memory_order import by_index, from_memory, note_memory_orders, order_in_memory
from torchshard.passes.nodes import int_arg, named_as, node_arg, operator_of, read_sizes
from torchshard.rules.convolution import CONVOLUTIONS
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
    changed |= _replace(module, dict.fromkeys(_TRANSPOSED, _as_convolution))
    changed |= _replace(module, _VIEWS)
    changed |= _one_by_one(module)
    changed |= functionalize(module)
    changed |= decompose(module)  # again: in-place ops could not be decomposed before
    changed |= _replace(module, _REWRITES)
    changed |= note_memory_orders(module)
    changed |= _replace(module, dict.fromkeys((*BY_ELEMENT, *_DRAWS), by_index))
    changed |= _replace(module, dict.fromkeys(_DRAWS, _drawn_from_sizes))
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


Rewrite = Callable[[fx.GraphModule, fx.Node], fx.Node | None]
"""Builds a node's replacement before it; returns None to keep the node."""


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


_TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def _as_convolution(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """A transposed convolution that was not decomposed: its kernel depends on the batch size."""
    args = bound_args(node)
    x, weight = args["input"], args["weight"]
    if x.meta["val"].ndim < weight.meta["val"].ndim:
        return None  # an unbatched input
    sizes = args["stride"], args["padding"], args["dilation"], True, args["output_padding"], args["groups"]
    made = module.graph.call_function(aten.convolution.default, (x, weight, args["bias"], *sizes))
    made.meta = dict(node.meta)
    name_after(made, f"{node.name}_convolution")
    return made


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


def _as_slice(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """`narrow(x, 1, -3, 2)` of 8 columns is `slice(x, 1, 5, 7)`."""
    args = bound_args(node)
    x, dim, start, length = args["self"], args["dim"], args["start"], args["length"]
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    if start < 0:
        size = x.meta["val"].shape[dim]
        if not isinstance(size, int):
            return None
        start += size
    return named_as(node, emit(module, aten.slice.Tensor, (x, dim, start, start + length), node))


def _drop_asserts(module: fx.GraphModule) -> bool:
    asserts = [n for n in module.graph.nodes if n.target in _ASSERTS or op_name(n) == "_assert_scalar"]
    # TorchScript decompositions, which `torch.func` runs for some ops, read sizes that are known
    sizes = [n for n in module.graph.nodes if n.target is aten.size.default and not any(u.users for u in n.users)]
    for node in [*asserts, *(number for size in sizes for number in size.users), *sizes]:
        module.graph.erase_node(node)
    return bool(asserts or sizes)


def _if_same(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The operand of an op that changes neither its shape, dtype, device nor order of memory."""
    source = node_arg(node)
    a, b = source.meta["val"], node.meta["val"]
    if len(a.shape) != len(b.shape):
        return None
    if node.target in (aten.expand.default, aten.slice.Tensor):
        same = all(_equal(x, y) for x, y in zip(a.shape, b.shape, strict=True))
        return source if same and bound_args(node).get("step", 1) == 1 else None
    same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    same = same and order_in_memory(a) == order_in_memory(b)
    return source if same and not bound_args(node).get("copy") else None


def _equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    # dynamic sizes are compared as text: `==` would add a guard on the sizes of the example inputs
    return a == b if isinstance(a, int) and isinstance(b, int) else str(a) == str(b)


def _if_inactive(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The operand of a dropout in eval mode, or with p = 0: it draws no random numbers."""
    args = bound_args(node)
    return args["input"] if not args["train"] or args["p"] == 0 else None


def _split_bias(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """`linear(x, w, b)` is `add(linear(x, w), b)`; a convolution's bias is viewed as [n, 1, ...] to broadcast."""
    args = bound_args(node)
    bias = args.get("bias")
    if bias is None:
        return None
    product = emit(module, node.target, (*node.args[:2], None, *node.args[3:]), node, **node.kwargs)
    name_after(product, f"{node.name}_{op_name(node)}")
    if bias.meta["val"].dtype != product.meta["val"].dtype:  # autocast
        bias = emit(module, aten.to.dtype, (bias, product.meta["val"].dtype), node)
    if node.target is not aten.linear.default:
        space = len(args["weight"].meta["val"].shape) - 2
        bias = emit(module, aten.view.default, (bias, [-1] + [1] * space), node)
    return named_as(node, emit(module, aten.add.Tensor, (product, bias), node))


_PRODUCTS = {aten.addmm.default: ("mat1", "mat2", aten.mm.default),
             aten.baddbmm.default: ("batch1", "batch2", aten.bmm.default),
             aten.addbmm.default: ("batch1", "batch2", aten.bmm.default)}  # fmt: skip


def _split_addmm(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """`addmm(c, a, b)` is `add(mm(a, b), c)`, with `alpha` and `beta` as multiplications."""
    left, right, target = _PRODUCTS[operator_of(node)]
    args = bound_args(node)
    product = emit(module, target, (args[left], args[right]), node)
    name_after(product, f"{node.name}_{op_name(product)}")
    if node.target is aten.addbmm.default:
        product = emit(module, aten.sum.dim_IntList, (product, [0]), node)
    if args["alpha"] != 1:
        product = emit(module, aten.mul.Tensor, (product, args["alpha"]), node)
    if args["beta"] == 0:
        return named_as(node, product)  # without 0 * c: PyTorch ignores c here, even if it contains NaN
    added = args["self"]
    if args["beta"] != 1:
        added = emit(module, aten.mul.Tensor, (added, args["beta"]), node)
    return named_as(node, emit(module, aten.add.Tensor, (product, added), node))


def _from_sizes(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """`new_ones(x, [2, 3])` takes only the dtype and the device from x."""
    args, val = bound_args(node), node.meta["val"]
    target, fill = _NEW[operator_of(node)]
    extra = (args["fill_value"],) if fill else ()
    return named_as(node, emit(module, target, (args["size"], *extra), node, dtype=val.dtype, device=val.device))


def _drawn_from_sizes(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """`rand_like(x)` is `rand([2, 3])`: it draws the same count of numbers, and does not read x."""
    args, val, sizes = bound_args(node), node.meta["val"], read_sizes(module, node_arg(node), node)
    target, bound_names = _DRAWS[operator_of(node)]
    bounds = (args[name] if name else 0 for name in bound_names)
    return named_as(node, emit(module, target, (*bounds, sizes), node, dtype=val.dtype, device=val.device))


_DRAWS: dict[OpOverload[..., object], tuple[OpOverload[..., object], tuple[str, ...]]] = {
    aten.rand_like.default: (aten.rand.default, ()),
    aten.randn_like.default: (aten.randn.default, ()),
    aten.randint_like.default: (aten.randint.low, ("", "high")),
    aten.randint_like.low_dtype: (aten.randint.low, ("low", "high")),
}
"""Op -> (the op that draws from sizes, the arguments that bound its numbers; '' is zero)."""
_NEW: dict[OpOverload[..., object], tuple[OpOverload[..., object], bool]] = {
    aten.new_zeros.default: (aten.zeros.default, False),
    aten.new_ones.default: (aten.ones.default, False),
    aten.new_empty.default: (aten.empty.memory_format, False),
    aten.new_full.default: (aten.full.default, True),
}
"""Op -> (the op that creates the tensor from sizes, whether it takes a fill value)."""


def _as_product(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """`numel(x)` is the product of the global sizes; a rank would count only its slice's elements."""
    shape = node_arg(node).meta["val"].shape
    known = math.prod(size for size in shape if isinstance(size, int))
    dynamic = [d for d, size in enumerate(shape) if not isinstance(size, int)]
    read = [emit(module, aten.sym_size.int, (node_arg(node), d), node) for d in dynamic]
    product = functools.reduce(lambda a, b: emit(module, operator.mul, (a, b), node), read)
    return named_as(node, product if known == 1 else emit(module, operator.mul, (product, known), node))


def _if_buffer(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The buffer itself instead of its `detach`."""
    source = node_arg(node)
    return source if source.meta.get("kind") == "buffer" else None


def _as_expand(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """`broadcast_tensors(x, y)[0]` is x, expanded if it has another shape."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.broadcast_tensors.default:
        return None
    tensors = cast(Sequence[fx.Node], source.args[0])
    tensor, shape = tensors[int_arg(node, 1)], node.meta["val"].shape
    if tensor.meta["val"].shape == shape:
        return tensor
    sizes: list[Argument] = list(shape)
    for i, size in enumerate(shape):
        if not isinstance(size, int):
            sizes[i] = _dynamic_size(module, node, tensors, i - len(shape), size)
    return named_as(node, emit(module, aten.expand.default, (tensor, sizes), node))


def _dynamic_size(
    module: fx.GraphModule, node: fx.Node, tensors: Sequence[fx.Node], dim: int, size: torch.SymInt
) -> fx.Node:
    """A dynamic size, read from the first of the tensors that has it; `dim` is negative."""
    candidates = (t for t in tensors if len(t.meta["val"].shape) >= -dim)
    like = next(t for t in candidates if _equal(t.meta["val"].shape[dim], size))
    return emit(module, aten.sym_size.int, (like, dim), node)


_VIEWS: dict[Target, Rewrite] = {aten.narrow.default: _as_slice, operator.getitem: _as_expand}
"""Rewrites to views that functionalize can invert, which is why they run before it."""


def _without_empty(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """`cat([empty, x])` is x if `empty` has the shape (0,), which PyTorch skips whatever the shape of x."""
    tensors = cast(Sequence[fx.Node], node.args[0])
    kept = [t for t in tensors if not _is_empty(t)]
    if len(kept) == len(tensors) or not kept:
        return None
    return kept[0] if len(kept) == 1 else named_as(node, emit(module, aten.cat.default, (kept, *node.args[1:]), node))


def _is_empty(tensor: fx.Node) -> bool:
    shape = tensor.meta["val"].shape
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0


_REWRITES: dict[Target, Rewrite] = {
    **dict.fromkeys(
        (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.slice.Tensor, aten.expand.default,
         aten.alias.default, aten.lift_fresh_copy.default),
        _if_same,
    ),
    **dict.fromkeys(
        (aten.linear.default, *CONVOLUTIONS, aten.convolution.default),
        _split_bias,
    ),
    **dict.fromkeys(_PRODUCTS, _split_addmm),
    **dict.fromkeys(_NEW, _from_sizes),
    aten.cat.default: _without_empty,
    aten.dropout.default: _if_inactive,
    aten.detach.default: _if_buffer,
    aten.sym_numel.default: _as_product,
    aten.as_strided.default: from_memory,
}  # fmt: skip
