"""Rewrites of single ops, as tables for `normalize`: op -> the function that builds its replacement.

A bias becomes an addition of its own: after a row-parallel product, the ranks must add it once, not
once per rank. Ops that create tensors "like" another take only its sizes, so that they need no
collective for it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument, Target

from torchshard.ir.editing import emit, name_after
from torchshard.ir.graph import bound_args, op_name
from torchshard.passes.memory_order import from_memory, order_in_memory
from torchshard.passes.nodes import int_arg, named_as, node_arg, operator_of, read_sizes
from torchshard.rules.convolution import CONVOLUTIONS

aten = torch.ops.aten

Rewrite = Callable[[fx.GraphModule, fx.Node], fx.Node | None]
"""Builds a node's replacement before it; returns None to keep the node."""
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def as_convolution(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
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


def drawn_from_sizes(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """`rand_like(x)` is `rand([2, 3])`: it draws the same count of numbers, and does not read x."""
    args, val, sizes = bound_args(node), node.meta["val"], read_sizes(module, node_arg(node), node)
    target, bound_names = DRAWS[operator_of(node)]
    bounds = (args[name] if name else 0 for name in bound_names)
    return named_as(node, emit(module, target, (*bounds, sizes), node, dtype=val.dtype, device=val.device))


DRAWS: dict[OpOverload[..., object], tuple[OpOverload[..., object], tuple[str, ...]]] = {
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


VIEWS: dict[Target, Rewrite] = {aten.narrow.default: _as_slice, operator.getitem: _as_expand}
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


REWRITES: dict[Target, Rewrite] = {
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
