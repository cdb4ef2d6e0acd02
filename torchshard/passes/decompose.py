"""Decomposes ops without a rule that PyTorch itself runs as other ops.

    before    l = kl_div(x, t)
    after     l_mul = mul(t, x); l_xlogy = xlogy(t, t); l_sub = sub(l_xlogy, l_mul); l = mean(l_sub)

The numbers stay bit-equal, because eager PyTorch takes the same steps. An op with a kernel of its own stays whole,
except for a few that only move elements or are one product or sum (`DECOMPOSITIONS`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

# `torch.export` offers its whole table only, and this pass needs single entries (PyTorch 2.13.0).
from torch._decomp import get_decompositions

# The type of the keys of `get_decompositions` (PyTorch 2.13.0).
from torch._ops import OperatorBase, OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument

from torchshard.core.autocast import Autocast, autocasting
from torchshard.custom_ops.recurrent import RECURRENCES, states_of
from torchshard.ir.editing import drop_dead_code, name_after
from torchshard.ir.fake_values import fake_value, faking
from torchshard.ir.graph import ORIGIN, fake_mode, is_float, op_name
from torchshard.passes.functionalize import functionalize
from torchshard.passes.nodes import int_arg
from torchshard.rules import has_rule, is_random

aten = torch.ops.aten


def decompose(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    pending, changed = list(module.graph.nodes), False
    while pending:
        node = pending.pop()
        if _is_composite(node):
            parts = inline_op(module, node)
            changed |= bool(parts)
            pending += parts  # a part may be composite in turn
    return changed


def _is_composite(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or has_rule(target):
        return False
    # `_can_decompose`: no public question for a composite op (PyTorch 2.13.0).
    return target in DECOMPOSITIONS or (not target._schema.is_mutable and target._can_decompose())


DECOMPOSITIONS: dict[OperatorBase, Callable[..., object]] = get_decompositions([
    aten.alias_copy.default, aten.as_strided_copy.default, aten.diagonal_copy.default, aten.expand_copy.default,
    aten.narrow_copy.default, aten.permute_copy.default, aten.squeeze_copy.default, aten.squeeze_copy.dim,
    aten.squeeze_copy.dims, aten.t_copy.default, aten.transpose_copy.int, aten.unbind_copy.int,
    aten.unfold_copy.default, aten.unsqueeze_copy.default, aten.view_copy.default, aten.split_with_sizes_copy.default,
    aten.channel_shuffle.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.rot90.default,
    aten.addmv.default, aten.addr.default, aten.dist.default, aten.glu.default, aten.trace.default,
    aten._weight_norm_interface.default, aten._chunk_cat.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default, aten.block_diag.default, aten.multi_margin_loss.default,
    aten.native_group_norm.default, aten.renorm.default,
])  # fmt: skip
"""Ops that are decomposed although they have their own kernels -> PyTorch's decompositions."""


def _cell_step(function: Callable[..., object]) -> Callable[..., object]:
    """A recurrent cell as two linear layers and the activations of one step.

    PyTorch lacks a decomposition of these cells.
    """

    def step(
        x: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        states = states_of(hx)
        new_states = RECURRENCES[function].cell(F.linear(x, w_ih, b_ih), F.linear(states[0], w_hh, b_hh), *states)
        return new_states if len(new_states) > 1 else new_states[0]

    return step


def _with_small_rows(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """The weight after `embedding(max_norm=)`: scales longer rows that are used down to `max_norm`."""
    used = weight.new_zeros(weight.shape[0], dtype=torch.bool).index_fill(0, indices.reshape(-1), True)
    norm = torch.linalg.vector_norm(weight, norm_type, 1, keepdim=True)
    scale = (max_norm / (norm.double() + 1e-7)).to(weight.dtype)  # the numbers of PyTorch's kernel
    return torch.where(used.unsqueeze(1) & (norm > max_norm), weight * scale, weight)


def _multilabel_margin_loss(x: Tensor, labels: Tensor, reduction: int = 1) -> Tensor:
    """The multilabel margin loss as PyTorch's kernel computes it.

    PyTorch's own decomposition counts the entries after a row's labels as class 0.
    """
    scores, given = torch.atleast_2d(x), torch.atleast_2d(labels)
    classes = torch.arange(scores.shape[1], device=x.device)
    ends = torch.where(given == -1, classes, scores.shape[1]).amin(1, keepdim=True)
    is_given = classes < ends
    index = torch.where(is_given, given, 0)
    is_label = ((index.unsqueeze(2) == classes) & is_given.unsqueeze(2)).any(1)
    margins = (1 - scores.gather(1, index).unsqueeze(2) + scores.unsqueeze(1)).clamp_min(0)
    counted = is_given.unsqueeze(2) & ~is_label.unsqueeze(1)
    losses = torch.where(counted, margins, 0).sum((1, 2)) / scores.shape[1]
    if reduction == 0:
        return losses.reshape(x.shape[:-1])
    return losses.mean() if reduction == 1 else losses.sum()


DECOMPOSITIONS |= {
    aten.embedding_renorm.default: _with_small_rows,
    aten.lstm_cell.default: _cell_step(torch.lstm),
    aten.gru_cell.default: _cell_step(torch.gru),
    aten.multilabel_margin_loss.default: _multilabel_margin_loss,
}


def inline_op(module: fx.GraphModule, node: fx.Node, autocast: Autocast = ()) -> list[fx.Node]:
    """Replaces an op with the ops that PyTorch runs for it, and returns them.

    Returns an empty list, and leaves the op, if it creates constants or can't be traced.

    Args:
        autocast: the autocast that the op is called in; its casts are among the nodes.
    """
    traced = _trace(module, node, autocast)
    if traced is None or any(n.target is node.target or _is_foreign(n) for n in traced.nodes):
        return []
    placeholders = (n for n in traced.nodes if n.op == "placeholder")
    copies = dict(zip(placeholders, node.all_input_nodes, strict=True))
    parts = []
    with module.graph.inserting_before(node):
        for inner in traced.nodes:
            if inner.op == "call_function":
                copies[inner] = _copy_part(module, node, inner, copies)
                parts.append(copies[inner])
    _replace_by_result(module, node, fx.map_arg(traced.output_node().args[0], copies.__getitem__))
    return parts


def _copy_part(module: fx.GraphModule, node: fx.Node, inner: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copies a node of an op's traced graph into the graph of the op, with the op's origin."""
    part = module.graph.node_copy(inner, copies.__getitem__)
    part.meta = {k: node.meta[k] for k in ORIGIN if k in node.meta}
    if "val" in inner.meta:
        part.meta["val"] = inner.meta["val"]
    else:  # sizes are computed by nodes that make_fx gives no value
        part.meta["val"] = fake_value(fake_mode(module.graph), inner.target, part.args, part.kwargs)
    name_after(part, f"{node.name}_{op_name(part)}")
    return part


_ARITHMETIC = {function for function in vars(operator).values() if callable(function)}


def _is_foreign(node: fx.Node) -> bool:
    """Whether a node in an op's traced graph prevents its decomposition.

    Constants do, and targets that are neither an op nor arithmetic on sizes, writes, and random
    draws.
    """
    target = node.target
    if node.op != "call_function" or target in _ARITHMETIC:
        return node.op == "get_attr"
    return not isinstance(target, OpOverload) or target._schema.is_mutable or is_random(target)


def _trace(module: fx.GraphModule, node: fx.Node, autocast: Autocast) -> fx.Graph | None:
    """Traces an op: a graph of the ops that PyTorch runs, with one placeholder per input, or None."""
    target = node.target
    assert isinstance(target, OpOverload)
    steps = DECOMPOSITIONS.get(target, target.decompose)
    inputs = node.all_input_nodes

    def body(*values: Argument) -> object:
        args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(inputs, values, strict=True)).__getitem__)
        return steps(*args, **kwargs)

    mode = fake_mode(module.graph)
    try:
        # With gradients, because some ops take another path if one is required. Without new guards,
        # because a path that depends on a dynamic size would be right only for the example's size.
        with faking(mode), torch.enable_grad(), _refusing_guards(mode), autocasting(autocast):
            traced = make_fx(body)(*(_as_leaf(n.meta["val"]) for n in inputs))
        functionalize(traced)
        drop_dead_code(traced)
        return traced.graph
    except Exception:  # its path depends on values, or on a dynamic size: the op stays
        return None


def _refusing_guards(mode: object) -> AbstractContextManager[object]:
    sizes = getattr(mode, "shape_env", None)
    return sizes.error_on_new_guards() if sizes is not None else nullcontext()


def _as_leaf(value: Argument) -> Argument:
    """A floating value as one that requires a gradient."""
    return value.detach().requires_grad_() if is_float(value) else value


def _replace_by_result(module: fx.GraphModule, node: fx.Node, result: Argument) -> None:
    """Redirects the consumers of an op to the results of its parts; the last part takes its name."""
    if isinstance(result, (tuple, list)):
        for user in list(node.users):
            user.replace_all_uses_with(cast(fx.Node, result[int_arg(user, 1)]))
            module.graph.erase_node(user)
    else:
        node.replace_all_uses_with(cast(fx.Node, result))
    name = node.name
    module.graph.erase_node(node)
    # a decomposition may return its input, which keeps its name
    if isinstance(result, fx.Node) and result.name.startswith(f"{name}_"):
        result.name = name
