"""A rank's graph as a callable: the steps of its segments, made at the second call, or one graph without gradients."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial

import torch
from torch import Tensor, fx

from torchshard.core.garbage import without_garbage_collection
from torchshard.custom_ops.fx_types import Argument
from torchshard.distributed.ranks import Ranks
from torchshard.ir.editing import duplicate
from torchshard.ir.effects import written_state
from torchshard.ir.graph import placeholders, results_of
from torchshard.passes import Segment, direct, has_backward, schedule, segments, sums_wider
from torchshard.runtime.sent import Sent, on_all_ranks
from torchshard.runtime.step import RunGraph, Runnable, Step, with_direct_collectives

log = logging.getLogger("torchshard.runtime.step")
EAGER_CALLS = 1
"""The number of calls that run under PyTorch's autograd before the backward graph is made."""


def _all_sent(made: Iterable[tuple[Segment, RunGraph]]) -> list[Sent]:
    return [sent for _, step in made if isinstance(step, Step) for sent in step.sent]


Steps = list[tuple[Segment, RunGraph]]
"""The segments of a rank's graph, each with its callable: a `Step`, or the graph of a view."""


def steps_of(local: fx.GraphModule, ranks: Ranks, runnable: Runnable = direct, unsummed: Collection[str] = ()) -> Steps:
    """Returns the segments of a rank's graph, each with its callable for training."""
    written = {node.name for node in written_state(local.graph)}

    def made_of(part: Segment) -> RunGraph:
        if part.is_view:
            return with_direct_collectives(part.graph)
        return Step(part.graph, ranks, written, runnable, unsummed)

    with without_garbage_collection():
        return [(part, made_of(part)) for part in segments(local)]


def without_gradients(local: fx.GraphModule, runnable: Runnable = direct) -> RunGraph:
    """Returns the callable of a rank's graph for calls without gradients."""
    scheduled = duplicate(local)
    schedule(scheduled)
    return runnable(scheduled)


class LazyStep:
    """The segments of a rank's graph, made at its second call: a graph that is called once does not wait for them.

    They are made at the first call where autograd would not do: if backward recomputes values,
    which autograd would store; if the graph is compiled; if gradients are summed later, or in
    a different dtype from autograd's; and if hooks watch the saved values, because a checkpoint around
    the call runs it twice and compares.
    """

    def __init__(
        self,
        local: fx.GraphModule,
        under_autograd: RunGraph,
        ranks: Ranks,
        runnable: Runnable = direct,
        unsummed: Collection[str] = (),
    ) -> None:
        self._local, self._under_autograd, self._ranks = local, under_autograd, ranks
        self._runnable, self._unsummed = runnable, unsummed
        self._segments: Steps | None = None
        self._sources = [node.name for node in placeholders(local.graph)]
        self._results = [r.name if isinstance(r, fx.Node) else None for r in results_of(local.graph)]
        again = any("recompute" in node.meta or "gathered_again" in node.meta for node in local.graph.nodes)
        self._is_asked_for = runnable is not direct or again
        """Whether the user requested a feature that only the graphs have: recomputation or compilation."""
        self._eager_calls = 0 if self._is_asked_for or unsummed or sums_wider(local) else EAGER_CALLS
        """The number of calls left before the graphs are made."""
        self.is_made = not has_backward(local)
        """Whether later calls run in the same way as the latest one."""
        if self.is_made and self._is_asked_for and any(node.meta.get("needs_grad") for node in local.graph.nodes):
            log.warning("no graph of the backward, for a call is kept whole: nothing is computed again, or compiled")

    @property
    def has_graphs(self) -> bool:
        """Whether there are graphs of forward and backward."""
        return self._segments is not None

    def next_call(self) -> RunGraph:
        """Returns the callable for the next call; at the second call, all ranks make the graphs together."""
        # `_top_saved_tensors_default_hooks`: no public reader of the hooks on saved tensors (PyTorch 2.13.0).
        watched = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if not self.is_made and (watched or not self._eager_calls):
            self.is_made = True
            level = logging.WARNING if self._is_asked_for else logging.INFO
            make = partial(steps_of, self._local, self._ranks, self._runnable, self._unsummed)
            self._segments = on_all_ranks(self._ranks, make, _all_sent, level)
        self._eager_calls -= not self.is_made
        return self._under_autograd if self._segments is None else self._run

    def parameters(self, *tensors: Tensor) -> list[Tensor]:
        """Returns the parameters among a call's arguments of which backward returns partial gradients."""
        values = dict(zip(self._sources, tensors, strict=True))
        steps = [(segment, step) for segment, step in self._segments or () if isinstance(step, Step)]
        return [values[segment.arguments[part.argument]] for segment, step in steps for part in step.parts.parts]

    def _run(self, *tensors: Tensor, keeps: bool = False) -> tuple[Argument, ...]:
        """Runs the segments; returns the graph's results."""
        values: dict[str | None, Argument] = dict(zip(self._sources, tensors, strict=True))
        values[None] = None
        for segment, step in self._segments or ():
            how = {"keeps": True} if keeps and isinstance(step, Step) else {}
            made = step(*(values[name] for name in segment.arguments), **how)
            values.update(zip(segment.results, made, strict=True))
        return tuple(values[name] for name in self._results)
