"""Runs ops on fake values, as torch.fx's FakeTensorProp does.

`localize` does this for the nodes that it adds, `verify` for all nodes. A model repeats its layers,
and the ranks repeat each other's graphs, so results are cached by the text of the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from torchshard.core.fakes import new_fake_mode
from torchshard.ir.fake_values import faking, in_numbers
from torchshard.ir.graph import fake_mode
from torchshard.passes.nodes import call_target


class Seen:
    """A cache of results of ops on fake values; the ranks of one program share it."""

    def __init__(self) -> None:
        self.results: dict[str, Argument] = {}
        """The text of a call -> its result."""
        self.numbers = new_fake_mode()
        """The fake mode with concrete sizes, in which ops take a fraction of the time."""
        self._texts: dict[int, tuple[Argument, str]] = {}
        """The id of a value -> the value and its text, because many ops have the same result."""
        self._in_numbers: dict[int, tuple[Argument, Argument]] = {}

    def text(self, value: Argument) -> str:
        """Everything about a value that an op on fake values can depend on."""
        if id(value) not in self._texts:
            self._texts[id(value)] = value, repr(_described(value))
        return self._texts[id(value)][1]

    def in_numbers(self, value: Argument) -> Argument:
        """A value's counterpart in the mode `numbers`, with the example inputs' sizes for symbols."""
        if id(value) not in self._in_numbers:
            with self.numbers:
                self._in_numbers[id(value)] = value, in_numbers(value)
        return self._in_numbers[id(value)][1]


def propagate(module: fx.GraphModule, seen: Seen) -> None:
    """Computes the missing values of ops."""
    with faking(fake_mode(module.graph)):
        for node in module.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = run(node, lambda n: n.meta["val"], seen)


def run(node: fx.Node, value_of: Callable[[fx.Node], Argument], seen: Seen, *, numbers: bool = False) -> Argument:
    """The result of an op on the fake values of its operands; to be called within `faking`.

    Args:
        numbers: whether the values belong to the mode `seen.numbers`.
    """
    args, kwargs = in_numbers((node.args, node.kwargs)) if numbers else (node.args, node.kwargs)
    call = repr((node.target, numbers, fx.map_arg((args, kwargs), lambda n: seen.text(value_of(n)))))
    if call not in seen.results or is_sized_by_values(node):
        args, kwargs = fx.map_arg((args, kwargs), value_of)
        seen.results[call] = call_target(node, args, kwargs)
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
