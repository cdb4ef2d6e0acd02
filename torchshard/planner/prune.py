"""Removes states that an optimum does not need, before solving. The optimal cost stays the same at any price.

A state is removed if it is impossible with every state of some neighbour (arc consistency), or if another state of its
decision never costs more, in any state of the neighbours (dead-end elimination: Desmet and others, 1992).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from torchshard.core.layouts import I
from torchshard.planner.elimination import Scope, Table
from torchshard.planner.network import Network


def prune(network: Network) -> str | None:
    """Removes states and their table entries; returns a decision without remaining states, if any."""
    graph = network.graph
    times = {scope: chain.count for chain in network.chains for scope in chain.scopes}
    linked = {v for chain in network.chains for v in (*chain.entry, *chain.exit)}  # their states must stay equal
    waiting: dict[str, None] = dict.fromkeys(graph)
    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        if name in linked:
            continue
        kept = _kept(network, name, times)
        if not kept:
            return name
        if len(kept) < len(graph.nodes[name]["states"]):
            _keep(network, name, kept)
            waiting.update(dict.fromkeys(graph[name]))
    return None


def keep_shared_whole(network: Network) -> None:
    """Keeps a single state of each value without gradient that all blocks of a run share, such as a mask.

    In this state the value is computed replicated, and blocks slice it as required, which sends no data. With all
    states, the tables that a run chains may be too large: they span the states of all shared values.
    """
    for name in {v: None for chain in network.chains for v in chain.shared}:
        data = network.graph.nodes[name]
        if data["kind"] == "value" and not network.folded.nodes[data["position"]].meta.get("needs_grad"):
            whole = [i for i, (produced, _) in enumerate(data["states"]) if produced == I]
            if whole:
                _keep(network, name, [max(whole, key=lambda i: len(data["states"][i][1]))])


def _keep(network: Network, name: str, kept: list[int]) -> None:
    """Removes all states of a decision except the kept ones."""
    data = network.graph.nodes[name]
    data["states"] = [data["states"][i] for i in kept]
    for costs, axis in ((data, 0), *((edge, edge["ends"].index(name)) for edge in network.graph[name].values())):
        costs["seconds"] = costs["seconds"].take(kept, axis)
        costs["nbytes"] = None if costs["nbytes"] is None else costs["nbytes"].take(kept, axis)


def _kept(network: Network, name: str, times: Mapping[Scope, int]) -> list[int]:
    """Returns the states that may be part of an optimum."""
    rows = list(_rows(network, name, times))
    alive = np.ones(len(network.graph.nodes[name]["states"]), dtype=bool)
    for seconds, _, _ in rows:
        alive &= np.isfinite(seconds).any(1)
    states = np.flatnonzero(alive)
    if len(states) < 2:
        return [int(i) for i in states]
    worst = np.zeros((len(states), len(states)))  # extra cost of the second state over the first
    heavier = np.zeros_like(worst)
    for seconds, nbytes, count in rows:
        worst += count * _worst(seconds[states])
        if nbytes is not None:
            heavier += count * _worst(nbytes[states])
    better = (worst <= 0) & (heavier <= 0)
    np.fill_diagonal(better, False)
    dropped = np.zeros(len(states), dtype=bool)
    for a in range(len(states) - 1, -1, -1):
        dropped[a] = bool((better[a] & ~dropped).any())
    return [int(i) for i in states[~dropped]]


def _rows(network: Network, name: str, times: Mapping[Scope, int]) -> Iterator[tuple[Table, Table | None, int]]:
    """Yields the tables of a decision and its edges, one row per state, with the number of blocks they represent."""
    data = network.graph.nodes[name]
    count = len(data["states"])
    for scope, costs in (((name,), data), *((edge["ends"], edge) for edge in network.graph[name].values())):
        seconds, nbytes = costs["seconds"], costs["nbytes"]
        if scope[0] != name:
            seconds, nbytes = seconds.T, None if nbytes is None else nbytes.T
        yield seconds.reshape(count, -1), None if nbytes is None else nbytes.reshape(count, -1), times.get(scope, 1)


def _worst(costs: Table) -> Table:
    """Returns [a, b]: the largest extra cost of b over a, among the neighbours' states in which a is possible."""
    with np.errstate(invalid="ignore"):
        more = costs[None, :, :] - costs[:, None, :]
    more = np.where(np.isposinf(costs)[:, None, :], -np.inf, more)
    return more.max(-1)
