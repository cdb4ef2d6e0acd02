"""Finds the cheapest states of a network at a price in seconds per byte: minimizes `seconds + price * bytes`.

A chain's inner block is eliminated once and its table is chained; the result is decoded block by block. If a table
would be too large, smaller tables give a bound, and a local search gives the states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from torchshard.planner.constants import MAX_TABLE
from torchshard.planner.elimination import Elimination, Joined, Power, Scope, Solved, Table, apart
from torchshard.planner.nearby import search_nearby
from torchshard.planner.network import Chain, Network

States = Mapping[str, int]
"""Decision -> its state."""


@dataclass(frozen=True)
class Solution:
    """States of all decisions, with their costs."""

    states: States
    """The states of decisions about planned nodes."""
    inner: tuple[tuple[States, ...], ...]
    """For each chain, the states of each block that it represents."""
    seconds: float
    nbytes: float
    bound: float
    """A lower bound on the cost of any states, at the price that these were found for."""


@dataclass(frozen=True)
class _Part:
    """A component of a network that is solved separately."""

    order: Elimination
    numbers: list[int]
    """The numbers of its tables."""


@dataclass(frozen=True)
class _Run:
    """The inner block of a run, solved at two prices."""

    first: Solved
    last: Solved
    turn: int
    """The number of blocks that use `first`; the later blocks use `last`."""


class Solver:
    """Solves a network for any price; computes everything that is independent of the price once."""

    def __init__(self, network: Network, limit: int = MAX_TABLE) -> None:
        self.network, self._limit, self._sizes = network, limit, network.sizes
        self._factors = {factor.scope: factor for factor in network.factors}
        around = [chain.around for chain in network.chains]
        self._inner = [Elimination(self._sizes, chain.scopes, chain.around, limit) for chain in network.chains]
        gone = {scope for chain in network.chains for scope in chain.scopes}
        self._outer = [scope for scope in self._factors if scope not in gone]
        scopes = [*self._outer, *around]
        self._parts = [
            _Part(Elimination(self._sizes, [scopes[i] for i in numbers], limit=limit), numbers)
            for numbers in apart(self._sizes, scopes)
        ]
        self._whole = {
            name: i for name, data in network.graph.nodes(data=True) if data["kind"] == "op"
            for i, choice in enumerate(data["states"]) if choice.name == "I"
        }  # fmt: skip
        inner = zip(self._inner, around, strict=True)
        self.exact = all(part.order.exact for part in self._parts) and all(
            order.exact and self._count(kept) <= limit for order, kept in inner
        )
        """Whether all tables are within the limit; a network with chains can be solved only if they are."""

    def best(self, price: float = 0.0) -> Solution:
        """Returns the cheapest states at a price."""
        return self._solved(price, price, price, 0.0)

    def mixed(self, outer: float, price: float, other: float, share: float) -> Solution:
        """Returns states for several prices.

        Args:
            outer: the price for decisions outside of runs.
            price: the price for the later blocks of each run.
            other: the price for the first blocks of each run.
            share: the fraction of blocks that are first blocks.
        """
        return replace(self._solved(outer, price, other, share), bound=-math.inf)

    def _solved(self, outer: float, price: float, other: float, share: float) -> Solution:
        chains, tables = self.network.chains, self._tables(outer)
        lasts = self._blocks(tables if price == outer else self._tables(price))
        firsts = self._blocks(self._tables(other)) if share else lasts
        runs = [
            _Run(first, last, round(share * chain.count))
            for chain, first, last in zip(chains, firsts, lasts, strict=True)
        ]
        powers = [self._power(chain, run) for chain, run in zip(chains, runs, strict=True)]
        around = [self._unpacked(chain, power.table) for chain, power in zip(chains, powers, strict=True)]
        costs = [*(tables[scope] for scope in self._outer), *around]
        states, bound = dict[str, int](), 0.0
        for part in self._parts:
            solved = part.order.run([costs[i] for i in part.numbers])
            bound += float(solved.table)
            states |= solved.decode({}) if part.order.exact else self._nearby(part, costs)
        inner = tuple(self._decoded(c, r, p, states) for c, r, p in zip(chains, runs, powers, strict=True))
        return self._solution(states, inner, bound)

    def _nearby(self, part: _Part, costs: Sequence[Table]) -> States:
        """Searches states of a part with tables above the limit; the network has no chains."""
        scopes = [self._outer[i] for i in part.numbers]
        return search_nearby(self._sizes, scopes, [costs[i] for i in part.numbers], self._whole, self._limit)

    def _tables(self, price: float) -> dict[Scope, Table]:
        factors = self._factors.values()
        return {f.scope: f.seconds if f.nbytes is None else f.seconds + price * f.nbytes for f in factors}

    def _blocks(self, tables: Mapping[Scope, Table]) -> list[Solved]:
        """Solves one inner block of each run."""
        chains = zip(self.network.chains, self._inner, strict=True)
        return [order.run([tables[scope] for scope in chain.scopes]) for chain, order in chains]

    def _count(self, scope: Scope) -> int:
        return math.prod(self._sizes[v] for v in scope)

    def _power(self, chain: Chain, run: _Run) -> Power | Joined:
        shape = [self._count(scope) for scope in (chain.entry, chain.exit, chain.shared)]

        def power(block: Solved, count: int) -> Power:
            return Power(np.ascontiguousarray(block.table).reshape(shape), count)

        if 0 < run.turn < chain.count:
            return Joined(power(run.first, run.turn), power(run.last, chain.count - run.turn))
        return power(run.first if run.turn else run.last, chain.count)

    def _unpacked(self, chain: Chain, table: Table) -> Table:
        return table.reshape([self._sizes[v] for v in chain.around])

    def _decoded(self, chain: Chain, run: _Run, power: Power | Joined, states: States) -> tuple[States, ...]:
        """Returns the states of each inner block's variables."""
        entry, exit, shared = (self._packed(scope, states) for scope in (chain.entry, chain.exit, chain.shared))
        known: dict[tuple[bool, int, int], States] = {}
        found = []
        for i, (before, after) in enumerate(pairwise(power.decode(entry, exit, shared))):
            key = (i < run.turn, before, after)
            if key not in known:
                kept = {**self._unpacked_states(chain.shared, shared), **self._unpacked_states(chain.entry, before),
                        **self._unpacked_states(chain.exit, after)}  # fmt: skip
                known[key] = (run.first if i < run.turn else run.last).decode(kept)
            found.append(known[key])
        return tuple(found)

    def _packed(self, scope: Scope, states: States) -> int:
        return int(np.ravel_multi_index([states[v] for v in scope], [self._sizes[v] for v in scope])) if scope else 0

    def _unpacked_states(self, scope: Scope, packed: int) -> dict[str, int]:
        sizes = [self._sizes[v] for v in scope]
        return dict(zip(scope, map(int, np.unravel_index(packed, sizes)), strict=True)) if scope else {}

    def _solution(self, states: States, inner: tuple[tuple[States, ...], ...], bound: float) -> Solution:
        seconds, nbytes = self._costs(self._outer, states)
        for chain, blocks in zip(self.network.chains, inner, strict=True):
            costs: dict[int, tuple[float, float]] = {}
            for block in blocks:
                if id(block) not in costs:
                    costs[id(block)] = self._costs(chain.scopes, block)
                seconds, nbytes = seconds + costs[id(block)][0], nbytes + costs[id(block)][1]
        return Solution(states, inner, seconds, nbytes, bound)

    def _costs(self, scopes: Iterable[Scope], states: States) -> tuple[float, float]:
        """Returns the seconds and bytes of these tables in these states."""
        seconds, nbytes = 0.0, 0.0
        for scope in scopes:
            factor, at = self._factors[scope], tuple(states[v] for v in scope)
            seconds += float(factor.seconds[at])
            nbytes += 0.0 if factor.nbytes is None else float(factor.nbytes[at])
        return seconds, nbytes
