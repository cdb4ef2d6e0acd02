"""Records a segment with its backward, as AOTAutograd does: `make_fx` of forward and autograd.grad.

Each op has PyTorch's own gradient, and each collective its dual. Equal segments, such as a model's
repeated layers, are recorded once, because a recording refers to ops only by number.

The module replaces AOTAutograd's tracing. AOTAutograd could replace it in turn if its trace named,
for each node, the segment's op that it belongs to and the values that it is, or is a gradient of;
if equal segments shared a trace, with the group names of each rank; and if gradients that assume
more about sizes than the graph does were an error.

On the meta device PyTorch runs some ops without recording a gradient (`where` with a number, and
losses). So segments on that device are recorded as if they were on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

# Lets ops run their Python decompositions on dynamic sizes, as export does (PyTorch 2.13.0).
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.core.autocast import autocasting
from torchshard.ir.editing import duplicate
from torchshard.ir.fake_values import Mode, guards, has_new_guards
from torchshard.ir.graph import fake_mode, is_float, placeholders, results_of, values
from torchshard.passes.functionalize import functionalize
from torchshard.passes.recorder import Recorder, has_gradient
from torchshard.passes.segment_keys import segment_key, simulated_groups

aten = torch.ops.aten

Gradients = tuple[bool, ...]
"""For each result of a graph, whether backward receives its gradient."""


@dataclass(frozen=True)
class Recording:
    """The joint graph: (arguments, gradients of floating results) -> (results, gradients).

    Meta of its nodes: 'is_backward'; 'origin', the number of the segment's node with the forward or
    backward that the node belongs to; 'value', the number of the node that computes the same value;
    'gradients', the numbers of the nodes that it is the gradient of. A returned gradient is None
    where an argument needs none or does not depend on the given gradients.
    """

    graph: fx.Graph
    given: Gradients
    """For each result, whether its gradient is given and has an effect."""
    groups: tuple[str, ...] = ()
    """The simulated groups of its collectives."""

    def among(self, groups: tuple[str, ...]) -> Recording:
        """The recording for another rank, with that rank's groups instead."""
        if groups == self.groups:
            return self
        names, copied, copies = dict(zip(self.groups, groups, strict=True)), fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            copies[node] = copied.node_copy(node, copies.__getitem__)
            copies[node].args = tuple(names.get(a, a) if isinstance(a, str) else a for a in copies[node].args)
        return replace(self, graph=copied, groups=groups)


def recorded(part: fx.GraphModule, given: Gradients) -> Recording:
    """The recording of a segment, or of an equal one from the same captured graph.

    Raises:
        NotImplementedError: the gradients assume more about dynamic sizes than the graph does.
        CaptureError: a gradient is computed by writes that can't be made functional.
    """
    known: dict[object, Recording] = part.meta.setdefault("recordings", {})
    groups = simulated_groups(part.graph)
    key = segment_key(part.graph, groups), given
    if key not in known:
        known[key] = replace(_record(part, given), groups=groups)
    return known[key].among(groups)


def _record(part: fx.GraphModule, given: Gradients) -> Recording:
    if not any(isinstance(v, Tensor) and v.device == META for node in part.graph.nodes for v in values(node)):
        return _record_as_it_is(part, given)
    on_cpu = duplicate(part)
    _move(on_cpu.graph, META, CPU)
    for node in on_cpu.graph.find_nodes(op="call_function", target=aten.histc.default):
        node.target = _histc
    recording = _record_as_it_is(on_cpu, given)
    _move(recording.graph, CPU, META)
    return recording


def _record_as_it_is(part: fx.GraphModule, given: Gradients) -> Recording:
    sources, results, mode = placeholders(part.graph), results_of(part.graph), fake_mode(part.graph)
    with mode:
        primals = [_leaf(node) for node in sources]
        tangents = [_empty(n.meta["val"]) for n in results if is_float(n.meta.get("val"))]
    recorder, assumed = Recorder(part), guards(mode)
    chosen: list[bool] = []

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> tuple[object, object]:
        made, rest = recorder.run(*primals), iter(tangents)
        recorder.begin_backward()
        chosen[:] = [has_gradient(value) and is_given for value, is_given in zip(made, given, strict=True)]
        gradients = [next(rest) if is_float(value) else None for value in made]
        wanted = [primal for primal in primals if primal.requires_grad]
        pairs = [(v, g) for v, g, is_chosen in zip(made, gradients, chosen, strict=True) if is_chosen]
        found = iter(_gradients([v for v, _ in pairs], wanted, [g for _, g in pairs]))
        return made, [next(found) if primal.requires_grad else None for primal in primals]

    with (
        mode,
        _kernels_unguarded(part.graph, mode),
        enable_python_dispatcher(),
        torch.enable_grad(),
        autocasting(()),
        # The hooks of a checkpoint around the call would keep recorded tensors alive.
        saved_tensors_hooks(lambda t: t, lambda t: t),
        torch.autograd.set_detect_anomaly(False),  # fake tensors contain no NaNs to search for
        contextlib.closing(recorder),
    ):
        traced = make_fx(joint)(primals, tangents)
    if has_new_guards(mode, assumed):
        raise NotImplementedError("its gradients assume more of the sizes than the graph does")
    ends = results_of(traced.graph)
    recorder.describe(traced.graph, ends[: len(results)])
    for placeholder, source in zip(placeholders(traced.graph), sources, strict=False):
        placeholder.meta |= {key: source.meta[key] for key in ("kind", "path")}
    for placeholder in placeholders(traced.graph)[len(sources) :]:
        placeholder.meta["kind"] = "gradient"
    traced.graph.output_node().args = ((tuple(ends[: len(results)]), tuple(ends[len(results) :])),)
    module = fx.GraphModule(nn.Module(), traced.graph)
    functionalize(module, keep_stores=True)
    return Recording(module.graph, tuple(chosen))


def _kernels_unguarded(graph: fx.Graph, mode: Mode) -> AbstractContextManager[object]:
    """Suppresses guards from PyTorch's choice of a convolution kernel by batch size: any is right."""
    has_any = any("conv" in str(node.target) for node in graph.nodes)  # conv2d, conv_transpose1d, convolution, ...
    return _SuppressingGuards(mode) if has_any else contextlib.nullcontext()


class _SuppressingGuards(TorchDispatchMode):
    """Runs convolutions without new guards.

    The forward's guards are known already, and a gradient has its value's sizes.
    """

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self._sizes = getattr(mode, "shape_env", None)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Runs the op."""
        is_one = func in (aten.convolution.default, aten.convolution_backward.default)
        with self._sizes.suppress_guards() if is_one and self._sizes else contextlib.nullcontext():
            return func(*args, **kwargs or {})


META, CPU = torch.device("meta"), torch.device("cpu")


def _move(graph: fx.Graph, source: torch.device, target: torch.device) -> None:
    """Replaces one device with another, in arguments and in values."""

    def moved(value: Argument) -> Argument:
        if isinstance(value, Tensor):
            return _empty(value, target) if value.device == source else value
        return target if value == source else value

    for node in graph.nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(given, moved) for given in (node.args, dict(node.kwargs)))
        if "val" in node.meta:
            with fake_mode(graph):
                node.meta["val"] = fx.node.map_aggregate(node.meta["val"], moved)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """`torch.histc` for all dtypes: PyTorch's CPU kernel refuses integers, which models use elsewhere."""
    return aten.histc.default(x.float(), bins, min, max).to(x.dtype)


def _gradients(
    results: Sequence[Tensor], wanted: Sequence[Tensor], given: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad`, also for an empty list of results or inputs, which PyTorch refuses."""
    if not results or not wanted:
        return [None] * len(wanted)
    return torch.autograd.grad(results, wanted, given, allow_unused=True)


def _leaf(node: fx.Node) -> Tensor:
    """A fake tensor for one placeholder only: equal placeholders share theirs."""
    return _empty(node.meta["val"]).requires_grad_(bool(node.meta.get("needs_grad")))


def _empty(value: Tensor, device: torch.device | None = None) -> Tensor:
    """A new fake tensor with the shape, strides and dtype of another."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device or value.device)
