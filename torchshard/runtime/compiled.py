"""The captured graphs of a sharded model, ready to run on this rank, by the key of their calls.

`compile_program` turns a planned program into this rank's graph. `GraphCache` finds the graph for a
call and drops the least recently called ones, so a model whose arguments change with each call does
not fill the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from torchshard.capture import Condition, Conditions, ModelCall, Number, refuse_state_between, without_tools
from torchshard.compiler.program import Program
from torchshard.core.layouts import I, Layout
from torchshard.core.mesh import Coordinate
from torchshard.core.sharding import Sharding
from torchshard.distributed.ranks import Ranks
from torchshard.ir.effects import is_kept_split, uses_rng, writes
from torchshard.ir.graph import layout_of, results_of
from torchshard.passes import direct, localized
from torchshard.planner.problem import PlannedAxis
from torchshard.plans.plan import Plan
from torchshard.runtime.call_key import CallKey
from torchshard.runtime.compilation import Compiler, can_compile
from torchshard.runtime.lazy_step import LazyStep, without_gradients
from torchshard.runtime.results_beside import results_beside
from torchshard.runtime.step import RunGraph, with_direct_collectives

log = logging.getLogger("torchshard.runtime.compiled")
MANY_GRAPHS = 16
"""The number of captures that triggers a warning: a non-tensor argument may change with each call."""
MOST_GRAPHS = 64
"""The maximum number of graphs to keep."""


@dataclass(frozen=True)
class Compiled:
    """One captured graph, ready to run on this rank."""

    program: Program
    graph: fx.GraphModule
    """This rank's graph, for reading: collectives are operators with names."""
    executable: fx.GraphModule
    """This rank's graph, for running: collectives bypass PyTorch's dispatcher."""
    state: tuple[str | Tensor, ...]
    """The names of parameters and buffers, and the constants, in the order of the graph's placeholders."""
    digest: int
    """The digest of its call key, equal on all ranks."""
    carried: tuple[tuple[Layout, torch.Size], ...]
    """(layout, global shape) of each carried value; the shape is empty for one that is not split."""
    uses_rng: bool
    """Whether the graph draws random numbers; the ranks' RNG states must then be equal."""
    model_call: ModelCall
    """The call that the graph was captured for, without values."""
    ranks: Ranks
    _inference: dict[Compiler | None, RunGraph] = field(default_factory=dict)
    _training: dict[tuple[Compiler | None, Collection[str]], LazyStep] = field(default_factory=dict)

    @property
    def has_step_graphs(self) -> bool:
        """Whether training calls run forward and backward graphs, instead of autograd over the forward."""
        return any(step.has_graphs for step in self._training.values())

    def inference(self, compiler: Compiler | None) -> RunGraph:
        """Returns the callable for calls without gradients, compiled if `compiler` can compile the graph."""
        compiler = self._usable(compiler)
        if compiler not in self._inference:
            with without_tools():
                self._inference[compiler] = without_gradients(self.graph, compiler or direct)
        return self._inference[compiler]

    def training(self, compiler: Compiler | None, unsummed: Collection[str] = ()) -> LazyStep:
        """Returns the callable for calls with gradients: forward and backward.

        Args:
            unsummed: the groups over which gradients of parameters are summed later.
        """
        key = self._usable(compiler), unsummed
        if key not in self._training:
            self._training[key] = LazyStep(self.graph, self.executable, self.ranks, key[0] or direct, unsummed)
        return self._training[key]

    def _usable(self, compiler: Compiler | None) -> Compiler | None:
        return compiler if compiler is not None and self._can_compile else None

    @cached_property
    def result_shardings(self) -> list[Sharding]:
        """The sharding of each result over the axes that split inputs."""
        return self.program.sharding_of_results(self.graph)

    @cached_property
    def results_beside(self) -> dict[int, tuple[int, ...]]:
        """Maps a result to the results computed from its value, but not from the caller's tensor."""
        question = self.program.asked
        divides_batch = question is not None and bool(question.constraints.batch_parts)
        count = self.program.captured.changes.results
        return results_beside(self.graph.graph, count, all_leave=divides_batch)

    @cached_property
    def _can_compile(self) -> bool:
        return can_compile(self.graph)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next call, if uncompiled, has no side effects until it communicates.

        Side effects are random draws, writes to buffers, and the making of a backward graph.
        """
        if not self._is_pure:
            return False
        return self.training(None).is_made if torch.is_grad_enabled() else None in self._inference

    @cached_property
    def plan(self) -> Plan:
        """The program's plan, over all mesh axes."""
        return self.program.priced(with_memory=False)

    @cached_property
    def _is_pure(self) -> bool:
        return not any(uses_rng(node) or writes(node) for node in self.graph.graph.nodes)

    def __deepcopy__(self, memo: dict[int, object]) -> Compiled:
        # A copied model can run the same graph: parameters are its arguments.
        return self


def graph_uses_rng(graph: fx.GraphModule) -> bool:
    """Returns whether a graph draws random numbers."""
    return any(map(uses_rng, graph.graph.nodes))


class RankProgram(NamedTuple):
    """A program with the graph that this rank will localize."""

    program: Program
    graph: fx.GraphModule
    """The graph with the collectives of all axes, and sizes that are global over the last axis."""
    coordinate: Coordinate
    """This rank's coordinate on the last axis."""
    of_batch: Sequence[PlannedAxis] = ()
    """The first rank's plans for the axes that split the batch; the other ranks' plans follow them."""

    @staticmethod
    def of(program: Program, ranks: Ranks) -> RankProgram:
        """Splits a program's graph for this rank over all axes, up to the local sizes of the last one."""
        own = [ranks.groups[axis.name].coordinate for axis in program.axes]
        graph, of_first = program.along(own)
        return RankProgram(program, graph, own[-1], of_first)


def compile_program(
    made: RankProgram, key: CallKey, model_call: ModelCall, ranks: Ranks, device: torch.device | None
) -> Compiled:
    """Localizes a program's graph for this rank, and makes the collectives direct calls.

    Args:
        key: the key of the call that was captured; `model_call` is that call without values.
        device: the device for the graph's constants.
    """
    program, graph = made.program, localized(made.graph, made.coordinate)
    executable = with_direct_collectives(graph)
    return Compiled(
        program,
        graph,
        executable=executable,
        state=_graph_state(program, graph, device),
        digest=key.digest,
        carried=_carried(program),
        uses_rng=graph_uses_rng(program.graph),
        model_call=model_call,
        ranks=ranks,
    )


def _carried(program: Program) -> tuple[tuple[Layout, torch.Size], ...]:
    values = results_of(program.graph.graph)[program.captured.changes.results :]
    return tuple(
        (layout_of(value), value.meta["val"].shape)
        if isinstance(value, fx.Node) and is_kept_split(value)
        else (I, torch.Size())
        for value in values
    )


def _graph_state(program: Program, graph: fx.GraphModule, device: torch.device | None) -> tuple[str | Tensor, ...]:
    """Returns the first arguments of a graph: the names of the model's tensors, and the constants."""
    constants = {path: t.to(device) for path, t in program.captured.constants.items()}
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
    return tuple(constants.get(n.meta["path"], n.meta["path"]) for n in nodes)


class GraphCache:
    """The graphs of one sharded model by call key, least recently called first."""

    def __init__(self) -> None:
        self._by_key: dict[CallKey, list[Compiled]] = {}
        self._conditions: dict[CallKey, Conditions] = {}
        self.captures = 0
        """The number of captures, including graphs that were dropped."""
        self.latest: Compiled | None = None
        """The last captured graph. `clear` keeps it, so a moved model still shows its plan."""

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Compiled]:
        for graphs in self._by_key.values():
            yield from graphs

    def __deepcopy__(self, memo: dict[int, object]) -> GraphCache:
        # The graphs are not copied: their constants and layouts belong to the parameters of the original.
        copied = GraphCache()
        copied.captures, copied.latest = self.captures, self.latest
        return copied

    def with_numbers(
        self, key: CallKey, buffers: Mapping[str, Tensor], new: Sequence[tuple[Condition, Number]] = ()
    ) -> CallKey:
        """Returns the key with the known numbers that forward reads from buffers in such calls.

        Args:
            buffers: the model's tensors by name.
            new: conditions of a graph captured for the key, and the numbers for which it is correct.
        """
        key = key._replace(numbers=())
        if new:
            self._conditions.setdefault(key, Conditions()).add(one for one, _ in new)
        if key not in self._conditions:
            return key
        numbers = self._conditions[key].numbers(buffers) | {one.text: (one.where, number) for one, number in new}
        return key._replace(numbers=tuple(numbers.values()))

    def find(self, key: CallKey, inputs: Sequence[Tensor | int]) -> Compiled | None:
        """Returns the graph for a call, if any, and moves its key to the most recent place."""
        graphs = self._by_key.pop(key, None)
        if graphs is None:
            return None
        self._by_key[key] = graphs
        return next((compiled for compiled in graphs if compiled.program.assumes(inputs)), None)

    def add(self, key: CallKey, compiled: Compiled, latest_change: str) -> None:
        """Adds a graph; beyond `MOST_GRAPHS`, drops the oldest ones of the least recently called key.

        Args:
            latest_change: the attribute that changed last, for the warning; '' if none did.
        """
        self._by_key.setdefault(key, []).append(compiled)
        self.latest = compiled
        self.captures += 1
        if self.captures == MANY_GRAPHS:
            cause = latest_change or "an argument that is not a tensor"
            log.warning("%d graphs captured: perhaps %s changes with each call", MANY_GRAPHS, cause)
        while len(self) > MOST_GRAPHS:
            oldest = next(iter(self._by_key))
            self._by_key[oldest].pop(0)
            if not self._by_key[oldest]:
                del self._by_key[oldest]
                if all(key._replace(numbers=()) != oldest._replace(numbers=()) for key in self._by_key):
                    self._conditions.pop(oldest._replace(numbers=()), None)

    def clear(self) -> None:
        """Drops all graphs: they were captured for parameters of another dtype or device."""
        self._by_key.clear()
        self._conditions.clear()

    def refuse_dependence(self, source: nn.Module, model_call: ModelCall, program: Program) -> None:
        """Checks that no call reads attributes that a call with another key assigns.

        Raises:
            CaptureError: the new call reads attributes that an earlier one assigns, or vice versa.
        """
        for other in self:
            assigned = tuple(dict.fromkeys(program.captured.assigned + other.program.captured.assigned))
            if assigned:
                refuse_state_between(source, model_call, other.model_call, assigned)
                refuse_state_between(source, other.model_call, model_call, assigned)
