"""Runs ops on fake values, as `torch.fx`'s FakeTensorProp does: `localize` for nodes that it adds, `verify` for all.

Equal calls of alike layers run once: what a call gave is kept under its text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from torchshard.ir.graph import fake_mode, faking

Seen = dict[str, Any]
"""A call of an op on fake values, as text -> what it gave."""


def propagate(module: fx.GraphModule, seen: Seen) -> None:
    """Sets the value of each op that has none, from those of its operands."""
    with faking(fake_mode(module)):
        for node in module.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = run(node, lambda n: n.meta["val"], seen)


def run(node: fx.Node, value_of: Callable[[fx.Node], Any], seen: Seen) -> Any:
    """What an op gives on fake values of its operands; within `faking`."""
    target: Any = node.target
    call = repr((target, fx.map_arg((node.args, node.kwargs), lambda n: _looks(value_of(n)))))
    if call not in seen or is_sized_by_values(node):
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        seen[call] = target(*args, **kwargs)
    return seen[call]


def is_sized_by_values(node: fx.Node) -> bool:
    """Whether the shapes of an op's results depend on values: they are new symbols each time that it runs."""
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def _looks(value: Any) -> Any:
    """All that an op on fake values can see of one."""
    if isinstance(value, (list, tuple)):
        return [_looks(v) for v in value]
    if not isinstance(value, Tensor):
        return value
    strides = value.stride() if value.layout == torch.strided else None
    return value.shape, strides, value.dtype, value.device, value.layout
