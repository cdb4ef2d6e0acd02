"""Runs the graphs of real ranks, after their last pass and with real kernels, in lockstep.

A call without gradients runs one graph (`inference`). In training, each segment of a rank's graph
is a step of autograd with its own forward and backward graph (`training`); one autograd tape spans
all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, fx

from torchshard.checking import lockstep
from torchshard.core.types import Context
from torchshard.custom_ops.fx_types import Args, Argument
from torchshard.distributed.group import ALONE
from torchshard.distributed.ranks import Ranks
from torchshard.ir.graph import placeholders, results_of
from torchshard.runtime.lazy_step import Steps, steps_of, without_gradients
from torchshard.runtime.step import RunGraph, Step

Values = Sequence[Sequence[Argument]]
"""For each rank, the values of its graph's placeholders."""
Execute = Callable[[Values], list[list[Argument]]]
"""Runs the graphs of all ranks; returns each rank's results."""


class NoBackwardError(Exception):
    """A backward graph is missing for the results that get gradients; real ranks then use autograd."""


def inference(graphs: Sequence[fx.GraphModule]) -> Execute:
    """Returns a function that runs the ranks' graphs without gradients."""
    made = [without_gradients(graph) for graph in graphs]

    def execute(values: Values) -> list[list[Argument]]:
        with torch.no_grad():
            # a view of a leaf made here claims to require a gradient, but has no autograd graph
            return [[r.detach() if isinstance(r, Tensor) else r for r in own] for own in _run(made, values)]

    return execute


def training(graphs: Sequence[fx.GraphModule]) -> Execute:
    """Returns a function that runs steps of the ranks' graphs under autograd.

    Raises:
        Exception: of any class, if a backward graph can't be made.
    """
    steps = [steps_of(graph, Ranks(ALONE)) for graph in graphs]
    return lambda values: _by_steps(graphs, steps, values)


def _run(made: Sequence[RunGraph], values: Values, *, by_kernels: bool = True) -> list[list[Argument]]:
    graphs, as_it_is = cast(Sequence[fx.GraphModule], made), [lambda node, value, args: value] * len(made)
    return lockstep.run(graphs, values, as_it_is, by_kernels=by_kernels)


def _by_steps(graphs: Sequence[fx.GraphModule], steps: Sequence[Steps], values: Values) -> list[list[Argument]]:
    """Runs the segments of all ranks, one after the other."""
    named: list[dict[str | None, Argument]] = [
        {None: None} | dict(zip((node.name for node in placeholders(graph.graph)), of_rank, strict=True))
        for graph, of_rank in zip(graphs, values, strict=True)
    ]
    for together in zip(*steps, strict=True):
        runs = [run for _, run in together]
        arguments = [[own[n] for n in part.arguments] for own, (part, _) in zip(named, together, strict=True)]
        found: Values
        if isinstance(runs[0], Step):
            found = _by_rank(_Together.apply(runs, *itertools.chain(*arguments)), len(runs))
        else:
            found = _run(runs, arguments, by_kernels=False)
        for own, (part, _), results in zip(named, together, found, strict=True):
            own.update(zip(part.results, results, strict=True))
    results = [[r.name if isinstance(r, fx.Node) else None for r in results_of(graph.graph)] for graph in graphs]
    return [[own[name] for name in names] for own, names in zip(named, results, strict=True)]


def _by_rank(values: Sequence[Argument], ranks: int) -> list[Sequence[Argument]]:
    """Splits a flat list of values, equally long for each rank, rank by rank."""
    count = len(values) // ranks
    return [values[rank * count : (rank + 1) * count] for rank in range(ranks)]


class _Together(torch.autograd.Function):
    """One autograd step that runs the same segment on all ranks."""

    @staticmethod
    def forward(ctx: Context, steps: Sequence[Step], *values: Argument) -> Args:
        given = steps[0].parts.given
        made = _run([step.forward for step in steps], _by_rank(values, len(steps)))
        ctx.steps, ctx.saved = steps, [own[len(given) :] for own in made]
        results = [own[: len(given)] for own in made]
        ctx.set_materialize_grads(False)  # the set of results with gradients decides which graph runs
        others = [r for own in results for r, is_given in zip(own, given, strict=True) if not is_given]
        ctx.mark_non_differentiable(*(r for r in others if isinstance(r, Tensor)))
        return tuple(itertools.chain(*results))

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        runs, arguments = [], []
        for step, saved, own in zip(ctx.steps, ctx.saved, _by_rank(gradients, len(ctx.steps)), strict=True):
            backward = step.backward_for(tuple(gradient is not None for gradient in own))
            if backward is None:
                raise NoBackwardError
            runs.append(backward.run)
            arguments.append([*(saved[i] for i in backward.saved), *(g for g in own if g is not None)])
        return (None, *itertools.chain(*_run(runs, arguments)))
