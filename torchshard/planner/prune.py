"""Removes states that no best plan has, before anything is solved: `prune` leaves the optimum the same at any price.

A state is removed where it is impossible beside every state of some neighbour (arc consistency), or where another state
of its variable costs no more whatever the neighbours do (dead-end elimination: Desmet and others, 1992).
"""

from __future__ import annotations

import numpy as np

from torchshard.core.layouts import I
from torchshard.planner.elimination import Table
from torchshard.planner.network import Factor, Network


def prune(network: Network) -> int | None:
    """Removes states, and their entries of the factors' tables; returns a variable with none left, if there is one."""
    around: dict[int, list[int]] = {}
    for f, factor in enumerate(network.factors):
        for v in factor.scope:
            around.setdefault(v, []).append(f)
    times = dict.fromkeys(range(len(network.factors)), 1)
    for chain in network.chains:
        times.update(dict.fromkeys(chain.factors, chain.count))
    linked = {v for chain in network.chains for v in (*chain.entry, *chain.exit)}  # their states must stay alike
    waiting = dict.fromkeys(around)
    while waiting:
        variable = next(iter(waiting))
        del waiting[variable]
        if variable in linked:
            continue
        kept = _kept(network, variable, around[variable], times)
        if not kept:
            return variable
        if len(kept) == len(network.states[variable]):
            continue
        factors = [network.factors[f] for f in around[variable]]
        _keep(network, variable, kept, factors)
        for factor in factors:
            waiting.update(dict.fromkeys(v for v in factor.scope if v != variable))
    return None


def keep_shared_whole(network: Network) -> None:
    """Keeps of values that all blocks of a run share, such as masks and tables of rotations, a single state.

    That is to compute it whole, and to cut out of it what blocks ask for: where no gradient flows back, nothing is sent
    for that. What a run chains are tables over all states of these values together, which may be too large.
    """
    shared = {v for chain in network.chains for v in chain.shared}
    for (kind, position, _), variable in network.keys.items():
        if kind == "value" and variable in shared and not network.folded.nodes[position].meta.get("needs_grad"):
            whole = [i for i, (produced, _) in enumerate(network.states[variable]) if produced == I]
            if whole:
                most = max(whole, key=lambda i: len(network.states[variable][i][1]))
                _keep(network, variable, [most], [f for f in network.factors if variable in f.scope])


def _keep(network: Network, variable: int, kept: list[int], around: list[Factor]) -> None:
    """Removes all states of a variable but some, given the factors that hold it."""
    network.states[variable] = [network.states[variable][i] for i in kept]
    for factor in around:
        axis = factor.scope.index(variable)
        factor.seconds = factor.seconds.take(kept, axis)
        factor.nbytes = None if factor.nbytes is None else factor.nbytes.take(kept, axis)


def _kept(network: Network, variable: int, around: list[int], times: dict[int, int]) -> list[int]:
    """The states that may be part of a best plan."""
    rows: list[tuple[Table, Table | None, int]] = []
    for f in around:
        factor = network.factors[f]
        axis = factor.scope.index(variable)
        count = factor.seconds.shape[axis]
        seconds = np.moveaxis(factor.seconds, axis, 0).reshape(count, -1)
        nbytes = None if factor.nbytes is None else np.moveaxis(factor.nbytes, axis, 0).reshape(count, -1)
        rows.append((seconds, nbytes, times[f]))
    alive = np.ones(rows[0][0].shape[0], dtype=bool)
    for seconds, _, _ in rows:
        alive &= np.isfinite(seconds).any(1)
    states = np.flatnonzero(alive)
    if len(states) < 2:
        return [int(i) for i in states]
    worst = np.zeros((len(states), len(states)))  # of taking the second in place of the first
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


def _worst(costs: Table) -> Table:
    """[a, b]: the most that b costs more than a, over all states of the neighbours in which a is possible."""
    with np.errstate(invalid="ignore"):
        more = costs[None, :, :] - costs[:, None, :]
    more = np.where(np.isposinf(costs)[:, None, :], -np.inf, more)
    return more.max(-1)
