"""Autocast as casts in the graph, so that the graph runs the same in and out of it.

    before    h = linear(x, w)                                            called in autocast to bfloat16
    after     x_to = to(x, bfloat16); w_to = to(w, bfloat16); h = linear(x_to, w_to)

What autocast casts is PyTorch's affair and is not listed here: an op is run on fake values with and without autocast,
and what its kernels see is compared. A parameter is cast once for all ops that take it, as by autocast's cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.core.autocast import Autocast, autocasting
from torchshard.core.errors import CaptureError
from torchshard.ir.graph import emit, fake_mode, faking, where
from torchshard.passes.decompose import inline_op

aten = torch.ops.aten

Casts = Mapping[fx.Node, torch.dtype]
"""Operands of an op, and what autocast casts each to."""


def explicit_casts(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed.

    Raises:
        CaptureError: autocast changes an op in a way that is no cast of its operands, and that can't be traced.
    """
    shared: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    changed = False
    for node in list(module.graph.nodes):
        autocast = node.meta.pop("autocast", ())
        if autocast and isinstance(node.target, torch._ops.OpOverload):
            casts = _casts(module, node, autocast)
            changed |= casts is None or bool(casts)
            if casts is None:
                _inline(module, node, autocast)
            else:
                _insert(module, node, casts, shared)
    return changed


def _insert(
    module: fx.GraphModule, node: fx.Node, casts: Casts, shared: dict[tuple[fx.Node, torch.dtype], fx.Node]
) -> None:
    def cast(operand: fx.Node) -> fx.Node:
        if operand not in casts:
            return operand
        key = operand, casts[operand]
        made = shared.get(key) or emit(module, aten.to.dtype, key, node)
        if operand.op == "placeholder":
            shared[key] = made
        return made

    with module.graph.inserting_before(node):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), cast)


def _inline(module: fx.GraphModule, node: fx.Node, autocast: Autocast) -> None:
    what = where(node)
    if not inline_op(module, node, autocast):
        raise CaptureError(
            f"autocast changes {node.target} in a way that a graph can't say",
            where=what,
            why="it is neither a cast of its operands, nor is the op made of others for which it would be one",
            attempt="torch.autocast(..., enabled=False) around this op, and casts by hand",
        )


def _casts(module: fx.GraphModule, node: fx.Node, autocast: Autocast) -> Casts | None:
    """What autocast casts before an op; None where it does something else."""
    mode, values = fake_mode(module), {n: n.meta["val"] for n in node.all_input_nodes}
    steps = _steps(mode, node, values, autocast)
    if _same(steps, mode, node, values):
        return {}
    for count in range(_leading_casts(steps, values), 0, -1):  # the op itself may begin with casts
        casts = {n: kwargs["dtype"] for _, args, kwargs in steps[:count] for n in values if values[n] is args[0]}
        with faking(mode):
            cast = values | {n: values[n].to(dtype) for n, dtype in casts.items()}
        if _same(steps[count:], mode, node, cast):
            return casts
    return None


def _leading_casts(steps: Sequence[Step], values: Mapping[fx.Node, Any]) -> int:
    """How many of the first steps are casts of operands."""
    operands = {id(value) for value in values.values()}
    casts = (func is aten._to_copy.default and id(args[0]) in operands for func, args, _ in steps)
    return sum(1 for _ in itertools.takewhile(bool, casts))


def _same(steps: Sequence[Step], mode: Any, node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether an op does these steps out of autocast."""
    try:
        return _described(_steps(mode, node, values, ())) == _described(steps)
    except RuntimeError:  # operands of dtypes that don't go together
        return False


Step = tuple[Any, Sequence[Any], dict[str, Any]]
"""An op that has a kernel, and its arguments."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # questions such as `prim.device`
            self.steps.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _steps(mode: Any, node: fx.Node, values: Mapping[fx.Node, Any], autocast: Autocast) -> list[Step]:
    """What an op comes down to, below autocast."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    with faking(mode), autocasting(autocast), _Recorder() as recorder:
        target(*args, **kwargs)
    return recorder.steps


def _described(steps: Sequence[Step]) -> list[str]:
    def looks(value: Any) -> str:
        return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)

    return [f"{func} {list(map(looks, pytree.tree_leaves((args, kwargs))))}" for func, args, kwargs in steps]
