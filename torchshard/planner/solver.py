"""Finds the cheapest states of a network at a price in seconds per byte: the least `seconds + price * bytes`.

A chain's inner block is eliminated once and its table chained; the result is decoded block by block. Where a table
would be too large, smaller tables give a bound, and a local search gives the states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from torchshard.planner.constants import MAX_TABLE
from torchshard.planner.elimination import Elimination, Joined, Power, Scope, Solved, Table
from torchshard.planner.nearby import search_nearby
from torchshard.planner.network import Chain, Factor, Network

States = Mapping[int, int]
"""Variable -> its state."""


@dataclass(frozen=True)
class Solution:
    """States of all variables, and what they cost."""

    states: States
    """Of the planned nodes."""
    inner: tuple[tuple[States, ...], ...]
    """For each chain, the states of each block that it represents."""
    seconds: float
    nbytes: float
    bound: float
    """No states cost less than this, at the price that these were found for."""


@dataclass(frozen=True)
class _Run:
    """The inner block of a run, at two prices."""

    first: Solved
    last: Solved
    turn: int
    """How many blocks are as the first."""


class Solver:
    """Solves a network for any price; what does not depend on the price is made once."""

    def __init__(self, network: Network, limit: int = MAX_TABLE) -> None:
        self.network, self._limit = network, limit
        sizes, self._scopes = network.sizes, [factor.scope for factor in network.factors]
        around = [(*chain.entry, *chain.exit, *chain.shared) for chain in network.chains]
        self._inner = [
            Elimination(sizes, [self._scopes[f] for f in chain.factors], kept, limit)
            for chain, kept in zip(network.chains, around, strict=True)
        ]
        gone = {f for chain in network.chains for f in chain.factors}
        self._outer = [f for f in range(len(self._scopes)) if f not in gone]
        self._main = Elimination(sizes, [*(self._scopes[f] for f in self._outer), *around], limit=limit)
        self._whole = {
            v: i for (kind, *_), v in network.keys.items() if kind == "op"
            for i, choice in enumerate(network.states[v]) if choice.name == "I"
        }  # fmt: skip
        self.exact = self._main.exact and all(
            order.exact and self._count(kept) <= limit for order, kept in zip(self._inner, around, strict=True)
        )
        """Whether no table was too large; where one was, a network must have no chains."""

    def best(self, price: float = 0.0) -> Solution:
        """The cheapest states."""
        return self._solved(price, price, price, 0.0)

    def mixed(self, outer: float, price: float, other: float, share: float) -> Solution:
        """Some states: of each run the first blocks, as large a share of them, are cheapest at another price.

        Args:
            outer: the price for all that is in no run.
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
        solved = self._main.run([*(tables[f] for f in self._outer), *around])
        states: States = (
            solved.decode({})
            if self.exact
            else search_nearby(self.network.sizes, self._scopes, tables, self._whole, self._limit)
        )
        inner = tuple(self._decoded(c, r, p, states) for c, r, p in zip(chains, runs, powers, strict=True))
        return self._solution(states, inner, float(solved.table))

    def _tables(self, price: float) -> list[Table]:
        factors = self.network.factors
        return [f.seconds if f.nbytes is None else f.seconds + price * f.nbytes for f in factors]

    def _blocks(self, tables: Sequence[Table]) -> list[Solved]:
        """One inner block of each run."""
        chains = zip(self.network.chains, self._inner, strict=True)
        return [order.run([tables[f] for f in chain.factors]) for chain, order in chains]

    def _count(self, scope: Scope) -> int:
        return math.prod(len(self.network.states[v]) for v in scope)

    def _power(self, chain: Chain, run: _Run) -> Power | Joined:
        shape = [self._count(scope) for scope in (chain.entry, chain.exit, chain.shared)]

        def power(block: Solved, count: int) -> Power:
            return Power(np.ascontiguousarray(block.table).reshape(shape), count)

        if 0 < run.turn < chain.count:
            return Joined(power(run.first, run.turn), power(run.last, chain.count - run.turn))
        return power(run.first if run.turn else run.last, chain.count)

    def _unpacked(self, chain: Chain, table: Table) -> Table:
        return table.reshape([len(self.network.states[v]) for v in (*chain.entry, *chain.exit, *chain.shared)])

    def _decoded(self, chain: Chain, run: _Run, power: Power | Joined, states: States) -> tuple[States, ...]:
        """The states of each inner block's variables."""
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
        return (
            int(np.ravel_multi_index([states[v] for v in scope], [len(self.network.states[v]) for v in scope]))
            if scope
            else 0
        )

    def _unpacked_states(self, scope: Scope, packed: int) -> dict[int, int]:
        sizes = [len(self.network.states[v]) for v in scope]
        return dict(zip(scope, map(int, np.unravel_index(packed, sizes)), strict=True)) if scope else {}

    def _solution(self, states: States, inner: tuple[tuple[States, ...], ...], bound: float) -> Solution:
        factors = self.network.factors
        seconds = sum(float(factors[f].seconds[_at(self._scopes[f], states)]) for f in self._outer)
        nbytes = sum(_bytes(factors[f], states) for f in self._outer)
        for chain, blocks in zip(self.network.chains, inner, strict=True):
            costs: dict[int, tuple[float, float]] = {}
            for block in blocks:
                if id(block) not in costs:
                    costs[id(block)] = (
                        sum(float(factors[f].seconds[_at(self._scopes[f], block)]) for f in chain.factors),
                        sum(_bytes(factors[f], block) for f in chain.factors),
                    )
                seconds, nbytes = seconds + costs[id(block)][0], nbytes + costs[id(block)][1]
        return Solution(states, inner, seconds, nbytes, bound)


def _at(scope: Scope, states: States) -> tuple[int, ...]:
    return tuple(states[v] for v in scope)


def _bytes(factor: Factor, states: States) -> float:
    return 0.0 if factor.nbytes is None else float(factor.nbytes[_at(factor.scope, states)])
