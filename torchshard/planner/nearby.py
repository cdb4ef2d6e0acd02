"""Finds a good assignment of a network of costs if its exact tables would be too large.

Starting from a possible assignment, it frees one neighbourhood of decisions after the other and solves it exactly while
all other decisions stay, until the cost stops falling (large neighbourhood search: Shaw, 1998). It never rises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

import networkx as nx

from torchshard.planner.constants import NEIGHBOURHOOD, ROUNDS
from torchshard.planner.elimination import Elimination, Scope, Sizes, Table, primal_graph


def search_nearby(
    sizes: Sizes, scopes: Sequence[Scope], tables: Sequence[Table], known: Mapping[str, int], limit: int
) -> dict[str, int]:
    """Returns a state of each decision.

    Args:
        known: possible states of some decisions, to start from.
        limit: the maximum number of entries of a table.
    """
    near = primal_graph([v for v in scope if sizes[v] > 1] for scope in scopes)
    states = _completed(sizes, scopes, tables, {name: known[name] for name in near if name in known}, limit)
    holding: dict[str, list[int]] = {name: [] for name in near}
    for f, scope in enumerate(scopes):
        for name in near.nbunch_iter(scope):
            holding[name].append(f)
    neighbourhoods = [*_neighbourhoods(near)]
    for _ in range(ROUNDS):
        before = dict(states)
        for freed in neighbourhoods:
            touched = sorted({f for name in freed for f in holding[name]})
            around, costs = [scopes[f] for f in touched], [tables[f] for f in touched]
            fixed = {name: states[name] for scope in around for name in scope if name not in freed}
            found = _completed(sizes, around, costs, fixed, limit)
            if _cost(around, costs, found) < _cost(around, costs, states):
                states |= found
        if states == before:
            break
    return states


def _neighbourhoods(near: nx.Graph) -> Iterator[set[str]]:
    """Yields the nearest decisions around centres: decisions outside the nearer half of every earlier neighbourhood."""
    covered = set[str]()
    for centre in near:
        if centre not in covered:
            around = [*islice(chain.from_iterable(nx.bfs_layers(near, centre)), NEIGHBOURHOOD)]
            covered.update(around[: len(around) // 2])
            yield set(around)


def _cost(scopes: Sequence[Scope], tables: Sequence[Table], states: Mapping[str, int]) -> float:
    return sum(float(table[tuple(states[v] for v in scope)]) for scope, table in zip(scopes, tables, strict=True))


def _completed(
    sizes: Sizes, scopes: Sequence[Scope], tables: Sequence[Table], fixed: Mapping[str, int], limit: int
) -> dict[str, int]:
    """Adds states of the other decisions: the cheapest if their tables are small enough, else possible ones."""
    free = [tuple(v for v in scope if v not in fixed) for scope in scopes]
    rest = [t[tuple(fixed.get(v, slice(None)) for v in s)] for s, t in zip(scopes, tables, strict=True)]
    return {**fixed, **Elimination(sizes, free, limit=limit).run(rest).decode({})}
