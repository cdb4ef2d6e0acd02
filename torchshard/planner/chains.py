"""Describes runs of repeated blocks in a network of costs: the tables of one block, which the solver chains."""

from __future__ import annotations

from collections.abc import Mapping

from torchshard.planner.elimination import Scope
from torchshard.planner.network import Chain, Decision, Network
from torchshard.planner.repeats import Repetition


class UnevenError(Exception):
    """Blocks of equal structure have different states, because the first and last have different neighbours."""


def chain_of(network: Network, index: int, run: Repetition) -> Chain:
    """Describes the third block of a run, which represents all inner ones.

    The inner tables contain decisions of the third block, but not of the last. Decisions of the third block in tables
    that also contain the last form the chain's exit; their twins one block earlier form its entry. A block can be
    chained only if its entry and exit have the same states in the same order.

    Raises:
        UnevenError: the block can't be chained, so the blocks must be planned one by one.
    """
    nodes, block = network.graph.nodes, _blocks(network, index)
    later = _twins(network, [name for name in block if block[name] == 1], run.period)
    earlier = {after: before for before, after in later.items()}
    inner, leaving = _third_block(network, block)
    if not leaving <= earlier.keys():
        raise UnevenError(f"the blocks of the run at {run.start} read different values")
    held = {name for scope in inner for name in scope}
    first = {name for name in held if block.get(name) == 1}.union(earlier[name] for name in leaving)
    entry = tuple(name for name in nodes if name in first)
    for name in entry:
        if name not in later or nodes[name]["states"] != nodes[later[name]]["states"]:
            raise UnevenError(f"{name} of the run at {run.start}")
    shared = tuple(name for name in nodes if name in held and block.get(name) not in (1, 2))
    return Chain(run, tuple(inner), entry, tuple(later[name] for name in entry), shared)


def _blocks(network: Network, index: int) -> dict[str, int]:
    """Returns decision -> the planned block (0 to 3) that contains it, for the decisions of a run."""
    places = ((name, network.folded.place(position)) for name, position in network.graph.nodes(data="position"))
    return {name: place[1] for name, place in places if place is not None and place[0] == index}


def _third_block(network: Network, block: Mapping[str, int]) -> tuple[list[Scope], set[str]]:
    """Returns a run's inner tables, and the third block's decisions in tables that contain the last block too."""
    inner, leaving = list[Scope](), set[str]()
    for factor in network.factors:
        blocks = {block.get(name) for name in factor.scope}
        if {2, 3} <= blocks:
            leaving.update(name for name in factor.scope if block[name] == 2)
        elif 2 in blocks:
            inner.append(factor.scope)
    return inner, leaving


def _twins(network: Network, names: list[str], period: int) -> dict[str, str]:
    """Returns decision -> the decision about the same node one block later, if it exists."""
    nodes = network.graph.nodes
    at = {Decision(data["kind"], data["position"], data["slot"]): name for name, data in nodes(data=True)}
    later = {
        name: Decision(nodes[name]["kind"], nodes[name]["position"] + period, nodes[name]["slot"]) for name in names
    }
    return {name: at[twin] for name, twin in later.items() if twin in at}
