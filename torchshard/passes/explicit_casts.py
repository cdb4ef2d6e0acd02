"""Makes autocast's casts explicit, so that the graph runs the same inside and outside of autocast.

    before    h = linear(x, w)                                            called in autocast to bfloat16
    after     x_to = to(x, bfloat16); w_to = to(w, bfloat16); h = linear(x_to, w_to)

The module keeps no list of the ops that autocast casts, because PyTorch's list changes. It runs
each op on fake values with and without autocast, and compares the kernels that run below. A
parameter is cast once for all its consumers, as autocast's own cache does.

Export in PyTorch 2.13 keeps autocast as a region of the graph, whose casts are made as it runs.
This pass could go if export recorded the casts as nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.core.autocast import Autocast, autocasting
from torchshard.core.errors import CaptureError
from torchshard.ir.editing import emit
from torchshard.ir.fake_values import Mode, faking
from torchshard.ir.graph import fake_mode, where
from torchshard.passes.decompose import inline_op
from torchshard.passes.nodes import call_target

aten = torch.ops.aten

Casts = Mapping[fx.Node, torch.dtype]
"""Operand of an op -> the dtype that autocast casts it to."""
SharedCasts = dict[tuple[fx.Node, torch.dtype], fx.Node]
"""(placeholder, dtype) -> the one node that casts it."""


class KernelCall(NamedTuple):
    """A call of an op that has a kernel, below autocast."""

    op: OpOverload[..., object]
    args: Sequence[Argument]
    kwargs: Mapping[str, Argument]


def explicit_casts(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed.

    Raises:
        CaptureError: autocast changes an op in a way other than by casting operands, and the op can't be traced.
    """
    shared: SharedCasts = {}
    changed = False
    for node in list(module.graph.nodes):
        autocast = node.meta.pop("autocast", ())
        if not autocast or not isinstance(node.target, OpOverload):
            continue
        casts = _casts(module, node, autocast)
        changed |= casts is None or bool(casts)
        if casts is None:
            _inline(module, node, autocast)
        else:
            _insert(module, node, casts, shared)
    return changed


def _insert(module: fx.GraphModule, node: fx.Node, casts: Casts, shared: SharedCasts) -> None:
    def cast_of(operand: fx.Node) -> fx.Node:
        if operand not in casts:
            return operand
        key = operand, casts[operand]
        cast_node = shared.get(key) or emit(module, aten.to.dtype, key, node)
        if operand.op == "placeholder":
            shared[key] = cast_node
        return cast_node

    with module.graph.inserting_before(node):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), cast_of)


def _inline(module: fx.GraphModule, node: fx.Node, autocast: Autocast) -> None:
    place = where(node)  # before inlining, which erases the node
    if not inline_op(module, node, autocast):
        raise CaptureError(
            f"autocast changes {node.target} in a way that a graph can't say",
            where=place,
            why="it is neither a cast of its operands, nor is the op made of others for which it would be one",
            attempt="torch.autocast(..., enabled=False) around this op, and explicit casts of its operands",
        )


def _casts(module: fx.GraphModule, node: fx.Node, autocast: Autocast) -> Casts | None:
    """The operands that autocast casts before an op; None if its effect is not a set of casts."""
    mode, values = fake_mode(module.graph), {n: n.meta["val"] for n in node.all_input_nodes}
    calls = _kernel_calls(mode, node, values, autocast)
    if _calls_without_autocast(mode, node, values) == _described(calls):
        return {}
    # The op itself may begin with casts, so the longest prefix of casts is not always autocast's;
    # try the shorter ones too.
    for count in range(_leading_casts(calls, values), 0, -1):
        casts = _operand_casts(calls[:count], values)
        with faking(mode):
            cast_values = values | {n: values[n].to(dtype) for n, dtype in casts.items()}
        if _calls_without_autocast(mode, node, cast_values) == _described(calls[count:]):
            return casts
    return None


def _operand_casts(calls: Sequence[KernelCall], values: Mapping[fx.Node, Argument]) -> Casts:
    casts = {}
    for call in calls:
        for operand, value in values.items():
            if value is call.args[0]:
                casts[operand] = cast(torch.dtype, call.kwargs["dtype"])
    return casts


def _leading_casts(calls: Sequence[KernelCall], values: Mapping[fx.Node, Argument]) -> int:
    """The number of leading calls that cast operands."""
    operands = {id(value) for value in values.values()}
    is_cast = (call.op is aten._to_copy.default and id(call.args[0]) in operands for call in calls)
    return sum(1 for _ in itertools.takewhile(bool, is_cast))


def _calls_without_autocast(mode: Mode, node: fx.Node, values: Mapping[fx.Node, Argument]) -> list[str] | None:
    """An op's kernel calls outside of autocast, as text, if the op accepts these dtypes together."""
    try:
        return _described(_kernel_calls(mode, node, values, ()))
    except RuntimeError:
        return None


class _Recorder(TorchDispatchMode):
    """Records the ops that reach kernels; autocast acts above this level, so its casts are among them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[KernelCall] = []

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: Sequence[Argument] = (),
        kwargs: Mapping[str, Argument] | None = None,
    ) -> object:
        if func.namespace != "prim":  # skips queries such as `prim.device`, which compute no tensors
            self.calls.append(KernelCall(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _kernel_calls(
    mode: Mode, node: fx.Node, values: Mapping[fx.Node, Argument], autocast: Autocast
) -> list[KernelCall]:
    """The kernel calls of an op on fake values, within autocast."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    with faking(mode), autocasting(autocast), _Recorder() as recorder:
        call_target(node, args, kwargs)
    return recorder.calls


def _described(calls: Sequence[KernelCall]) -> list[str]:
    def text(value: object) -> str:
        return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)

    return [f"{op} {list(map(text, pytree.tree_leaves((args, kwargs))))}" for op, args, kwargs in calls]
