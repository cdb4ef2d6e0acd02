"""Runs ops on fake values, as torch.fx's FakeTensorProp does: `localize` for the nodes it adds, `verify` for all nodes.

A model repeats its layers, and the ranks repeat each other's graphs, so results are cached by the text of the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from torchshard.ir.graph import fake_mode, faking
from torchshard.passes.nodes import call_target


class Seen:
    """Results of ops on fake values. A caller shares one between the ranks of one program, so that it stays small."""

    def __init__(self) -> None:
        self.results: dict[str, Argument] = {}
        """The text of a call -> its result."""
        self._texts: dict[int, tuple[Argument, str]] = {}
        """The identity of a value -> the value, and its text: many ops have one result."""

    def text(self, value: Argument) -> str:
        """Everything about a value that an op on fake values can depend on."""
        if id(value) not in self._texts:
            self._texts[id(value)] = value, repr(_described(value))
        return self._texts[id(value)][1]


def propagate(module: fx.GraphModule, seen: Seen) -> None:
    """Computes the value of each op that has none."""
    with faking(fake_mode(module.graph)):
        for node in module.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = run(node, lambda n: n.meta["val"], seen)


def run(node: fx.Node, value_of: Callable[[fx.Node], Argument], seen: Seen) -> Argument:
    """The result of an op on the fake values of its operands; to be called within `faking`."""
    call = repr((node.target, fx.map_arg((node.args, node.kwargs), lambda n: seen.text(value_of(n)))))
    if call not in seen.results or is_sized_by_values(node):
        seen.results[call] = call_target(node, *fx.map_arg((node.args, node.kwargs), value_of))
    return seen.results[call]


def is_sized_by_values(node: fx.Node) -> bool:
    """Whether the shapes of an op's results depend on values: each run then creates new symbols for them."""
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def _described(value: Argument) -> Argument:
    if isinstance(value, (list, tuple)):
        return [_described(v) for v in value]
    if not isinstance(value, Tensor):
        return value
    strides = value.stride() if value.layout == torch.strided else None
    return value.shape, strides, value.dtype, value.device, value.layout
