"""Ops that PyTorch itself runs as other ops, and that have no rule, become those other ops.

    before    l = kl_div(x, t)
    after     l_mul = mul(t, x); l_xlogy = xlogy(t, t); l_sub = sub(l_xlogy, l_mul); l = mean(l_sub)

The numbers stay what they are: eager PyTorch takes the same steps. Ops with kernels of their own stay, but for a few
that only move elements or are one product or sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchshard.core.autocast import Autocast, autocasting
from torchshard.custom_ops.recurrent import RECURRENCES, states_of
from torchshard.ir.graph import drop_dead_code, fake_mode, fake_value, faking, name_after, op_name
from torchshard.passes.functionalize import functionalize
from torchshard.rules import has_rule, is_random

aten = torch.ops.aten


def decompose(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    waiting, changed = list(module.graph.nodes), False
    while waiting:
        node = waiting.pop()
        if _is_composite(node):
            made = inline_op(module, node)
            changed |= bool(made)
            waiting += made
    return changed


def _is_composite(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or has_rule(target):
        return False
    return target in _WRITTEN_OUT or (not target._schema.is_mutable and target._can_decompose())


_WRITTEN_OUT = get_decompositions([
    aten.alias_copy.default, aten.diagonal_copy.default, aten.expand_copy.default, aten.narrow_copy.default,
    aten.permute_copy.default, aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims,
    aten.t_copy.default, aten.transpose_copy.int, aten.unbind_copy.int, aten.unfold_copy.default,
    aten.unsqueeze_copy.default, aten.view_copy.default, aten.split_with_sizes_copy.default,
    aten.channel_shuffle.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.rot90.default,
    aten.addmv.default, aten.addr.default, aten.dist.default, aten.glu.default, aten.trace.default,
    aten._weight_norm_interface.default, aten._chunk_cat.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default, aten.block_diag.default, aten.multi_margin_loss.default,
    aten.native_group_norm.default, aten.renorm.default,
])  # fmt: skip
"""Those few, with PyTorch's own words for them."""


def _one_step(function: Any) -> Callable[..., Any]:
    """A recurrent cell, as the sums that it is of the input and of the hidden units."""

    def step(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        states = states_of(hx)
        made = RECURRENCES[function].cell(F.linear(x, w_ih, b_ih), F.linear(states[0], w_hh, b_hh), *states)
        return made if len(made) > 1 else made[0]

    return step


_WRITTEN_OUT |= {
    aten.lstm_cell.default: _one_step(torch.lstm),
    aten.gru_cell.default: _one_step(torch.gru),
}


def inline_op(module: fx.GraphModule, node: fx.Node, autocast: Autocast = ()) -> list[fx.Node]:
    """The nodes that now stand for an op; none where it stays, for it makes constants or does not say how.

    Args:
        autocast: the autocast that the op is called in; its casts are among the nodes.
    """
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    inputs = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))
    traced = _traced(module, node, leaves, spec, inputs, autocast)
    if traced is None or any(n.target is node.target or _is_foreign(n) for n in traced.nodes):
        return []
    known = dict(zip((n for n in traced.nodes if n.op == "placeholder"), inputs, strict=True))
    made = []
    with module.graph.inserting_before(node):
        for inner in traced.nodes:
            if inner.op == "call_function":
                new = known[inner] = module.graph.node_copy(inner, known.__getitem__)
                new.meta = {k: node.meta[k] for k in ("module", "source", "needs_grad") if k in node.meta}
                new.meta["val"] = (
                    inner.meta["val"]
                    if "val" in inner.meta
                    else fake_value(fake_mode(module), inner.target, new.args, new.kwargs)
                )
                name_after(new, f"{node.name}_{op_name(new)}")
                made.append(new)
    _give(module, node, fx.map_arg(traced.output_node().args[0], known.__getitem__))
    return made


_ARITHMETIC = {name for name in vars(operator).values() if callable(name)}


def _is_foreign(node: fx.Node) -> bool:
    """A constant, what is no op and no arithmetic of sizes, or an op that writes or draws random numbers."""
    target: Any = node.target
    if node.op != "call_function" or target in _ARITHMETIC:
        return node.op == "get_attr"
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or is_random(target)


def _traced(
    module: fx.GraphModule, node: fx.Node, leaves: list[Any], spec: Any, inputs: list[fx.Node], autocast: Autocast
) -> Any:
    target: Any = node.target
    steps = _WRITTEN_OUT.get(target, target.decompose)

    def body(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        held = (given[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
        args, kwargs = pytree.tree_unflatten(held, spec)
        return steps(*args, **kwargs)

    mode = fake_mode(module)
    try:
        # With gradients: some ops take another way where one is wanted. Without guards: a way that is taken because of
        # a dynamic size is not the way of all sizes.
        with faking(mode), torch.enable_grad(), _no_guards(mode), autocasting(autocast):
            traced = make_fx(body)(*(_wanting_grad(n.meta["val"]) for n in inputs))
        functionalize(traced)
        drop_dead_code(traced)
        return traced.graph
    except Exception:  # it decides by values, or by a dynamic size: the op stays
        return None


def _no_guards(mode: Any) -> Any:
    sizes = getattr(mode, "shape_env", None)
    return sizes.error_on_new_guards() if sizes is not None else nullcontext()


def _wanting_grad(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if floating else value


def _give(module: fx.GraphModule, node: fx.Node, result: Any) -> None:
    """What used the op uses what it became; the last of it takes over the name."""
    if isinstance(result, (tuple, list)):
        for user in list(node.users):
            index: Any = user.args[1]
            user.replace_all_uses_with(result[index])
            module.graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    name = node.name
    module.graph.erase_node(node)
    if isinstance(result, fx.Node) and result.name.startswith(f"{name}_"):
        result.name = name
