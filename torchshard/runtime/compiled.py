"""The graphs that a sharded model has captured: each ready to run on this rank, and kept under the key of its calls.

`compile_program` makes a rank's graph of a planned program; `GraphCache` finds the graph of a call, and drops those
that were called least recently, so that a model whose arguments change with each call does not fill the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from torchshard.capture import Condition, Conditions, ModelCall, Number, refuse_state_between, without_tools
from torchshard.compiler.program import Program
from torchshard.core.layouts import I, Layout
from torchshard.core.mesh import Coordinate
from torchshard.distributed.ranks import Ranks
from torchshard.ir.graph import is_kept_split, layout_of, result_layouts, results_of, uses_rng, writes
from torchshard.passes import direct, localized
from torchshard.planner.problem import PlannedAxis
from torchshard.plans.plan import Plan
from torchshard.runtime.call_key import CallKey
from torchshard.runtime.compilation import Compiler, can_compile
from torchshard.runtime.results_beside import results_beside
from torchshard.runtime.step import LazyStep, with_direct_collectives, without_gradients

log = logging.getLogger("torchshard.runtime.compiled")
MANY_GRAPHS = 16
"""A warning is logged at this many captures: perhaps an argument that is not a tensor changes with each call."""
MOST_GRAPHS = 64
"""At most this many graphs are kept."""


@dataclass(frozen=True)
class Compiled:
    """One captured graph, ready to run on this rank."""

    program: Program
    graph: fx.GraphModule
    """This rank's graph, to read: collectives are operators with names."""
    executable: fx.GraphModule
    """This rank's graph, to run: collectives are called without PyTorch's dispatcher."""
    state: tuple[str | Tensor, ...]
    """The names of parameters and buffers, and the constants, in the order of the graph's placeholders."""
    digest: int
    """The digest of its calls' key, which is the same on all ranks."""
    carried: tuple[tuple[Layout, torch.Size], ...]
    """The layout and the whole's shape of each result that a call leaves in its arguments."""
    uses_rng: bool
    """Whether it draws random numbers, so that the ranks' RNG states must be equal."""
    model_call: ModelCall
    """The call that it was captured for, without values."""
    ranks: Ranks
    _inference: dict[Compiler | None, Callable[..., Any]] = field(default_factory=dict)
    _training: dict[tuple[Compiler | None, Collection[str]], LazyStep] = field(default_factory=dict)

    @property
    def has_step_graphs(self) -> bool:
        """Whether calls that train run graphs of the forward and backward, and not autograd over the forward."""
        return any(step.has_graphs for step in self._training.values())

    def inference(self, compiler: Compiler | None) -> Callable[..., Any]:
        """What runs calls whose gradients are not wanted, compiled by a compiler or by none."""
        compiler = self._usable(compiler)
        if compiler not in self._inference:
            with without_tools():
                self._inference[compiler] = without_gradients(self.graph, compiler or direct)
        return self._inference[compiler]

    def training(self, compiler: Compiler | None, unsummed: Collection[str] = ()) -> LazyStep:
        """What runs the others, forward and backward.

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
    def result_layouts(self) -> tuple[Layout, ...]:
        """The layout of each result: whole, or a rank's part of the batch."""
        return result_layouts(self.graph.graph)

    @cached_property
    def results_beside(self) -> dict[int, tuple[int, ...]]:
        """Maps a result to the results computed from its value, but not from the tensor that the caller gets."""
        question = self.program.asked
        divides_batch = question is not None and bool(question.constraints.batch_parts)
        count = self.program.captured.changes.results
        return results_beside(self.graph.graph, count, all_leave=divides_batch)

    @cached_property
    def _can_compile(self) -> bool:
        return can_compile(self.graph)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next call, if nothing compiles it, leaves nothing behind until it communicates.

        It would if it drew random numbers, wrote to a buffer, or made a graph of the backward.
        """
        if not self._is_pure:
            return False
        return self.training(None).is_made if torch.is_grad_enabled() else None in self._inference

    @cached_property
    def plan(self) -> Plan:
        """The program's, with those of all axes of the mesh."""
        return self.program.priced(with_memory=False)

    @cached_property
    def _is_pure(self) -> bool:
        return not any(uses_rng(node) or writes(node) for node in self.graph.graph.nodes)

    def __deepcopy__(self, memo: dict[int, object]) -> Compiled:
        # A copied model may run this graph as it is: parameters are its arguments.
        return self


def graph_uses_rng(graph: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers."""
    return any(map(uses_rng, graph.graph.nodes))


class RankProgram(NamedTuple):
    """A program on its way to this rank's graph."""

    program: Program
    graph: fx.GraphModule
    """Of the last mesh axis, with its collectives, global sizes."""
    coordinate: Coordinate
    """This rank's on that axis."""
    of_batch: Sequence[PlannedAxis] = ()
    """The first rank's plans of the axes that divide the batch; the others follow them."""

    @staticmethod
    def of(program: Program, ranks: Ranks) -> RankProgram:
        """A program up to its last axis."""
        own = [ranks.groups[axis.name].coordinate for axis in program.axes]
        graph, of_first = program.along(own)
        return RankProgram(program, graph, own[-1], of_first)


def compile_program(
    made: RankProgram, key: CallKey, model_call: ModelCall, ranks: Ranks, device: torch.device | None
) -> Compiled:
    """A program with this rank's sizes, and its collectives called directly.

    Args:
        key: the key of the call that the program was captured for; `model_call` is that call without values.
        device: where the constants of the graph are put.
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
    """The names of the model's tensors, and the constants, that are the graph's first arguments."""
    constants = {path: t.to(device) for path, t in program.captured.constants.items()}
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
    return tuple(constants.get(n.meta["path"], n.meta["path"]) for n in nodes)


class GraphCache:
    """The graphs of one sharded model, by the key of their calls; the least recently called key is first."""

    def __init__(self) -> None:
        self._by_key: dict[CallKey, list[Compiled]] = {}
        self._conditions: dict[CallKey, Conditions] = {}
        self.captures = 0
        """How many graphs were captured, dropped ones included."""
        self.latest: Compiled | None = None
        """The graph that was captured last. It outlives `clear`, so that a moved model still shows its plan."""

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
        """The key with the numbers that forward takes from buffers in such calls, as far as they are known.

        Args:
            buffers: the model's tensors by name.
            new: conditions of a graph that was captured for the key, and the numbers that it is right for.
        """
        key = key._replace(numbers=())
        if new:
            self._conditions.setdefault(key, Conditions()).add(one for one, _ in new)
        if key not in self._conditions:
            return key
        numbers = self._conditions[key].numbers(buffers) | {one.text: (one.where, number) for one, number in new}
        return key._replace(numbers=tuple(numbers.values()))

    def find(self, key: CallKey, inputs: Sequence[Tensor | int]) -> Compiled | None:
        """The graph for a call, if there is one. The key becomes the one that was called last."""
        graphs = self._by_key.pop(key, None)
        if graphs is None:
            return None
        self._by_key[key] = graphs
        return next((compiled for compiled in graphs if compiled.program.assumes(inputs)), None)

    def add(self, key: CallKey, compiled: Compiled, latest_change: str) -> None:
        """Keeps a graph, and drops the oldest ones of the least recently called key if there are too many.

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
        """Drops all graphs: parameters have another dtype or device than the graphs were captured for."""
        self._by_key.clear()
        self._conditions.clear()

    def refuse_dependence(self, source: nn.Module, model_call: ModelCall, program: Program) -> None:
        """Checks that no call reads what a call of another key leaves in attributes.

        Raises:
            CaptureError: the new call reads what an earlier one leaves, or the other way round.
        """
        for other in self:
            assigned = tuple(dict.fromkeys(program.captured.assigned + other.program.captured.assigned))
            if assigned:
                refuse_state_between(source, model_call, other.model_call, assigned)
                refuse_state_between(source, other.model_call, model_call, assigned)
