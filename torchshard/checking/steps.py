"""One step, forward and backward: of the unsharded model, and of a program on all ranks in lockstep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchshard.capture import Captured, Leaves, copy_model, flatten, shared_names
from torchshard.checking import lockstep
from torchshard.checking.compare import Place, Results, gradients, largest_difference
from torchshard.checking.rounding import NUDGE_SEED, is_float, nudged, widened, widened_graph
from torchshard.core.autocast import autocasting
from torchshard.core.layouts import Layout
from torchshard.core.mesh import Coordinate, MeshAxis
from torchshard.plans.plan import Plan
from torchshard.weights.materialize import local_state

COTANGENTS = 7919
"""The seed of the first output's gradient."""
NOISE_TRIALS = 4
"""How often the unsharded graph runs to measure its rounding noise."""


def _cotangent(output: Tensor, index: int) -> Tensor:
    """A fixed random gradient of an output; of a seed of its own, since an input of the same numbers hides errors: the
    gradient of a norm along its input is zero."""
    generator = torch.Generator().manual_seed(COTANGENTS + index)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)


def leaf(tensor: Any) -> Any:
    """A tensor of its own with the same values, which gets a gradient if that does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad) if isinstance(tensor, Tensor) else tensor


def backward(outputs: Sequence[Any], copies: int) -> None:
    """Backward from all outputs; each of the `copies` ranks' outputs gets the same gradient."""
    per_rank = len(outputs) // copies
    live = [
        (o, _cotangent(o, i % per_rank)) for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad
    ]
    if live:
        torch.autograd.backward([o for o, _ in live], [g for _, g in live])


def unsharded(model: nn.Module, call: Leaves) -> Results:
    """The model itself, as a copy of its own: gradients and buffers of the user's stay as they are."""
    held = copy_model(model)
    held.zero_grad()
    inputs = {name: leaf(t) for name, t in zip(call.names, call.tensors, strict=True)}
    call_args, call_kwargs = call.rebuild(list(inputs.values()))
    with torch.enable_grad():
        flat = flatten(held(*call_args, **call_kwargs))
        backward(flat.tensors, 1)
    buffers = dict(held.named_buffers())
    return Results(flat.tensors, flat.names, gradients(inputs), gradients(dict(held.named_parameters())), buffers)


class Run:
    """A step of some ranks' graphs in lockstep."""

    def __init__(
        self,
        graphs: Sequence[fx.GraphModule],
        known: Sequence[Mapping[str, Tensor]],
        call: Leaves,
        generator: torch.Generator | None = None,
        *,
        watched: bool = False,
    ) -> None:
        """Runs it.

        Args:
            graphs: one per rank.
            known: per rank, parameters, buffers and constants by all their names.
            generator: moves each value, and each gradient, by a unit in its last place.
            watched: keeps every node's value and gradient.
        """
        ranks = range(len(graphs))
        self.states, self._generator, self._watched = known, generator, watched
        self.inputs = [{n: leaf(t) for n, t in zip(call.names, call.tensors, strict=True)} for _ in ranks]
        self.values: list[dict[str, Any]] = [{} for _ in ranks]
        self.grads: list[dict[str, Tensor]] = [{} for _ in ranks]
        fed = []
        for graph, state, inputs in zip(graphs, known, self.inputs, strict=True):
            given = {**state, **inputs}
            fed.append([given[n.meta["path"]] for n in graph.graph.nodes if n.op == "placeholder"])
        with torch.enable_grad(), autocasting(()):
            self.outputs = lockstep.run(graphs, fed, [self._recorder(rank) for rank in ranks])
            backward([o for outputs in self.outputs for o in outputs], len(graphs))

    def _recorder(self, rank: int) -> lockstep.Record:
        def record(node: fx.Node, value: Any, args: list[Any]) -> Any:
            if self._generator is not None:
                value = nudged(node, value, pytree.tree_leaves(args), self._generator)
            if self._watched:
                self.values[rank][node.name] = value
                if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                    value.register_hook(lambda g: self.grads[rank].__setitem__(node.name, g))
            return value

        return record


@dataclass(frozen=True)
class Trial:
    """A captured call of a model, in the model's own precision or in a wider one."""

    model: nn.Module
    captured: Captured
    call: Leaves
    seed: Tensor
    """The RNG state that each run begins with."""
    dtype: torch.dtype | None = None
    """The floating dtype that stands for all others; None: they stay."""

    def widened(self, dtype: torch.dtype) -> Trial:
        """The same with every floating dtype replaced by one."""
        call = replace(self.call, tensors=tuple(widened(t, dtype) for t in self.call.tensors))
        return replace(self, call=call, dtype=dtype)

    def unsharded(self) -> Results:
        """What the model itself gives."""
        torch.set_rng_state(self.seed)
        return unsharded(self.model, self.call)

    def results(self, like: Results) -> Results:
        """What the captured graph gives, for the tensors that are compared in another precision."""
        run = self.whole()
        inputs, grads = gradients(run.inputs[0]), gradients(run.states[0])
        return Results(
            run.outputs[0],
            like.output_names,
            {name: inputs[name] for name in like.input_grads},
            {name: grads[name] for name in like.parameter_grads},
            {name: run.states[0][name] for name in like.buffers},
        )

    def whole(self, generator: torch.Generator | None = None, *, watched: bool = False) -> Run:
        """The captured graph, which is that of the unsharded model."""
        return self._run([self.captured.graph], {}, generator, watched=watched)

    def sharded(self, graphs: list[fx.GraphModule], plan: Plan, *, watched: bool = False) -> Run:
        """The graphs of all ranks."""
        return self._run(graphs, plan.parameters, watched=watched)

    def _run(
        self,
        graphs: list[fx.GraphModule],
        layouts: Mapping[str, Layout],
        generator: torch.Generator | None = None,
        *,
        watched: bool,
    ) -> Run:
        torch.set_rng_state(self.seed)
        known = [self._known(layouts, coordinate) for coordinate in MeshAxis(len(graphs)).simulated()]
        held = graphs if self.dtype is None else [widened_graph(graph, self.dtype) for graph in graphs]
        with _default_dtype(self.dtype):
            return Run(held, known, self.call, generator, watched=watched)

    def _known(self, layouts: Mapping[str, Layout], coordinate: Coordinate) -> dict[str, Tensor]:
        """A rank's parameters, buffers and constants, by all their names."""
        state = local_state(self.model, layouts, coordinate)
        names = shared_names(self.model)
        if self.dtype is not None:
            state = {name: widened(tensor, self.dtype) for name, tensor in state.items()}
        constants = {path: widened(t, self.dtype or t.dtype) for path, t in self.captured.constants.items()}
        return constants | {name: state[tied[0]] for name, tied in names.items()}

    def noise(self, output_names: Sequence[str]) -> dict[Place, float]:
        """How far rounding moves each tensor of the unsharded step, at most, in absolute value."""
        generator = torch.Generator().manual_seed(NUDGE_SEED)
        before, found = _places(self.whole(), output_names), dict[Place, float]()
        for _ in range(NOISE_TRIALS):
            for place, tensor in _places(self.whole(generator), output_names).items():
                moved = largest_difference(before[place], tensor) if place in before else 0.0
                found[place] = max(found.get(place, 0.0), moved if moved < float("inf") else 0.0)
        return found


def _places(run: Run, output_names: Sequence[str]) -> dict[Place, Tensor]:
    """The floating tensors of an unsharded run by kind and name."""
    kinds: dict[str, Mapping[str, Any]] = {
        "output": {name or "result": value for name, value in zip(output_names, run.outputs[0], strict=True)},
        "buffer": run.states[0],
        "input gradient": gradients(run.inputs[0]),
        "parameter gradient": gradients(run.states[0]),
    }
    return {(kind, name): t for kind, held in kinds.items() for name, t in held.items() if is_float(t)}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """The dtype of what a graph makes without saying one; None: as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
