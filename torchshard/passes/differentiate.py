"""A rank's graph with its backward: one graph of both, which `partition` cuts in two.

PyTorch records it as AOTAutograd does (`make_fx` of forward and `torch.autograd.grad`), so each op has PyTorch's own
gradient and each collective its dual:

    ln_copy    = copy(ln)                R
    q          = addmm(bias, view, t)    S(1)
    ...
    view_2     = view(mm, [2, 8, 16])    P      the gradient of ln_copy
    reduce     = reduce(view_2)          I      the gradient of ln

Values of the rank's graph keep their names, and all that is known of them. The gradient of a value has the dual of its
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx

from torchshard.core.autocast import autocasting
from torchshard.core.layouts import Layout, dual
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.custom_ops.whole import WholeCall
from torchshard.ir.graph import Mode, fake_mode, is_float, op_name, placeholders, results_of

Gradients = Sequence[bool]
"""For each result of a graph, whether backward is given its gradient."""


def has_backward(local: fx.GraphModule) -> bool:
    """Whether a rank's graph can be differentiated: it needs gradients, and no call of it is kept whole."""
    whole = any(isinstance(node.target, (WholeCall, Stepwise)) for node in local.graph.nodes)
    return not whole and any(node.meta.get("needs_grad") for node in local.graph.nodes)


def differentiate(local: fx.GraphModule, given: Gradients | None = None) -> fx.GraphModule:
    """The joint graph: (placeholders, a gradient for each floating result) -> (results, gradients of the placeholders).

    A gradient is None where the placeholder needs none, or where it does not depend on the gradients that are given.
    The module's meta has 'given': for which results they are.

    Args:
        given: None for all results that have a gradient.

    Raises:
        NotImplementedError: the gradients hold for some of the sizes alone that the graph holds for.
    """
    sources, results = placeholders(local.graph), results_of(local.graph)
    mode = fake_mode(local.graph)
    with mode:
        primals = [_leaf(node) for node in sources]
        tangents = [torch.empty_like(n.meta["val"]) for n in results if is_float(n.meta.get("val"))]
    recorder, guards = _Recorder(local), _guards(mode)

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> tuple[Any, Any]:
        values, rest = recorder.run(*primals), iter(tangents)
        recorder.begin_backward()
        recorder.given = [_has_gradient(value) and (given is None or given[i]) for i, value in enumerate(values)]
        gradients = [next(rest) if is_float(value) else None for value in values]
        wanted = [primal for primal in primals if primal.requires_grad]
        chosen = [(v, g) for v, g, is_given in zip(values, gradients, recorder.given, strict=True) if is_given]
        found = iter(_gradients([v for v, _ in chosen], wanted, [g for _, g in chosen]))
        return values, [next(found) if primal.requires_grad else None for primal in primals]

    with (
        mode,
        enable_python_dispatcher(),
        torch.enable_grad(),
        autocasting(()),
        saved_tensors_hooks(_same, _same),  # checkpoints around the call would keep what is recorded
    ):
        traced = make_fx(joint)(primals, tangents)
    if _guards(mode) > guards:
        raise NotImplementedError("its gradients assume more of the sizes than the graph does")
    return recorder.named(traced)


def _guards(mode: Mode) -> int:
    """How many assumptions of dynamic sizes PyTorch has made."""
    shape_env = getattr(mode, "shape_env", None)
    return len(shape_env.guards) if shape_env is not None else 0


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _gradients(results: Sequence[Any], wanted: Sequence[Tensor], given: Sequence[Any]) -> Sequence[Tensor | None]:
    """As torch.autograd.grad, which refuses to be asked for none."""
    if not results or not wanted:
        return [None] * len(wanted)
    return torch.autograd.grad(results, wanted, given, allow_unused=True)


def _leaf(node: fx.Node) -> Tensor:
    """A fake tensor of its own for a placeholder, for equal ones share theirs."""
    value: Tensor = node.meta["val"]
    leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return leaf.requires_grad_(bool(node.meta.get("needs_grad")))


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Recorder(fx.Interpreter):
    """Runs a rank's graph while PyTorch records it, and notes which recorded node is which value or gradient."""

    def __init__(self, local: fx.GraphModule) -> None:
        super().__init__(local)
        self._local = local
        self.given: list[bool] = []
        self._values: dict[fx.Node, fx.Node] = {}
        """Recorded node -> the node of the rank's graph whose value it is."""
        self._gradients: dict[fx.Node, fx.Node] = {}
        """Recorded node -> the node whose gradient it is."""
        self._origins: dict[fx.Node, fx.Node] = {}
        """Recorded node -> the op whose forward or backward records the nodes behind it."""
        self._last: fx.Node | None = None
        """The last recorded node of the forward."""
        self._steps: dict[Any, fx.Node] = {}
        """Step of autograd's backward -> the op that it belongs to."""

    def run_node(self, n: fx.Node) -> Any:
        """Runs an op, and notes its value and, when backward comes to it, its gradient."""
        if n.op != "call_function":
            return super().run_node(n)
        self._mark(n)
        result = super().run_node(n)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if _has_gradient(tensor):
                self._follow(tensor.grad_fn, n)
        if isinstance(result, Tensor):
            self._values.setdefault(_recorded(result), n)
            if result.requires_grad:
                result.register_hook(lambda gradient: self._note_gradient(gradient, n))
        return result

    def _note_gradient(self, gradient: Tensor, n: fx.Node) -> None:
        self._gradients.setdefault(_recorded(gradient), n)

    def _follow(self, step: Any, origin: fx.Node) -> None:
        """Marks the steps of an op's backward as belonging to the op; earlier ops' steps are marked already."""
        waiting = [step]
        while waiting:
            step = waiting.pop()
            if step is not None and step not in self._steps and step.next_functions:
                self._steps[step] = origin
                step.register_prehook(lambda grads: self._mark(origin))
                waiting += [following for following, _ in step.next_functions]

    def _mark(self, origin: fx.Node) -> None:
        """What is recorded from now on belongs to this op."""
        self._origins[next(reversed(_graph_being_recorded().nodes))] = origin

    def begin_backward(self) -> None:
        """What is recorded from now on is the backward."""
        self._last = next(reversed(_graph_being_recorded().nodes))

    def named(self, traced: fx.GraphModule) -> fx.GraphModule:
        """The recorded graph with what is known of its nodes, under the names that the values have."""
        local = self._local.graph
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in local.nodes:
            graph._graph_namespace.create_name(node.name, None)  # kept for the node that has this value
        sources = iter(placeholders(local))
        results = enumerate(results_of(local))
        tangents = iter([(i, n) for i, n in results if is_float(n.meta.get("val"))])
        origin, is_backward = None, False
        for node in traced.graph.nodes:
            if node.op == "output":
                break
            copy = copies[node] = graph.node_copy(node, lambda n: copies[n])
            known: dict[str, Any] = {}
            if node.op == "placeholder" and (source := next(sources, None)) is not None:
                known = source.meta
                copy.name = copy.target = source.name
            elif node.op == "placeholder":
                number, result = next(tangents)
                known = _gradient_meta(result) | {"kind": "gradient", "path": f"gradient of {result.name}"}
                known["is_given"] = self.given[number]
            elif node in self._values:
                known = self._values[node].meta
                copy.name = self._values[node].name
            elif node in self._gradients:
                known = _gradient_meta(self._gradients[node])
            elif origin is not None:
                known = {key: origin.meta[key] for key in _PLACE if key in origin.meta} | {"inside": origin.name}
                if not is_backward:  # PyTorch numbers nodes otherwise each time
                    copy._rename(f"{origin.name}_{op_name(node)}")
            val = {"val": node.meta["val"]} if "val" in node.meta else {}
            copy.meta = dict(known) | val | {"is_backward": is_backward}
            if origin is not None and "recompute" in origin.meta:
                copy.meta["recompute"] = origin.meta["recompute"]
            origin = self._origins.get(node, origin)
            is_backward |= node is self._last
        ends, count = results_of(traced.graph), len(results_of(local))
        graph.output(fx.map_arg((tuple(ends[:count]), tuple(ends[count:])), lambda n: copies[n]))
        module = fx.GraphModule(nn.Module(), graph)
        module.meta = dict(self._local.meta) | {"given": tuple(self.given)}
        return module


_PLACE = ("module", "source")


def _gradient_meta(value: fx.Node) -> dict[str, Any]:
    """What is known of the gradient of a value."""
    known = {key: value.meta[key] for key in (*_PLACE, "global_shape") if key in value.meta}
    layouts: tuple[Layout, ...] = value.meta.get("layouts", ())
    return known | {"gradient_of": value.name, "layouts": tuple(map(dual, layouts))}


def _recorded(tensor: Tensor) -> fx.Node:
    """The node that stands for a tensor in the graph that is being recorded."""
    mode = get_proxy_mode()
    assert mode is not None
    node: fx.Node = get_proxy_slot(tensor, mode.tracer).proxy.node
    return node


def _graph_being_recorded() -> fx.Graph:
    mode = get_proxy_mode()
    assert mode is not None
    graph: fx.Graph = mode.tracer.graph
    return graph
