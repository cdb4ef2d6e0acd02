"""What the collectives of one mesh axis send of weights that the ranks of later axes hold in slices.

Axes are planned one after the other, and each for whole weights. In HSDP the ranks of the later axis hold slices, and
what is summed over the earlier one are slices of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from torchshard.core.conversions import ConversionStep
from torchshard.core.words import Cut, local_shape
from torchshard.custom_ops.fx_types import Target
from torchshard.distributed.ops import is_collective
from torchshard.ir.graph import before_casts, is_weight, operands, sizes_as
from torchshard.planner.costs import Value
from torchshard.planner.predict import in_messages, segment_numbers
from torchshard.plans.data import Collective
from torchshard.plans.plan import Plan

Cuts: TypeAlias = dict[tuple[str, Target | str], Cut]
"""The name of a value and its conversion over an earlier axis -> how the ranks of a later one cut what that gives."""


def priced_as_slices(plans: Sequence[Plan]) -> list[Plan]:
    """The plans of the axes, in their order, with the prices of what each sends beside the later ones."""
    cuts = list(map(_cuts, plans))
    return [_priced(plan, cuts[i + 1 :]) for i, plan in enumerate(plans)]


def _priced(plan: Plan, later: Sequence[Cuts]) -> Plan:
    problem = plan.problem
    if problem is None or not later:
        return plan
    nodes, begun = {node.name: node for node in problem.graph.nodes}, set[object]()
    segments = segment_numbers(problem.graph, plan.choices, plan.layouts, plan.conversions)

    def priced(collective: Collective) -> Collective:
        key = collective.value, getattr(torch.ops.torchshard, collective.name).default
        found = tuple(each[key] for each in later if key in each)
        if collective.is_inside:
            return collective
        value = Value.converted(nodes[collective.value])
        step = ConversionStep(collective.name, collective.source, collective.target)
        sent = collective.forward, collective.backward, collective.again
        if found and is_weight(before_casts(nodes[collective.value])):
            value = _slice_of(value, found)
            sent = problem.model.sent(value, step)
        forward, backward, again = in_messages(value, step, sent, begun, segments.get(collective.consumers[0], 0))
        return replace(collective, forward=forward, backward=backward, again=again)

    with sizes_as(problem.sizes):
        return replace(plan, costs=replace(plan.costs, collectives=tuple(map(priced, plan.costs.collectives))))


def _slice_of(value: Value, cuts: tuple[Cut, ...]) -> Value:
    """A later axis' slice of a weight, which goes in messages of its own layer's slices."""
    shape, bucket = local_shape(value.shape, cuts), value.bucket
    if bucket is not None:
        bucket = bucket._replace(gathered=value.dtype) if bucket.layer else None
    return replace(value, shape=shape, nbytes=math.prod(shape) * value.dtype.itemsize, bucket=bucket)


def _cuts(plan: Plan) -> Cuts:
    nodes = plan.problem.graph.nodes if plan.problem is not None else ()
    return {
        (operands(node)[0].name, node.target): Cut(plan.choices[node.name].results[0], 0, plan.world_size)
        for node in nodes
        if is_collective(node.target) and node.name in plan.choices
    }
