"""Runs one training step, forward and backward, of the unsharded model, or of all ranks in lockstep.

Both sides start from the same RNG state, and their outputs get the same random gradients.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from torchshard.capture import Captured, Leaves, copy_model, shared_names
from torchshard.capture.carried import Arguments
from torchshard.checking import lockstep
from torchshard.checking.compare import ComparedValue, Kind, Results, gradients, largest_difference
from torchshard.checking.rounding import NUDGE_SEED, Nudges, nudged, widened, widened_graph
from torchshard.checking.running import Execute, NoBackwardError, inference, training
from torchshard.compiler.program import Program
from torchshard.core.autocast import autocasting
from torchshard.core.errors import in_short
from torchshard.core.layouts import I, Shard
from torchshard.core.mesh import Mesh, Place
from torchshard.core.rng_states import RngStates, set_rng_states
from torchshard.core.sharding import UNSHARDED, Sharding
from torchshard.ir.graph import is_float, is_tensor, result_layouts, results_of
from torchshard.passes import has_backward
from torchshard.runtime.step import with_direct_collectives
from torchshard.weights.materialize import local_state

log = logging.getLogger(__name__)
T = TypeVar("T")
ALONE = Mesh(())
"""One process, without axes."""
COTANGENT_SEED = 7919
"""The seed of the first output's gradient; each further output adds one."""
NOISE_TRIALS = 4
"""The number of runs, per kind of nudge, that measure the unsharded graph's rounding noise."""


def cotangent(output: Tensor, index: int) -> Tensor:
    """A fixed random gradient of an output.

    Its seed is unlikely to be the user's: with a gradient equal to the input, a normalization layer
    returns zero and hides errors.
    """
    dtype = torch.complex128 if output.is_complex() else torch.float64
    generator = torch.Generator().manual_seed(COTANGENT_SEED + index)
    return torch.randn(output.shape, generator=generator, dtype=dtype, device="cpu").to(output)


def leaf(value: T) -> T:
    """A copy of a tensor as a leaf with its own gradient, if required; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return cast(T, value.detach().clone().requires_grad_(value.requires_grad))


def backward(outputs: Sequence[Sequence[object]], mesh: Mesh = ALONE, shardings: Sequence[Sharding] = ()) -> None:
    """Runs backward from the outputs of all ranks; each gets the same gradients, or slices of them.

    Args:
        shardings: the shardings of a rank's outputs, in equal slices; by default all are full.
    """
    roots, grads = [], []
    for place, of_rank in zip(mesh.places(), outputs, strict=True):
        for number, output in enumerate(of_rank):
            if isinstance(output, Tensor) and output.requires_grad:
                roots.append(output)
                grads.append(_own_cotangent(output, number, shardings, place))
    if roots:
        torch.autograd.backward(roots, grads)


def _own_cotangent(output: Tensor, number: int, shardings: Sequence[Sharding], place: Place) -> Tensor:
    """A rank's slice of the gradient of an output, given its slice of the output."""
    sharding, shape = shardings[number] if shardings else UNSHARDED, list(output.shape)
    for axis, layout in sharding:
        assert isinstance(layout, Shard), sharding
        shape[layout.dim] *= axis.size
    return sharding.local(cotangent(output.new_empty(shape), number), place)


def output_shardings(local: fx.GraphModule, mesh: Mesh) -> list[Sharding]:
    """The shardings of the tensors among a localized graph's results; empty if all are full.

    Of several axes, all but the last split the batch.
    """
    results = zip(results_of(local.graph), result_layouts(local.graph), strict=True)
    layouts = [layout for result, layout in results if is_tensor(result)]
    if all(layout == I for layout in layouts):
        return []
    return [Sharding.of(*((axis, layout) for axis in mesh.axes[:-1] or mesh.axes)) for layout in layouts]


def unsharded(model: nn.Module, call: Leaves, *, left: bool = True) -> Results:
    """Runs a copy of the model, so that the user's gradients and buffers stay as they are.

    Args:
        left: whether tensors that the call writes into its arguments count as outputs.
    """
    original, model = model, copy_model(model)
    model.zero_grad()
    inputs = {name: leaf(t) for name, t in zip(call.names, call.tensors, strict=True)}
    call_args, call_kwargs = call.rebuild(list(inputs.values()))
    arguments = Arguments(call_args, call_kwargs)
    with torch.enable_grad():
        flat, changes = arguments.with_changes(model(*call_args, **call_kwargs), call.positional)
        outputs = flat.tensors if left else flat.tensors[: changes.results]
        backward([outputs])
    before = dict(original.named_parameters())
    written = {name: p.detach() for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    buffers = dict(model.named_buffers()) | written
    return Results(
        outputs, flat.names[: len(outputs)], gradients(inputs), gradients(dict(model.named_parameters())), buffers
    )


class Run:
    """A step of the ranks' graphs in lockstep, with each rank's tensors after it."""

    def __init__(
        self,
        graphs: Sequence[fx.GraphModule],
        states: Sequence[Mapping[str, Tensor]],
        call: Leaves,
        nudges: Nudges | None = None,
        *,
        mesh: Mesh,
        shardings: Mapping[str, Sharding] = MappingProxyType({}),
        watched: bool = False,
        execute: Execute | None = None,
    ) -> None:
        """Runs the step.

        Args:
            graphs: one per rank.
            states: per rank, parameters, buffers and constants by all their names.
            mesh: the mesh of the ranks.
            shardings: the shardings of the call's tensors.
            nudges: which values, and gradients, are moved by a unit in their last place.
            watched: whether to keep every node's value and gradient.
            execute: runs the step; by default, `graphs` run in lockstep under PyTorch's autograd.
        """
        ranks = range(len(graphs))
        self.mesh, self.states, self._nudges, self._watched = mesh, states, nudges, watched
        self.inputs = [
            {n: leaf(shardings.get(n, UNSHARDED).local(t, place)) for n, t in call.named_tensors}
            for place in mesh.places()
        ]
        self.output_shardings = output_shardings(graphs[0], mesh) if mesh.axes else []
        self.values: list[dict[str, Argument]] = [{} for _ in ranks]
        self.grads: list[dict[str, Tensor]] = [{} for _ in ranks]
        placeholder_values = []
        for graph, state, inputs in zip(graphs, states, self.inputs, strict=True):
            by_path = {**state, **inputs}
            placeholder_values.append([by_path[n.meta["path"]] for n in graph.graph.nodes if n.op == "placeholder"])
        with torch.enable_grad(), autocasting(()):
            records = [self._recorder(rank) for rank in ranks]
            made = execute(placeholder_values) if execute else lockstep.run(graphs, placeholder_values, records)
            self.outputs = [[output for output in outputs if isinstance(output, Tensor)] for outputs in made]
            backward(self.outputs, mesh, self.output_shardings)

    def _recorder(self, rank: int) -> lockstep.Record:
        def record(node: fx.Node, value: Argument, args: list[Argument]) -> Argument:
            if self._nudges is not None:
                value = nudged(node, value, pytree.tree_leaves(args), self._nudges)
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
    seed: RngStates
    """The RNG states that each run begins with."""
    dtype: torch.dtype | None = None
    """The floating dtype that replaces all others, if any."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors on all devices that the trial runs on."""
        return (*self.model.parameters(), *self.call.tensors)

    def widened(self, dtype: torch.dtype) -> Trial:
        """A copy of the trial, with every floating dtype replaced by one."""
        call = replace(self.call, tensors=tuple(widened(t, dtype) for t in self.call.tensors))
        return replace(self, call=call, dtype=dtype)

    def unsharded(self) -> Results:
        """Runs the model itself."""
        set_rng_states(self.seed)
        return unsharded(self.model, self.call)

    def results(self, like: Results) -> Results:
        """Runs the captured graph; returns the same tensors as in `like`, in this trial's precision."""
        run = self.whole()
        inputs, grads = gradients(run.inputs[0]), gradients(run.states[0])
        return Results(
            run.outputs[0],
            like.output_names,
            {name: inputs[name] for name in like.input_grads},
            {name: grads[name] for name in like.parameter_grads},
            {name: run.states[0][name] for name in like.buffers},
        )

    def whole(self, nudges: Nudges | None = None, *, watched: bool = False) -> Run:
        """Runs the captured, unsharded graph."""
        return self._run(self._in_own_dtype([self.captured.graph]), {}, ALONE, nudges, watched=watched)

    def sharded(self, graphs: list[fx.GraphModule], made: Program, *, watched: bool = False) -> Run:
        """Runs the graphs of all ranks of a program under PyTorch's autograd, as the first call of training does."""
        graphs = [with_direct_collectives(graph) for graph in self._in_own_dtype(graphs)]
        return self._run(graphs, made.held, made.mesh, watched=watched)

    def without_gradients(self, graphs: list[fx.GraphModule], made: Program) -> Run:
        """Runs the graphs of all ranks as calls without gradients do."""
        graphs = self._in_own_dtype(graphs)
        with _default_dtype(self.dtype):
            execute = inference(graphs)
        return self._run(graphs, made.held, made.mesh, watched=False, execute=execute)

    def by_graphs(self, graphs: list[fx.GraphModule], made: Program) -> Run | None:
        """Runs the ranks' graphs of forward and backward, as later calls of training do, if they exist."""
        graphs = self._in_own_dtype(graphs)
        if not all(map(has_backward, graphs)):
            return None
        try:
            with _default_dtype(self.dtype):
                execute = training(graphs)
        except Exception as error:  # for any error, training works without these graphs
            log.warning("no graph of the backward: %s; only autograd's backward is compared", in_short(error))
            return None
        try:
            return self._run(graphs, made.held, made.mesh, watched=False, execute=execute)
        except NoBackwardError:
            return None

    def _in_own_dtype(self, graphs: list[fx.GraphModule]) -> list[fx.GraphModule]:
        """The graphs with this trial's dtype, if it has one."""
        return graphs if self.dtype is None else [widened_graph(graph, self.dtype) for graph in graphs]

    def _run(
        self,
        graphs: list[fx.GraphModule],
        shardings: Mapping[str, Sharding],
        mesh: Mesh,
        nudges: Nudges | None = None,
        *,
        watched: bool,
        execute: Execute | None = None,
    ) -> Run:
        set_rng_states(self.seed)
        states = [self._state(shardings, place) for place in mesh.places()]
        with _default_dtype(self.dtype):
            return Run(
                graphs, states, self.call, nudges, mesh=mesh, shardings=shardings, watched=watched, execute=execute
            )

    def _state(self, shardings: Mapping[str, Sharding], place: Place) -> dict[str, Tensor]:
        """A rank's parameters, buffers and constants, by all their names."""
        state = local_state(self.model, shardings, place)
        names = shared_names(self.model)
        if self.dtype is not None:
            state = {name: widened(tensor, self.dtype) for name, tensor in state.items()}
        constants = {path: widened(t, self.dtype or t.dtype) for path, t in self.captured.constants.items()}
        return constants | {name: state[tied[0]] for name, tied in names.items()}

    def gradients_of_values(self) -> Iterable[Tensor]:
        """The gradients of all values of the unsharded step."""
        return self.whole(watched=True).grads[0].values()

    def noise(self, output_names: Sequence[str]) -> dict[ComparedValue, float]:
        """The largest absolute change of each tensor of the unsharded step by rounding."""
        generator = torch.Generator().manual_seed(NUDGE_SEED)
        exact, noise = _places(self.whole(), output_names), dict[ComparedValue, float]()
        for nudges in [Nudges(generator), Nudges(generator, numbers=True)] * NOISE_TRIALS:
            for place, tensor in _places(self.whole(nudges), output_names).items():
                change = largest_difference(exact[place], tensor) if place in exact else 0.0
                noise[place] = max(noise.get(place, 0.0), change if change < float("inf") else 0.0)
        return noise


def _places(run: Run, output_names: Sequence[str]) -> dict[ComparedValue, Tensor]:
    """The floating tensors of an unsharded run by kind and name."""
    outputs = zip(output_names, run.outputs[0], strict=True)
    tensors: dict[Kind, Mapping[str, object]] = {
        "output": {name or "result": value for name, value in outputs},
        "buffer": run.states[0],
        "input gradient": gradients(run.inputs[0]),
        "parameter gradient": gradients(run.states[0]),
    }
    places: dict[ComparedValue, Tensor] = {}
    for kind, by_name in tensors.items():
        places.update({(kind, name): tensor for name, tensor in by_name.items() if is_float(tensor)})
    return places


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Sets the default dtype, for tensors that a graph creates without naming one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
