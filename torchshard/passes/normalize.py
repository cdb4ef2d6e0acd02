"""Fewer kinds of nodes, before anything is planned.

    before    h = linear(x, w, b); s = slice(h, 1, 0, 9223372036854775807); c = to(s, float32)
    after     h_linear = linear(x, w); h = add(h_linear, b)

Asserts are dropped, so are casts and slices that change nothing; a bias becomes an addition of its own, for it must
be added once, not once per rank; tensors made "like" another are made from sizes alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from torchshard.core.errors import CaptureError
from torchshard.ir.graph import bound_args, drop_dead_code, emit, hint, name_after, op_name, values, where
from torchshard.passes.causal import restore_causal
from torchshard.passes.chain import chain_cats
from torchshard.passes.decompose import decompose
from torchshard.passes.explicit_casts import explicit_casts
from torchshard.passes.functionalize import functionalize
from torchshard.rules.random import BY_ELEMENT

aten = torch.ops.aten

_ASSERTS = {
    aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default, aten.sym_constrain_range.default,
}  # fmt: skip


def normalize(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed.

    Raises:
        CaptureError: an op gives lists within its results, or writes to what it may not.
    """
    _check_results(module)
    changed = _drop_asserts(module)
    changed |= explicit_casts(module)
    changed |= decompose(module)
    changed |= _replace(module, _VIEWS)
    changed |= functionalize(module)
    changed |= decompose(module)  # what was written in place is an op of its own now
    changed |= _replace(module, _REWRITES)
    changed |= _replace(module, dict.fromkeys((*BY_ELEMENT, *_DRAWS), _by_index))
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
                f"{node.target} gives a list within its results",
                where=where(node),
                why="a layout is of one tensor, and such a list has as many as its values say",
                attempt="an op that gives its tensors one by one, or this one outside of the model",
            )


Rewrite = Callable[[fx.GraphModule, fx.Node], fx.Node | None]
"""What stands for a node, built before it; None where it stays."""


def _replace(module: fx.GraphModule, rewrites: Mapping[Any, Rewrite]) -> bool:
    changed = False
    for node in list(module.graph.nodes):
        rewrite = rewrites.get(node.target)
        if rewrite is None:
            continue
        with module.graph.inserting_before(node):
            replaced = rewrite(module, node)
        if replaced is not None:
            changed = True
            node.replace_all_uses_with(replaced)
            module.graph.erase_node(node)
    return changed


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
    return _named(node, emit(module, aten.slice.Tensor, (x, dim, start, start + length), node))


def _drop_asserts(module: fx.GraphModule) -> bool:
    gone = [n for n in module.graph.nodes if n.target in _ASSERTS or op_name(n) == "_assert_scalar"]
    for node in gone:
        module.graph.erase_node(node)
    return bool(gone)


def _named(node: fx.Node, made: fx.Node) -> fx.Node:
    """The new node takes over the old one's name."""
    name = node.name
    node.name = f"{name}_old"
    made.name = name
    made.meta.update({k: v for k, v in node.meta.items() if k not in made.meta})
    return made


def _if_same(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """An op that gives its operand again: same shape, dtype and device."""
    source: Any = node.args[0]
    a, b = source.meta["val"], node.meta["val"]
    if node.target in (aten.expand.default, aten.slice.Tensor) and len(a.shape) == len(b.shape):
        same = all(_equal(x, y) for x, y in zip(a.shape, b.shape, strict=True))
        return source if same and bound_args(node).get("step", 1) == 1 else None
    same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    same = same and _memory_order(a) == _memory_order(b)
    return source if same and not bound_args(node).get("copy") else None


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) if isinstance(a, int) and isinstance(b, int) else str(a) == str(b)


def _if_inactive(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Dropout in eval mode, or of nothing, draws no random numbers: it is its operand."""
    args = bound_args(node)
    return args["input"] if not args["train"] or args["p"] == 0 else None


def _split_bias(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
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
    return _named(node, emit(module, aten.add.Tensor, (product, bias), node))


_PRODUCTS = {aten.addmm.default: ("mat1", "mat2", aten.mm.default),
             aten.baddbmm.default: ("batch1", "batch2", aten.bmm.default),
             aten.addbmm.default: ("batch1", "batch2", aten.bmm.default)}  # fmt: skip


def _split_addmm(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    left, right, target = _PRODUCTS[cast(Any, node.target)]
    args = bound_args(node)
    product = emit(module, target, (args[left], args[right]), node)
    name_after(product, f"{node.name}_{op_name(product)}")
    if node.target is aten.addbmm.default:
        product = emit(module, aten.sum.dim_IntList, (product, [0]), node)
    if args["alpha"] != 1:
        product = emit(module, aten.mul.Tensor, (product, args["alpha"]), node)
    if args["beta"] == 0:
        return _named(node, product)  # what is added may be anything then, not a number too
    added = args["self"]
    if args["beta"] != 1:
        added = emit(module, aten.mul.Tensor, (added, args["beta"]), node)
    return _named(node, emit(module, aten.add.Tensor, (product, added), node))


def _from_sizes(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """`new_ones(x, [2, 3])` needs nothing of x but dtype and device."""
    args, val = bound_args(node), node.meta["val"]
    target, fill = _NEW[cast(Any, node.target)]
    extra = (args["fill_value"],) if fill else ()
    return _named(node, emit(module, target, (args["size"], *extra), node, dtype=val.dtype, device=val.device))


def _drawn_from_sizes(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """`rand_like(x)` is `rand([2, 3])`: it draws as many numbers, and needs nothing of x."""
    args, val = bound_args(node), node.meta["val"]
    x: Any = node.args[0]
    sizes = [
        s if isinstance(s, int) else emit(module, aten.sym_size.int, (x, i), node) for i, s in enumerate(val.shape)
    ]
    target, bounds = _DRAWS[cast(Any, node.target)]
    said = (args[name] if name else 0 for name in bounds)
    return _named(node, emit(module, target, (*said, sizes), node, dtype=val.dtype, device=val.device))


_DRAWS = {
    aten.rand_like.default: (aten.rand.default, ()),
    aten.randn_like.default: (aten.randn.default, ()),
    aten.randint_like.default: (aten.randint.low, ("", "high")),
    aten.randint_like.low_dtype: (aten.randint.low, ("low", "high")),
}
_NEW = {
    aten.new_zeros.default: (aten.zeros.default, False),
    aten.new_ones.default: (aten.ones.default, False),
    aten.new_empty.default: (aten.empty.memory_format, False),
    aten.new_full.default: (aten.full.default, True),
}


def _by_index(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Numbers are drawn in the order of memory: of what lies transposed, they are drawn before it is transposed."""
    x: Any = node.args[0]
    order = _memory_order(node.meta["val"])
    kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
    if order == list(range(len(order))) and kwargs == dict(node.kwargs):
        return None
    straight = emit(module, aten.permute.default, (x, order), node)
    drawn = emit(module, node.target, (straight, *node.args[1:]), node, **kwargs)
    return _named(node, emit(module, aten.permute.default, (drawn, [order.index(d) for d in range(len(order))]), node))


def _memory_order(value: Any) -> list[int]:
    """The dims from the outermost in memory to the innermost, as a new tensor like this one has them."""
    with getattr(value, "fake_mode", nullcontext()):
        strides = [hint(stride) for stride in torch.empty_like(value).stride()]
    moving = [d for d in range(value.ndim) if hint(value.shape[d]) != 1]
    ordered = iter(sorted(moving, key=lambda d: -strides[d]))
    return [next(ordered) if d in moving else d for d in range(value.ndim)]


def _if_buffer(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """What is detached of a buffer is the buffer."""
    source: Any = node.args[0]
    return source if source.meta.get("kind") == "buffer" else None


def _as_expand(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """`broadcast_tensors(x, y)[0]` is x where x has that shape already, else x expanded."""
    source: Any = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.broadcast_tensors.default:
        return None
    tensors: Any = source.args[0]
    index: Any = node.args[1]
    held, shape = tensors[index], node.meta["val"].shape
    if held.meta["val"].shape == shape:
        return cast(fx.Node, held)
    sizes = [
        size if isinstance(size, int) else _size_as(module, node, tensors, i - len(shape), size)
        for i, size in enumerate(shape)
    ]
    return _named(node, emit(module, aten.expand.default, (held, sizes), node))


def _size_as(module: fx.GraphModule, node: fx.Node, tensors: Sequence[fx.Node], dim: int, size: Any) -> fx.Node:
    """A dynamic size, as that of one of some tensors; the dim counts from the last."""
    wide = (t for t in tensors if len(t.meta["val"].shape) >= -dim)
    like = next(t for t in wide if _equal(t.meta["val"].shape[dim], size))
    return emit(module, aten.sym_size.int, (like, dim), node)


_VIEWS: dict[Any, Rewrite] = {aten.narrow.default: _as_slice, operator.getitem: _as_expand}
"""Before the graph is made functional: views in the words in which writes through them are traced back."""


def _without_empty(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """`cat([empty, x])`, where `empty` has the one shape (0,) that PyTorch skips, is x."""
    tensors: Any = node.args[0]
    kept = [t for t in tensors if not _is_empty(t)]
    if len(kept) == len(tensors) or not kept:
        return None
    return kept[0] if len(kept) == 1 else _named(node, emit(module, aten.cat.default, (kept, *node.args[1:]), node))


def _is_empty(tensor: fx.Node) -> bool:
    shape = tensor.meta["val"].shape
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0


_REWRITES: dict[Any, Rewrite] = {
    **dict.fromkeys(
        (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.slice.Tensor, aten.expand.default,
         aten.alias.default, aten.lift_fresh_copy.default),
        _if_same,
    ),
    **dict.fromkeys(
        (aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
         aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, aten.convolution.default),
        _split_bias,
    ),
    **dict.fromkeys(_PRODUCTS, _split_addmm),
    **dict.fromkeys(_NEW, _from_sizes),
    aten.cat.default: _without_empty,
    aten.dropout.default: _if_inactive,
    aten.detach.default: _if_buffer,
}  # fmt: skip
