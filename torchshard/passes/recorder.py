"""Runs a segment while PyTorch records it, and finds the value or gradient that each recorded node is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import Argument
from torch.utils.hooks import RemovableHandle

from torchshard.passes.nodes import upstream

aten = torch.ops.aten


def has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class Recorder(fx.Interpreter):
    """Runs a segment while PyTorch records it, and finds the value or gradient that each node is."""

    def __init__(self, part: fx.GraphModule) -> None:
        super().__init__(part)
        self._number = {node: i for i, node in enumerate(part.graph.nodes)}
        self._values: dict[fx.Node, int] = {}
        """Recorded node -> the number of the segment's node with this value."""
        self._gradients: dict[fx.Node, list[int]] = defaultdict(list)
        """Recorded node -> the numbers of the nodes that it is the gradient of."""
        self._origins: dict[fx.Node, tuple[int | None, bool]] = {}
        """Recorded node -> (number of the op that it belongs to, whether it is part of the op's backward)."""
        self._origin: int | None = None
        self._is_backward = False
        self._steps: set[Node] = set()
        """Autograd nodes that are marked."""
        self._hooks: list[RemovableHandle] = []
        self._copies: dict[fx.Node, Mapping[str, Argument]] = {}
        """Recorded nodes for `contiguous()` -> its keyword arguments (the memory format)."""

    def run_node(self, n: fx.Node) -> object:
        """Runs an op, and notes its value and, when backward reaches it, its gradient."""
        if n.op != "call_function":
            return super().run_node(n)
        number = self._number[n]
        self._mark(number)
        result = super().run_node(n)
        if n.target is aten.contiguous.default and result is self.env[n.all_input_nodes[0]]:
            result = self._copied(result, n.kwargs)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if has_gradient(tensor):
                self._follow(tensor.grad_fn, number)
        if isinstance(result, Tensor):
            self._values.setdefault(_recorded(result), number)
            if result.requires_grad:
                self._hooks.append(result.register_hook(lambda gradient: self._note_gradient(gradient, number)))
        return result

    def _copied(self, x: Tensor, kwargs: Mapping[str, Argument]) -> Tensor:
        """A copy of a fake value that is contiguous already, where PyTorch would record no op.

        The real value may not be contiguous.
        """
        copied: Tensor = aten.clone.default(x)
        self._copies[_recorded(copied)] = kwargs
        return copied

    def _note_gradient(self, gradient: Tensor | None, number: int) -> None:
        if gradient is None:
            raise NotImplementedError("PyTorch records no gradient of an op on this device")
        self._gradients[_recorded(gradient)].append(number)

    def _follow(self, step: Node | None, origin: int) -> None:
        """Marks the autograd nodes of an op's backward as the op's; earlier ops have marked theirs."""
        waiting = [step]
        while waiting:
            step = waiting.pop()
            if step is not None and step not in self._steps and step.next_functions:
                self._steps.add(step)
                self._hooks.append(step.register_prehook(lambda grads: self._mark(origin)))
                waiting += [following for following, _ in step.next_functions]

    def _mark(self, origin: int) -> None:
        """Attributes the nodes recorded from now on to an op."""
        self._settle(_graph_being_recorded())
        self._origin = origin

    def begin_backward(self) -> None:
        """Attributes the nodes recorded from now on to the backward."""
        self._settle(_graph_being_recorded())
        self._is_backward = True

    def _settle(self, graph: fx.Graph) -> None:
        """Notes the origin of the nodes since the last mark.

        PyTorch may erase some of them again, even the last one, so the last node is an unreliable
        mark.
        """
        for node in reversed(graph.nodes):
            if node in self._origins:
                break
            self._origins[node] = self._origin, self._is_backward

    def describe(self, graph: fx.Graph, results: Sequence[object]) -> None:
        """Sets the meta of the recorded nodes."""
        for node, kwargs in self._copies.items():
            node.target, node.kwargs = aten.contiguous.default, dict(kwargs)
        self._settle(graph)
        for node in graph.nodes:
            origin, is_backward = self._origins[node]
            val = {"val": node.meta["val"]} if "val" in node.meta else {}
            node.meta = val | {"is_backward": is_backward, "origin": origin}
            if node in self._values:
                node.meta["value"] = self._values[node]
            if node in self._gradients:
                node.meta["gradients"] = self._gradients[node]
        for result in results:  # a size is recorded when it is first read, maybe after all else
            if isinstance(result, fx.Node):
                for node in (result, *upstream(result, lambda n: n.all_input_nodes)):
                    node.meta["is_backward"] = False

    def close(self) -> None:
        """Removes the hooks on the backward."""
        for hook in self._hooks:
            hook.remove()  # autograd's nodes and this object would keep each other alive, in a cycle hidden from Python
        self._steps.clear()


def _recorded(tensor: Tensor) -> fx.Node:
    """The node of a tensor in the graph that is being recorded."""
    mode = get_proxy_mode()
    assert mode is not None
    node: fx.Node = get_proxy_slot(tensor, mode.tracer).proxy.node
    return node


def _graph_being_recorded() -> fx.Graph:
    mode = get_proxy_mode()
    assert mode is not None
    graph: fx.Graph = mode.tracer.graph
    return graph
