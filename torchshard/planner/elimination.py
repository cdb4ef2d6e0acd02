"""Finds the cheapest assignment of a network of costs: exact min-sum dynamic programming over a tree decomposition.

`sizes` gives the number of states of each variable; a factor is a table of costs over a few variables. Variables are
eliminated one after the other (Dechter, "Bucket elimination", 1999): the factors that contain a variable are added, and
the minimum over the variable leaves one factor over its neighbours. Each elimination is a bag of a tree decomposition.
The variable with the smallest bag is eliminated first; if that makes a large bag, the order competes with networkx's.

If a bag would be larger than `MAX_TABLE`, its factors are minimized in smaller groups ("mini-buckets"): the result is a
lower bound, and `Elimination.exact` is False.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import networkx as nx
import numpy as np
import numpy.typing as npt

from torchshard.planner.constants import COMPETE, MAX_TABLE

Table = npt.NDArray[np.float64]
"""Costs, with one axis per variable of the scope."""
Scope = tuple[str, ...]
Sizes: TypeAlias = Mapping[str, int]
"""The number of states of each variable; the order of variables breaks ties."""


@dataclass(frozen=True)
class _Bucket:
    """One elimination: the factors (inputs first, then messages in order of creation) that contain a variable."""

    variable: str
    groups: tuple[tuple[tuple[int, ...], Scope], ...]
    """(factors, variables of their sum with the eliminated one last); a single group if the bag is small enough."""


def primal_graph(scopes: Iterable[Sequence[str]]) -> nx.Graph:
    """Returns the graph in which the variables of each factor are neighbours."""
    graph = nx.Graph()
    for scope in scopes:
        graph.add_nodes_from(scope)
        graph.add_edges_from(combinations(scope, 2))
    return graph


def apart(sizes: Sizes, scopes: Sequence[Scope]) -> list[list[int]]:
    """Returns the scopes' numbers for each component that can be solved separately; constant scopes come last.

    Variables with one state do not connect components.
    """
    free = [tuple(v for v in scope if sizes[v] != 1) for scope in scopes]
    parts = list(nx.connected_components(primal_graph(free)))
    part_of = {v: i for i, part in enumerate(parts) for v in part}
    numbers: list[list[int]] = [[] for _ in range(len(parts) + 1)]
    for number, scope in enumerate(free):
        numbers[part_of[scope[0]] if scope else -1].append(number)
    return numbers


class _Steps:
    """Eliminates variables one after the other, on scopes without tables."""

    def __init__(self, sizes: Sizes, scopes: Sequence[Scope], limit: int) -> None:
        self.sizes, self.limit = sizes, limit
        self.scopes = dict(enumerate(scopes))
        """The scopes of the factors, then of the messages, by number."""
        self.buckets: list[_Bucket] = []
        self.near = primal_graph(scopes)
        self._holding: dict[str, set[int]] = {v: set() for v in self.near}
        for f, scope in self.scopes.items():
            for v in scope:
                self._holding[v].add(f)

    @property
    def exact(self) -> bool:
        """Whether every bag was small enough."""
        return all(len(bucket.groups) <= 1 for bucket in self.buckets)

    @property
    def entries(self) -> int:
        """The number of entries of all tables."""
        groups = (scope for bucket in self.buckets for _, scope in bucket.groups)
        return sum(math.prod(self.sizes[v] for v in scope) for scope in groups)

    def bag(self, variable: str) -> int:
        """Returns the number of entries of the table over a variable and its neighbours."""
        return math.prod(self.sizes[v] for v in self.near[variable]) * self.sizes[variable]

    def in_order_of_bags(self, variables: Sequence[str]) -> int:
        """Eliminates these variables, always the one with the smallest bag; returns the size of the largest bag."""
        waiting, largest = {v: self.bag(v) for v in variables}, 0
        while waiting:
            variable = min(waiting, key=waiting.__getitem__)
            largest = max(largest, waiting.pop(variable))
            neighbours = list(self.near[variable])
            self.eliminate(variable)
            waiting.update({v: self.bag(v) for v in neighbours if v in waiting})
        return largest

    def eliminate(self, variable: str) -> None:
        """Minimizes over a variable; each group of factors leaves a message over its other variables."""
        groups = []
        for members in self._grouped(sorted(self._holding[variable])):
            union = dict.fromkeys(v for f in members for v in self.scopes[f] if v != variable)
            groups.append((members, (*union, variable)))
            for v in union:
                self._holding[v].add(len(self.scopes))
            self.scopes[len(self.scopes)] = tuple(union)
        for f in self._holding.pop(variable):
            for v in self.scopes[f]:
                if v != variable:
                    self._holding[v].discard(f)
        self.buckets.append(_Bucket(variable, tuple(groups)))
        self.near.remove_node(variable)
        for _, scope in groups:
            self.near.add_edges_from(combinations(scope[:-1], 2))

    def _grouped(self, members: Sequence[int]) -> list[tuple[int, ...]]:
        groups: list[tuple[list[int], set[str]]] = []
        for f in sorted(members, key=lambda f: -len(self.scopes[f])):
            for group, union in groups:
                if math.prod(self.sizes[v] for v in union.union(self.scopes[f])) <= self.limit:
                    group.append(f)
                    union.update(self.scopes[f])
                    break
            else:
                groups.append(([f], set(self.scopes[f])))
        return [tuple(group) for group, _ in groups]


HEURISTICS = (nx.approximation.treewidth_min_fill_in, nx.approximation.treewidth_min_degree)


def decomposed_order(
    heuristic: Callable[[nx.Graph], tuple[int, nx.Graph]], near: nx.Graph, keep: Collection[str]
) -> list[str]:
    """Returns an order of all variables except the kept ones, from a tree decomposition of networkx.

    The root of the tree is a bag with all kept variables. From the leaves on, each bag eliminates the variables that
    its parent lacks.
    """
    whole = near.copy()
    whole.add_edges_from(combinations(keep, 2))
    _, tree = heuristic(whole)
    root = next(bag for bag in tree if bag.issuperset(keep))
    parent = nx.dfs_predecessors(tree, root)
    order = dict.fromkeys(
        v for bag in nx.dfs_postorder_nodes(tree, root) for v in near if v in bag - parent.get(bag, frozenset(keep))
    )
    return list(order)


def _others(sizes: Sizes, scopes: Sequence[Scope], keep: Scope, limit: int) -> Iterator[_Steps]:
    """Yields the orders of networkx that keep every table within the limit."""
    for heuristic in HEURISTICS:
        steps = _Steps(sizes, scopes, limit)
        for variable in decomposed_order(heuristic, steps.near, keep):
            steps.eliminate(variable)
        if steps.exact:
            yield steps


class Elimination:
    """An order that eliminates all variables except the kept ones; it depends on scopes, not on costs."""

    def __init__(self, sizes: Sizes, scopes: Sequence[Scope], keep: Scope = (), limit: int = MAX_TABLE) -> None:
        self._sizes, self._keep, self._given = sizes, keep, scopes
        # Bags omit variables with one state, because NumPy's arrays have at most 64 axes.
        self._fixed = dict.fromkeys((v for scope in scopes for v in scope if sizes[v] == 1 and v not in keep), 0)
        free = [tuple(v for v in scope if v not in self._fixed) for scope in scopes]
        steps, kept = _Steps(sizes, free, limit), set(keep)
        largest = steps.in_order_of_bags([v for v in sizes if v in steps.near and v not in kept])
        if largest >= COMPETE:
            steps = min([steps, *_others(sizes, free, keep, limit)], key=lambda each: (not each.exact, each.entries))
        self._buckets, self._scopes, self.exact, self.entries = steps.buckets, steps.scopes, steps.exact, steps.entries
        eliminated = {bucket.variable for bucket in self._buckets}
        self._rest = [f for f, scope in self._scopes.items() if not eliminated.intersection(scope)]

    def run(self, tables: Sequence[Table]) -> Solved:
        """Runs the elimination on `tables`, the factors' costs in the order of the scopes."""
        held = [
            table.reshape([n for n, v in zip(table.shape, scope, strict=True) if v not in self._fixed])
            for table, scope in zip(tables, self._given, strict=True)
        ]
        for bucket in self._buckets:
            for members, scope in bucket.groups:
                held.append(self._sum(held, members, scope).min(axis=-1))
        return Solved(self, held)

    def _sum(self, held: Sequence[Table], members: Sequence[int], scope: Scope) -> Table:
        total: Table = np.zeros((1,) * len(scope))
        for f in members:
            total = total + aligned(held[f], self._scopes[f], scope)
        return np.broadcast_to(total, [self._sizes[v] for v in scope])


@dataclass(frozen=True)
class Solved:
    """The result of an elimination."""

    order: Elimination
    tables: list[Table]
    """The tables of the factors, then of the messages."""

    @property
    def table(self) -> Table:
        """The least cost for each state of the kept variables; a lower bound if the elimination is not exact."""
        return self.order._sum(self.tables, self.order._rest, self.order._keep)

    def decode(self, kept: Mapping[str, int]) -> dict[str, int]:
        """Returns the cheapest states of all variables, given the states of the kept ones."""
        states = {**self.order._fixed, **kept}
        for bucket in reversed(self.order._buckets):
            costs: Table = np.zeros(self.order._sizes[bucket.variable])
            for members, _ in bucket.groups:
                for f in members:
                    at = tuple(states.get(v, slice(None)) for v in self.order._scopes[f])
                    costs = costs + self.tables[f][at]
            states[bucket.variable] = int(np.argmin(costs))
        return states


def aligned(table: Table, scope: Scope, onto: Scope) -> Table:
    """Returns a table with axes in the order of `onto`; an axis of a variable that it lacks has size one."""
    place = {v: i for i, v in enumerate(scope)}
    order = [place[v] for v in onto if v in place]
    shape = [table.shape[place[v]] if v in place else 1 for v in onto]
    return table.transpose(order).reshape(shape)


def chained(left: Table, right: Table) -> Table:
    """Chains two tables over (entry, exit, shared) states: the minimum over the states between them."""
    best = np.full((left.shape[0], right.shape[1], left.shape[2]), np.inf)
    for middle in range(left.shape[1]):
        np.minimum(best, left[:, None, middle] + right[None, middle], out=best)
    return best


class Power:
    """A table over (entry, exit, shared) states, chained `count` times: each exit is the next entry."""

    def __init__(self, table: Table, count: int) -> None:
        self._tables: dict[int, Table] = {1: table}
        self.table = self._of(count)
        self.count = count

    def _of(self, count: int) -> Table:
        if count not in self._tables:
            self._tables[count] = chained(self._of(count // 2), self._of(count - count // 2))
        return self._tables[count]

    def decode(self, entry: int, exit: int, shared: int) -> list[int]:
        """Returns the states between the links, the entry first and the exit last."""

        def between(count: int, start: int, stop: int) -> list[int]:
            if count == 1:
                return [stop]
            left, right = self._of(count // 2), self._of(count - count // 2)
            middle = int(np.argmin(left[start, :, shared] + right[:, stop, shared]))
            return [*between(count // 2, start, middle), *between(count - count // 2, middle, stop)]

        return [entry, *between(self.count, entry, exit)]


class Joined:
    """Two powers, chained."""

    def __init__(self, first: Power, second: Power) -> None:
        self._first, self._second = first, second
        self.table = chained(first.table, second.table)

    def decode(self, entry: int, exit: int, shared: int) -> list[int]:
        """Returns the states between the links, the entry first and the exit last."""
        middle = int(np.argmin(self._first.table[entry, :, shared] + self._second.table[:, exit, shared]))
        return [*self._first.decode(entry, middle, shared), *self._second.decode(middle, exit, shared)[1:]]
