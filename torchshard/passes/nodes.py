"""Typed access to what torch.fx leaves open.

To a type checker an argument of a node can be a number, a node or a nested list, and a target a function or a name. The
schema of an op says more: these functions state what the schema says, and fail at once if a graph breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument, Target


def node_arg(node: fx.Node, index: int = 0) -> fx.Node:
    """A positional argument that is a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node), f"argument {index} of {node.format_node()}"
    return value


def int_arg(node: fx.Node, index: int) -> int:
    """A positional argument that is a number, as the index of `getitem`."""
    value = node.args[index]
    assert isinstance(value, int), f"argument {index} of {node.format_node()}"
    return value


def int_list_arg(node: fx.Node, index: int) -> list[int]:
    """A positional argument that is a list of ints."""
    value = node.args[index]
    assert isinstance(value, (list, tuple)), f"argument {index} of {node.format_node()}"
    return [number for number in value if isinstance(number, int)]


def operator_of(node: fx.Node) -> OpOverload[..., object]:
    """The target of a node that calls a PyTorch operator."""
    assert isinstance(node.target, OpOverload), node.format_node()
    return node.target


RESHAPED: Collection[Target] = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}
"""Run as `reshape`: a value may lie in memory otherwise than the fake one that was recorded, and `view` would fail."""


def call_target(node: fx.Node, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> Argument:
    """Calls the function of a node."""
    assert callable(node.target), node.format_node()
    return node.target(*args, **kwargs)


def upstream(node: fx.Node, operands: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes that a node depends on, directly or through others, without itself."""
    found, waiting = set[fx.Node](), [node]
    while waiting:
        new = set(operands(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def replace_node(node: fx.Node, replacement: fx.Node) -> None:
    """Puts a new node in place of an old one, under the old one's name: plans and listings name ops by it."""
    name = node.name
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)
    replacement.name = name
