"""Prices one axis' collectives of weights that the ranks of later axes store in slices.

The axes are planned one after the other, each for full weights. In HSDP, the ranks of the later
axis store slices, so the sums over the earlier axis are of slices of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from torchshard.core.conversions import ConversionStep
from torchshard.core.layouts import Shard
from torchshard.core.sharding import Cut, local_shape
from torchshard.custom_ops.fx_types import Target
from torchshard.ir.fake_values import sizes_as
from torchshard.ir.graph import before_casts, is_weight, operands
from torchshard.ops import is_collective
from torchshard.planner.predict import in_messages, segment_numbers
from torchshard.planner.problem import PlannedAxis
from torchshard.planner.properties import Value
from torchshard.plans.costs import Collective

Cuts: TypeAlias = dict[tuple[str, Target | str], Cut]
"""(name of a value, conversion over an earlier axis) -> the cut of the result over a later axis."""


def priced_as_slices(solutions: Sequence[PlannedAxis]) -> list[PlannedAxis]:
    """The plans of all axes, in order, with the collectives of each priced for the later axes' slices."""
    cuts = list(map(_cuts, solutions))
    sliced = {path for path, layout in solutions[-1].plan.parameters.items() if isinstance(layout, Shard)}
    return [_priced(each, cuts[i + 1 :], sliced) for i, each in enumerate(solutions)]


def _priced(solution: PlannedAxis, later: Sequence[Cuts], sliced: Collection[str]) -> PlannedAxis:
    plan, problem = solution
    if not later:
        return solution
    nodes, begun = {node.name: node for node in problem.graph.nodes}, set[object]()
    cut = {name for each in later for name, _ in each}
    segments = segment_numbers(problem.graph, plan.choices, plan.layouts, plan.conversions)

    def priced(collective: Collective) -> Collective:
        key = collective.value, getattr(torch.ops.torchshard, collective.name).default
        found = tuple(each[key] for each in later if key in each)
        if collective.is_inside:
            return collective
        node = nodes[collective.value]
        planned, source = Value.converted(node), before_casts(node)
        step, value = ConversionStep(collective.name, collective.source, collective.target), planned
        if value.bucket is not None and source.meta["path"] in sliced:
            # a layer's slices are gathered together; a weight that was gathered earlier is sent
            # separately
            is_joined = found and value.bucket.layer
            value = replace(value, bucket=value.bucket._replace(gathered=value.dtype) if is_joined else None)
        if found and is_weight(source):
            value = _slice_of(value, found)
        elif collective.value not in cut and not is_weight(source):
            with sizes_as({}):  # later axes have joined their parts of the batch
                value = Value.converted(node)
        sent = collective.forward, collective.backward, collective.again
        if value != planned:
            sent = problem.model.sent(value, step)
        forward, backward, again = in_messages(value, step, sent, begun, segments.get(collective.consumers[0], 0))
        return replace(collective, forward=forward, backward=backward, again=again)

    with sizes_as(problem.sizes):
        costs = replace(plan.costs, collectives=tuple(map(priced, plan.costs.collectives)))
    return PlannedAxis(replace(plan, costs=costs), problem)


def _slice_of(value: Value, cuts: tuple[Cut, ...]) -> Value:
    """A later axis' slice of a weight."""
    shape = local_shape(value.shape, cuts)
    return replace(value, shape=shape, nbytes=math.prod(shape) * value.dtype.itemsize)


def _cuts(solution: PlannedAxis) -> Cuts:
    plan, nodes = solution.plan, solution.problem.graph.nodes
    found = [(n, plan.choices[n.name].results[0]) for n in nodes if is_collective(n.target) and n.name in plan.choices]
    return {
        (operands(node)[0].name, node.target): Cut(layout, 0, plan.world_size)
        for node, layout in found
        if isinstance(layout, Shard)
    }
