"""What a step takes beside its ops and its collectives: other hosts, the optimizer, copies of slices, and the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchshard.core.layouts import I
from torchshard.core.sharding import Cut, Cuts, local_shape
from torchshard.ir.fake_values import hint
from torchshard.ir.graph import before_casts, is_weight, placeholders
from torchshard.planner.problem import PlannedAxis
from torchshard.plans.machine import Machine
from torchshard.plans.optimizers import OPTIMIZERS

STRAGGLING = 0.006
"""What a step takes longer for each doubling of the hosts, whose slowest all others wait for: FSDP of Llama 3 8B on 16
hosts is 2.3 to 2.7 % slower than on one (torchtitan, llama3_h100_202412)."""


def beside_ops(solutions: Sequence[PlannedAxis], device: float, kernels: int) -> dict[str, float]:
    """Returns the seconds of a step beside its ops and collectives, by cause.

    Args:
        solutions: the mesh axes' plans, in the order in which the graph is split.
        device: the seconds of the ops and collectives.
        kernels: the first axis' `PlanningProblem.kernels`.
    """
    machine = solutions[0].problem.model.machine
    ranks = math.prod(plan.world_size for plan, _ in solutions)
    found = {
        "the slowest host": device * STRAGGLING * math.log2(max(ranks / machine.domain, 1)),
        "the optimizer": _optimizer_seconds(solutions, machine),
        "copies of slices": 2 * _slices_bytes(solutions) / machine.memory_bandwidth,
    }
    started = kernels + sum(c.calls for plan, _ in solutions for c in plan.costs.collectives) if kernels else 0
    return found | {"waiting for the host": max(started * machine.host_overhead - device, 0.0)}


class _Weight(NamedTuple):
    """A trained weight, with its slice on the first rank, which has the most."""

    shape: tuple[int, ...]
    itemsize: int
    cuts: Cuts

    @property
    def ranks(self) -> int:
        """The number of ranks that it is split over."""
        return math.prod(cut.size for cut in self.cuts if cut.layout != I)


def _trained_weights(solutions: Sequence[PlannedAxis]) -> list[_Weight]:
    found = dict[str, _Weight]()  # tied ones once
    for node in placeholders(solutions[0].problem.graph):
        if is_weight(node) and node.meta.get("needs_grad"):
            path, value = node.meta["path"], node.meta["val"]
            cuts = tuple(Cut(plan.layouts.get(path, I), 0, plan.world_size) for plan, _ in solutions)
            found[path] = _Weight(tuple(map(hint, value.shape)), value.dtype.itemsize, cuts)
    return list(found.values())


def _optimizer_seconds(solutions: Sequence[PlannedAxis], machine: Machine) -> float:
    """The seconds of an optimizer's step on the rank with the most trained weights."""
    name = solutions[0].plan.costs.optimizer
    if name is None:
        return 0.0
    optimizer, weights = OPTIMIZERS[name], _trained_weights(solutions)
    moved = sum(math.prod(local_shape(w.shape, w.cuts)) * optimizer.moved(w.itemsize) for w in weights)
    seconds = moved / min(machine.memory_bandwidth, machine.optimizer_bandwidth)
    if not (optimizer.iterations and weights):
        return seconds
    # one of the ranks that a matrix is split over gets it, multiplies it, and deals it out
    flops = [optimizer.flops(math.prod(w.shape[:-1]), w.shape[-1]) for w in weights]
    busiest = max(*flops, sum(n / w.ranks for n, w in zip(flops, weights, strict=True)))
    sizes = [math.prod(w.shape) * optimizer.sent(w.itemsize) for w in weights]
    sent = sum(n * (w.ranks - 1) / w.ranks**2 for n, w in zip(sizes, weights, strict=True))
    ranks = math.prod(plan.world_size for plan, _ in solutions)
    sends = machine.sends("all_to_all", sum(sizes), sent, ranks) if sent else 0.0
    return seconds + busiest / machine.flops + sends


def _slices_bytes(solutions: Sequence[PlannedAxis]) -> float:
    """The bytes that pass the buffers of the messages of weights and their gradients over the batch's axes."""
    sent = 0.0
    for plan, problem in solutions:
        nodes = {node.name: node for node in problem.graph.nodes} if plan.data else {}
        ours = [c for c in plan.costs.collectives if c.value in nodes and is_weight(before_casts(nodes[c.value]))]
        sent += sum(c.nbytes for c in ours)
    return sent
