"""What a step takes beside its ops and its collectives: other hosts, the optimizer, copies of slices, and the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchshard.core.layouts import I
from torchshard.core.sharding import Cut, local_shape
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


def _optimizer_seconds(solutions: Sequence[PlannedAxis], machine: Machine) -> float:
    """The seconds of an optimizer's step on the rank with the most trained weights.

    It reads and writes memory; one that reads full matrices also multiplies them, each on one of the ranks that have
    its slices, and moves it there and back.
    """
    name, ranks = solutions[0].plan.costs.optimizer, math.prod(plan.world_size for plan, _ in solutions)
    if name is None:
        return 0.0
    optimizer, moved, flops, largest, sent, whole = OPTIMIZERS[name], dict[str, float](), 0.0, 0.0, 0.0, 0.0
    for node in placeholders(solutions[0].problem.graph):
        path, value = node.meta["path"], node.meta["val"]
        if not is_weight(node) or not node.meta.get("needs_grad") or path in moved:
            continue
        shape = tuple(map(hint, value.shape))
        cuts = tuple(Cut(plan.layouts.get(path, I), 0, plan.world_size) for plan, _ in solutions)
        moved[path] = math.prod(local_shape(shape, cuts)) * optimizer.moved(value.dtype.itemsize)
        owners = math.prod(cut.size for cut in cuts if cut.layout != I)
        of_matrix = optimizer.flops(math.prod(shape[:-1]), shape[-1])
        flops, largest = flops + of_matrix / owners, max(largest, of_matrix)
        nbytes = math.prod(shape) * optimizer.sent(value.dtype.itemsize)
        whole, sent = whole + nbytes, sent + nbytes * (owners - 1) / owners**2
    seconds = sum(moved.values()) / min(machine.memory_bandwidth, machine.optimizer_bandwidth)
    seconds += max(flops, largest) / machine.flops
    return seconds + (machine.sends("all_to_all", whole, sent, ranks) if sent else 0.0)


def _slices_bytes(solutions: Sequence[PlannedAxis]) -> float:
    """The bytes that pass the buffers of the messages of weights and their gradients over the batch's axes."""
    sent = 0.0
    for plan, problem in solutions:
        nodes = {node.name: node for node in problem.graph.nodes} if plan.data else {}
        ours = [c for c in plan.costs.collectives if c.value in nodes and is_weight(before_casts(nodes[c.value]))]
        sent += sum(c.nbytes for c in ours)
    return sent
