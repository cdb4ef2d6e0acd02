"""A rank's graph with its backward: one joint graph, which `partition` cuts in two.

    ln_copy    = copy(ln)                R
    q          = addmm(bias, view, t)    S(1)
    ...
    view_2     = view(mm, [2, 8, 16])    P      the gradient of ln_copy
    reduce     = reduce(view_2)          I      the gradient of ln

The joint graph is assembled from the recordings of the layers (`record`): all forwards, then all
backwards in reverse. The gradients of a value with several users are added. Values of the rank's
graph keep their names and metadata. The gradient of a value has the dual of its layout.

PyTorch's own joint graph is AOTAutograd's, for a whole model at once. This one is separate because
equal layers share one recording, and because `verify`, `bucket` and `unsummed` need to know the
value that each gradient belongs to, and its layout. It could go if AOTAutograd joined shared
recordings and kept that metadata.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from torchshard.core.layouts import Layout, dual
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.custom_ops.whole import WholeCall
from torchshard.ir.editing import empty_module
from torchshard.ir.graph import is_float, op_name, placeholders, results_of
from torchshard.passes.record import Gradients, Recording, recorded
from torchshard.passes.segments import Segment, layers


def has_backward(local: fx.GraphModule) -> bool:
    """Whether a rank's graph needs gradients and can be differentiated.

    It can't if it calls opaque modules or recurrences (`WholeCall`, `Stepwise`), or an op that
    writes to a value that its gradient reads.
    """
    nodes = local.graph.nodes
    whole = any(isinstance(node.target, (WholeCall, Stepwise)) or node.target in _NOISY for node in nodes)
    return not whole and any(node.meta.get("needs_grad") for node in nodes)


_NOISY = (torch.ops.aten.rrelu.default, torch.ops.aten.rrelu_with_noise.default)
"""Ops that write their random draw to an operand, from which their gradient is computed."""


def differentiate(local: fx.GraphModule, given: Sequence[bool] | None = None) -> fx.GraphModule:
    """The joint graph: (placeholders, gradients of floating results) -> (results, their gradients).

    The last are the gradients of the placeholders; a gradient is None where a placeholder needs
    none or does not depend on the given gradients. The module's meta 'given' marks the results with
    a given gradient.

    Args:
        given: for each result, whether its gradient is given; by default for all that have one.

    Raises:
        NotImplementedError: the gradients assume more about dynamic sizes than the graph does.
        CaptureError: a gradient is computed by writes that can't be made functional.
    """
    results = results_of(local.graph)
    chosen = [isinstance(r, fx.Node) and is_float(r.meta.get("val")) for r in results]
    if given is not None:
        chosen = [a and b for a, b in zip(chosen, given, strict=True)]
    wanted = {r.name for r, is_chosen in zip(results, chosen, strict=True) if is_chosen}
    parts: list[tuple[Segment, Recording]] = []
    flows: set[str] = {n.name for n in placeholders(local.graph) if n.meta.get("needs_grad")}
    """Names of the values that a gradient flows back through."""
    for part in reversed(layers(local)):
        recording = recorded(part.graph, tuple(name in wanted for name in part.results))
        _, gradients = results_of(recording.graph)
        wanted |= {name for name, g in zip(part.arguments, gradients, strict=True) if g is not None}
        flows |= {name for name, has_gradient in zip(part.results, recording.given, strict=True) if has_gradient}
        parts.insert(0, (part, recording))
    joint = _Joint(local, tuple(c and r.name in flows for c, r in zip(chosen, results, strict=True)))
    for part, recording in parts:
        joint.add_forward(part, recording)
    for part, recording in reversed(parts):
        joint.add_backward(part, recording)
    return joint.finished()


class _Joint:
    """The joint graph so far."""

    def __init__(self, local: fx.GraphModule, given: Gradients) -> None:
        self._local = local
        self._module = empty_module(local.meta | {"given": given})
        self._graph = self._module.graph
        self._known = {node.name: node for node in local.graph.nodes}
        self._values: dict[str, fx.Node] = {}
        """A value's name -> its node here."""
        self._gradients: dict[str, list[fx.Node]] = defaultdict(list)
        """A value's name -> the nodes of which its gradient is the sum."""
        self._copies: dict[Segment, dict[fx.Node, fx.Node]] = {}
        """Segment -> its recorded nodes -> their copies here."""
        for node in local.graph.nodes:
            self._graph._graph_namespace.create_name(node.name, None)  # keeps the name for this value's node
        for source in placeholders(local.graph):
            self._values[source.name] = self._placeholder(source.name, source.meta)
        for number, result in enumerate(results_of(local.graph)):
            if isinstance(result, fx.Node) and is_float(result.meta.get("val")):
                known = _gradient_meta(result) | {"kind": "gradient", "path": f"gradient of {result.name}"}
                known |= {"val": result.meta["val"], "is_given": given[number]}
                name = self._graph._graph_namespace.create_name(f"tangents_{number + 1}", None)
                tangent = self._placeholder(name, known)
                self._gradients[result.name] += [tangent] * given[number]

    def _placeholder(self, name: str, known: dict[str, object]) -> fx.Node:
        node = self._graph.placeholder(name)
        node.name = node.target = name
        node.meta = known | {"is_backward": False}
        return node

    def add_forward(self, part: Segment, recording: Recording) -> None:
        """Adds the forward of a segment."""
        copies = self._copies[part] = {}
        sources = placeholders(recording.graph)[: len(part.arguments)]
        copies |= zip(sources, (self._values[name] for name in part.arguments), strict=True)
        self._add(part, recording, is_backward=False)
        results, _ = results_of(recording.graph)
        self._values |= zip(part.results, (copies[r] if isinstance(r, fx.Node) else r for r in results), strict=True)

    def add_backward(self, part: Segment, recording: Recording) -> None:
        """Adds the backward of a segment: the gradients of its arguments."""
        copies, nodes = self._copies[part], list(part.graph.graph.nodes)
        tangents = placeholders(recording.graph)[len(part.arguments) :]
        floating = [i for i, name in enumerate(part.results) if is_float(self._known[name].meta.get("val"))]
        for tangent, i in zip(tangents, floating, strict=True):
            if recording.given[i]:
                inside = [nodes[number] for number in tangent.meta.get("gradients", ())]
                copies[tangent] = self._gradient(part.results[i], *inside)
        self._add(part, recording, is_backward=True)
        _, gradients = results_of(recording.graph)
        for name, gradient in zip(part.arguments, gradients, strict=True):
            if gradient is not None:
                self._gradients[name].append(copies[gradient])

    def _gradient(self, name: str, *sharing: fx.Node) -> fx.Node:
        """The total gradient of a value; called after all of its terms were added.

        Args:
            sharing: other values with this gradient.
        """
        total, *rest = self._gradients[name]
        for more in rest:
            val = total.meta["val"]
            total = self._graph.call_function(torch.ops.aten.add.Tensor, (total, more))
            total.meta = {"val": val, "is_backward": True}
        others = (self._known[other] for other in total.meta.get("gradient_of", ()))
        total.meta |= _gradient_meta(self._known[name], *others, *sharing)
        self._gradients[name] = [total]
        return total

    def _add(self, part: Segment, recording: Recording, *, is_backward: bool) -> None:
        copies, nodes = self._copies[part], list(part.graph.graph.nodes)
        for node in recording.graph.nodes:
            if node.op != "call_function" or node.meta["is_backward"] is not is_backward:
                continue
            copy = copies[node] = self._graph.node_copy(node, lambda n: copies[n])
            known: dict[str, object] = {}
            origin = None if node.meta["origin"] is None else nodes[node.meta["origin"]]
            if "value" in node.meta:
                value = nodes[node.meta["value"]]
                known, copy.name = value.meta, value.name
            elif "gradients" in node.meta:
                known = _gradient_meta(*(nodes[number] for number in node.meta["gradients"]))
            elif origin is not None:
                known = {key: origin.meta[key] for key in _PLACE if key in origin.meta} | {"inside": origin.name}
                if not is_backward:
                    copy._rename(f"{origin.name}_{op_name(node)}")
            val = {"val": node.meta["val"]} if "val" in node.meta else {}
            copy.meta = known | val | {"is_backward": is_backward}
            if origin is not None and "recompute" in origin.meta:
                copy.meta["recompute"] = origin.meta["recompute"]

    def finished(self) -> fx.GraphModule:
        """The module of the complete graph."""
        results = [self._values[r.name] if isinstance(r, fx.Node) else r for r in results_of(self._local.graph)]
        names = [source.name for source in placeholders(self._local.graph)]
        gradients = [self._gradient(name) if self._gradients[name] else None for name in names]
        self._graph.output((tuple(results), tuple(gradients)))
        return self._module


_PLACE = ("module", "source")


def _gradient_meta(value: fx.Node, *others: fx.Node) -> dict[str, object]:
    """Metadata of the gradient of a value, or of several values that share one gradient."""
    known = {key: value.meta[key] for key in (*_PLACE, "global_shapes") if key in value.meta}
    layouts: tuple[Layout, ...] = value.meta.get("layouts", ())
    names = dict.fromkeys(node.name for node in (value, *others))
    return known | {"gradient_of": tuple(names), "layouts": tuple(map(dual, layouts))}
