"""Finds the collectives in a rank's graphs: a single operator, or in the graphs of a step a begin and a wait node."""

from __future__ import annotations

from torch import fx

from torchshard.compiler.memory import memory_of_rank
from torchshard.core.conversions import Conversion
from torchshard.ops import OPS, Begin, wait
from torchshard.plans.plan import Plan
from torchshard.report.explain import rank_graph


def predicted_memory(plan: Plan, rank: int = 0) -> dict[str, float]:
    """Returns the bytes of a step on a rank: 'parameters', 'gradients', 'optimizer', 'activations' and 'peak'."""
    return memory_of_rank(rank_graph(plan, rank), plan.optimizer)


def collective(node: fx.Node) -> Conversion | None:
    """Returns the collective that a node runs as a single operator; None for other nodes."""
    return OPS.get(node.target)


def begun(node: fx.Node) -> Conversion | None:
    """Returns the collective that a node of a step's graph begins; None for other nodes."""
    return OPS[node.target.op] if isinstance(node.target, Begin) else None


def awaited(node: fx.Node) -> fx.Node | None:
    """Returns the node that began the collective that this node waits for, if it is a wait node."""
    first = node.args[0] if node.target is wait else None
    return first if isinstance(first, fx.Node) else None


def collectives(module: fx.GraphModule) -> list[str]:
    """Returns the names of the collectives that a graph runs or begins, in order: 'copy', 'reduce', 'gather', ..."""
    found = (collective(node) or begun(node) for node in module.graph.nodes)
    return [row.name for row in found if row is not None]
