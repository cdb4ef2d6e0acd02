"""Describes runs of repeated blocks in a network of costs: the tables of one block, for the solver to chain."""

from __future__ import annotations

from collections.abc import Mapping

from torchshard.planner.elimination import Scope
from torchshard.planner.network import Chain, Decision, Network
from torchshard.planner.repeats import Repetition


class UnevenError(Exception):
    """Blocks of equal structure have different states, because the first and the last have other neighbours."""


def chain_of(network: Network, index: int, run: Repetition) -> Chain:
    """Describes the third block of a run, which represents all inner ones.

    The inner tables are those that hold a decision of the third block and none of the last. The decisions of the third
    block in tables that hold the last too are the chain's exit, and their twins one block earlier are its entry. To
    chain a block, its entry and exit must have the same states in the same order.

    Raises:
        UnevenError: they have not, so the blocks are to be planned one by one.
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
    """The decisions of a run, and which of its four planned blocks each is in."""
    places = ((name, network.folded.place(position)) for name, position in network.graph.nodes(data="position"))
    return {name: place[1] for name, place in places if place is not None and place[0] == index}


def _third_block(network: Network, block: Mapping[str, int]) -> tuple[list[Scope], set[str]]:
    """The inner tables of a run, and the decisions of the third block in tables that hold the last one too."""
    inner, leaving = list[Scope](), set[str]()
    for factor in network.factors:
        blocks = {block.get(name) for name in factor.scope}
        if {2, 3} <= blocks:
            leaving.update(name for name in factor.scope if block[name] == 2)
        elif 2 in blocks:
            inner.append(factor.scope)
    return inner, leaving


def _twins(network: Network, names: list[str], period: int) -> dict[str, str]:
    """Decisions -> those about the same node one block later, where there are any."""
    nodes = network.graph.nodes
    at = {Decision(data["kind"], data["position"], data["slot"]): name for name, data in nodes(data=True)}
    later = {
        name: Decision(nodes[name]["kind"], nodes[name]["position"] + period, nodes[name]["slot"]) for name in names
    }
    return {name: at[twin] for name, twin in later.items() if twin in at}
