"""Runs a captured call as a check needs it: the unsharded model, its captured graph, or the graphs of all ranks.

Each run begins with the same RNG states. A wider dtype may replace all floating dtypes, to tell rounding from errors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from torchshard.capture import Captured, Leaves, flatten_call, shared_names
from torchshard.checking.compare import ComparedValue, Kind, Results, gradients, largest_difference
from torchshard.checking.rounding import NUDGE_SEED, Nudges, widened, widened_graph
from torchshard.checking.running import Execute, NoBackwardError, inference, training
from torchshard.checking.steps import ALONE, Run, unsharded
from torchshard.compiler.program import Program
from torchshard.core.errors import in_short
from torchshard.core.mesh import Place
from torchshard.core.rng_states import RngStates, rng_states, set_rng_states
from torchshard.core.sharding import Sharding
from torchshard.ir.graph import is_float, is_tensor, results_of
from torchshard.passes import has_backward
from torchshard.runtime.step import with_direct_collectives
from torchshard.weights.materialize import local_state

log = logging.getLogger(__name__)
NOISE_TRIALS = 4
"""The number of runs, per kind of nudge, that measure the unsharded graph's rounding noise."""


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
        return self._run(self._in_own_dtype([self.captured.graph]), None, nudges, watched=watched)

    def sharded(self, graphs: list[fx.GraphModule], made: Program, *, watched: bool = False) -> Run:
        """Runs the graphs of all ranks of a program under PyTorch's autograd, as the first call of training does."""
        graphs = [with_direct_collectives(graph) for graph in self._in_own_dtype(graphs)]
        return self._run(graphs, made, watched=watched)

    def without_gradients(self, graphs: list[fx.GraphModule], made: Program) -> Run:
        """Runs the graphs of all ranks as calls without gradients do."""
        graphs = self._in_own_dtype(graphs)
        with _default_dtype(self.dtype):
            execute = inference(graphs)
        return self._run(graphs, made, watched=False, execute=execute)

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
            return self._run(graphs, made, watched=False, execute=execute)
        except NoBackwardError:
            return None

    def _in_own_dtype(self, graphs: list[fx.GraphModule]) -> list[fx.GraphModule]:
        """The graphs with this trial's dtype, if it has one."""
        return graphs if self.dtype is None else [widened_graph(graph, self.dtype) for graph in graphs]

    def _run(
        self,
        graphs: list[fx.GraphModule],
        made: Program | None,
        nudges: Nudges | None = None,
        *,
        watched: bool,
        execute: Execute | None = None,
    ) -> Run:
        set_rng_states(self.seed)
        shardings, mesh = ({}, ALONE) if made is None else (made.held, made.mesh)
        results = results_of(graphs[0].graph)
        of_each = [] if made is None else zip(results, made.sharding_of_results(graphs[0]), strict=True)
        of_results = [sharding for result, sharding in of_each if is_tensor(result)]
        states = [self._state(shardings, place) for place in mesh.places()]
        with _default_dtype(self.dtype):
            return Run(
                graphs,
                states,
                self.call,
                nudges,
                mesh=mesh,
                shardings=shardings,
                of_results=of_results,
                watched=watched,
                execute=execute,
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


def trial_of(model: nn.Module, captured: Captured, args: Sequence[object], kwargs: Mapping[str, object]) -> Trial:
    """Returns the trial of a call, in the model's own precision."""
    call = replace(flatten_call(model, args, kwargs), names=captured.inputs)
    return Trial(model, captured, call, rng_states((*model.parameters(), *call.tensors)))


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
