"""Finds a good assignment of a network of costs whose exact tables would be too large.

From an assignment that is possible, one neighbourhood of variables after the other is freed and solved exactly while
all else stays, until none gets cheaper (large neighbourhood search: Shaw, 1998). The cost never rises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, pairwise

import networkx as nx

from torchshard.planner.constants import NEIGHBOURHOOD, ROUNDS
from torchshard.planner.elimination import Elimination, Scope, Table


def search_nearby(
    sizes: Sequence[int], scopes: Sequence[Scope], tables: Sequence[Table], known: Mapping[int, int], limit: int
) -> dict[int, int]:
    """The state of each variable.

    Args:
        known: states of some variables, with which the others can be completed.
        limit: entries of the largest table that is made.
    """
    states = _completed(sizes, scopes, tables, known, limit)
    holding: dict[int, list[int]] = {}
    near = nx.Graph()
    for f, scope in enumerate(scopes):
        near.add_nodes_from(scope)
        near.add_edges_from(pairwise(scope))
        for v in scope:
            holding.setdefault(v, []).append(f)
    for _ in range(ROUNDS):
        before = dict(states)
        covered = set[int]()
        for centre in near:
            if centre in covered:
                continue
            around = [centre, *(v for _, v in islice(nx.bfs_edges(near, centre), NEIGHBOURHOOD - 1))]
            covered.update(around[: len(around) // 2])
            freed = set(around)
            touched = sorted({f for v in around for f in holding[v]})
            fixed = {v: states[v] for f in touched for v in scopes[f] if v not in freed}
            found = _completed(sizes, [scopes[f] for f in touched], [tables[f] for f in touched], fixed, limit)
            costs = [sum(float(tables[f][tuple(at[v] for v in scopes[f])]) for f in touched) for at in (found, states)]
            if costs[0] < costs[1]:
                states |= found
        if states == before:
            break
    return states


def _completed(
    sizes: Sequence[int], scopes: Sequence[Scope], tables: Sequence[Table], fixed: Mapping[int, int], limit: int
) -> dict[int, int]:
    """The cheapest states of the other variables if their tables are small enough; else possible ones."""
    free = [tuple(v for v in scope if v not in fixed) for scope in scopes]
    rest = [t[tuple(fixed.get(v, slice(None)) for v in s)] for s, t in zip(scopes, tables, strict=True)]
    return {**fixed, **Elimination(sizes, free, limit=limit).run(rest).decode({})}
