"""Replaces the marks of repeated layers with the first layer's ops (see `repeated`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchshard.capture.layer_calls import DifferentLayers, TensorType, Traced
from torchshard.capture.modes import modes_in
from torchshard.capture.repeated import MARK, Repeats
from torchshard.custom_ops.fx_types import Argument
from torchshard.ir.effects import is_inplace
from torchshard.ir.fake_values import size_expr


def repeat(graph: fx.Graph, repeats: Repeats, constants: Mapping[str, Tensor]) -> None:
    """Replaces the marks of repeated layers with the first layer's ops, and removes all other marks.

    Args:
        graph: contains marks; its placeholders have meta["kind"], ["path"] and ["names"].
        constants: path -> value, for the placeholders that are constants.

    Raises:
        DifferentLayers: the last layer's ops differ from the first layer's, or the model writes to
            tensors in place.
    """
    marks = {_args(node)[1]: node for node in graph.nodes if node.target is MARK}
    own = {name: node for node in graph.nodes if node.op == "placeholder" for name in node.meta["names"]}
    if any(run.repeated for run in repeats.runs) and any(map(is_inplace, graph.nodes)):
        # functionalization follows writes by memory, which the values of all copies would share
        raise DifferentLayers("the model writes to tensors in place")
    for run in (run for run in repeats.runs if run.repeated):
        assert run.first is not None and run.last is not None
        first, last = (_Part(marks, traced) for traced in (run.first, run.last))
        if first.described(constants) != last.described(constants):
            raise DifferentLayers(f"{last.path} computes something else than {first.path}")
        for numbers, layer in run.repeated.items():
            _put(first, [marks.pop(number) for number in numbers], layer.path, own)
    for mark in marks.values():
        (operand,) = _args(mark)[0]
        mark.replace_all_uses_with(operand)
        graph.erase_node(mark)


class _Part:
    """The ops of a traced layer: the nodes between its marks."""

    def __init__(self, marks: Mapping[int, fx.Node], traced: Traced) -> None:
        self.path = traced.layer.path
        self.results: list[fx.Node] = [_args(marks[number])[0][0] for number in traced.leave]
        self.arguments = {marks[number]: index for index, number in enumerate(traced.enter)}
        """Mark -> the index of the layer's argument."""
        self.nodes: list[fx.Node] = []
        node, end = marks[traced.enter[-1]].next, marks[traced.leave[0]]
        while node is not end:
            self.nodes.append(node)
            node = node.next

    def described(self, constants: Mapping[str, Tensor]) -> list[object]:
        """Describes the layer's ops as data that is equal for layers with equal ops."""
        ops = [node for node in self.nodes if not isinstance(node.meta.get("val"), torch.SymInt)]
        numbers = {node: number for number, node in enumerate(ops)}

        def describe(node: fx.Node) -> object:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):  # a layer may use a size that an earlier one read
                return f"size {size_expr(value)}"
            if node in self.arguments:
                return f"argument {self.arguments[node]}"
            if node in numbers:
                return f"op {numbers[node]}"
            if node.op == "placeholder" and node.meta["path"] in constants:
                constant = constants[node.meta["path"]]
                content = constant.tolist() if constant.numel() <= _MOST_COMPARED else node.name
                return f"constant {constant.dtype} {content}"
            return f"own {self._own_name(node)}" if self._own_name(node) else f"outer {node.name}"

        described = [
            (node.op, str(node.target), _texts(node.args, describe), _texts(node.kwargs, describe),
             [TensorType.of(v).key() for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)])
            for node in ops
        ]  # fmt: skip
        return [*described, _texts(self.results, describe)]

    def _own_name(self, node: fx.Node) -> str:
        """The name of a parameter or buffer within the layer; '' for other nodes."""
        if node.meta.get("kind") == "constant":
            return ""
        names = [name for name in node.meta.get("names", ()) if name.startswith(f"{self.path}.")]
        return names[0].removeprefix(f"{self.path}.") if names else ""

    def place(self, node: fx.Node, path: str, own: Mapping[str, fx.Node]) -> fx.Node:
        """The node that the layer at `path` uses in place of a node from outside."""
        name = self._own_name(node)
        return own[f"{path}.{name}"] if name else node


_MOST_COMPARED = 64
"""Constants with at most this many elements are compared by value."""


def _args(node: fx.Node) -> tuple[Sequence[fx.Node], int]:
    """The arguments of a mark: (tensors, its number)."""
    return cast(tuple[Sequence[fx.Node], int], node.args)


def _texts(value: Argument, describe: Callable[[fx.Node], Argument]) -> str:
    return str(fx.map_arg(value, describe))


def _put(first: _Part, marks: Sequence[fx.Node], path: str, own: Mapping[str, fx.Node]) -> None:
    """Replaces the marks of one repeated layer with copies of the first layer's ops."""
    graph, given = marks[0].graph, max((_args(mark)[0] for mark in marks), key=len)
    # Marks of results without a gradient list only some operands; the longest list has them all.
    copies: dict[fx.Node, fx.Node] = {mark: given[index] for mark, index in first.arguments.items()}

    def copied(node: fx.Node) -> fx.Node:
        return copies[node] if node in copies else first.place(node, path, own)

    with graph.inserting_before(marks[0]):
        for node in first.nodes:
            if isinstance(node.meta.get("val"), torch.SymInt):
                copies[node] = node  # a size is the same in each layer
                continue
            copies[node] = graph.node_copy(node, copied)
            copies[node].meta = _meta_of(node, first.path, marks[0], path)
    for mark, result in zip(marks, first.results, strict=True):
        mark.replace_all_uses_with(copied(result))
        graph.erase_node(mark)


def _meta_of(node: fx.Node, first_path: str, mark: fx.Node, path: str) -> dict[str, object]:
    """A node's meta in another layer: that layer's module paths, and the checkpoint around it."""
    stack = {}
    for key, (module_path, cls) in (node.meta.get("nn_module_stack") or {}).items():
        inner = module_path == first_path or module_path.startswith(f"{first_path}.")
        stack[key] = (path + module_path.removeprefix(first_path) if inner else module_path, cls)
    return node.meta | {"nn_module_stack": stack} | modes_in(node, mark)
