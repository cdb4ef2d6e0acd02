"""The costs of a graph's plans as an `nx.Graph`: a node per decision, an edge per table of pairwise costs.

    op linear               the choice of an op; its seconds, and the bytes that it saves for the backward
    stored up_weight        the layout in which a parameter or input is stored; its bytes
    value add               for a value that several ops read: its layout, and the other layouts that it is converted
                            to, so a conversion that several ops share is paid once
    edge                    the conversions of a value from one end's layout to the other's; `FORBIDDEN` if illegal

Data of a node: kind, position and slot (see `Decision`), states, and for each state seconds and nbytes. Data of an
edge: ends (the decisions of its table's rows and columns), seconds and nbytes. A missing nbytes means zero bytes in all
states. Nodes and edges have a number: tables are summed in this order, so rounding always breaks ties the same way.

Only the first three blocks and the last of a run of N repeated blocks are built. The third represents all blocks
between: the table of least costs from the second block to the third is chained N - 3 times (`Chain`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeAlias

import networkx as nx
import numpy as np
from torch import fx

from torchshard.core.layouts import Layout
from torchshard.core.rows import Choice
from torchshard.planner.elimination import Scope, Table
from torchshard.planner.folded import Folded
from torchshard.planner.repeats import Repetition

State: TypeAlias = Choice | Layout | tuple[Layout, frozenset[Layout]]
"""A state of an op, of a stored tensor, or of a value with several readers."""


class Decision(NamedTuple):
    """The identity of a decision; in a later block of a run only `position` differs."""

    kind: str
    """'op', 'stored' or 'value'; 'read' instead of 'value' for a parameter or input."""
    position: int
    """The position of the op; for a parameter or input, of the first op that reads it."""
    slot: int = 0
    """The number of the parameter or input among the operands of that op."""


def name_of(kind: str, node: fx.Node) -> str:
    """Returns the name of a decision about a planned node."""
    return f"{kind} {node.name}"


class Factor(NamedTuple):
    """Costs over one or two decisions."""

    scope: Scope
    seconds: Table
    nbytes: Table | None


@dataclass(frozen=True)
class Chain:
    """The inner blocks of a run, which are equal."""

    run: Repetition
    scopes: tuple[Scope, ...]
    """The scopes of one block's tables, including tables that connect it to the previous block."""
    entry: Scope
    """The decisions of the previous block in these scopes."""
    exit: Scope
    """The decisions of this block in the next block's scopes."""
    shared: Scope
    """The other decisions in these scopes, outside of both blocks, such as a mask's."""

    @property
    def count(self) -> int:
        """The number of blocks that it represents."""
        return self.run.count - 3

    @property
    def around(self) -> Scope:
        """The decisions that remain when a block's inner decisions are eliminated."""
        return (*self.entry, *self.exit, *self.shared)


@dataclass
class Network:
    """The graph of decisions, and its runs of repeated blocks."""

    folded: Folded
    graph: nx.Graph = field(default_factory=nx.Graph)
    chains: list[Chain] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count, repr=False)

    @property
    def states(self) -> dict[str, list[State]]:
        """The states of each decision."""
        return dict(self.graph.nodes(data="states"))

    @property
    def sizes(self) -> dict[str, int]:
        """The number of states of each decision."""
        return {name: len(states) for name, states in self.states.items()}

    @property
    def factors(self) -> list[Factor]:
        """The tables of all nodes and edges, in the order in which these were added."""
        found = [((name,), data) for name, data in self.graph.nodes(data=True)]
        found += [(data["ends"], data) for _, _, data in self.graph.edges(data=True)]
        found.sort(key=lambda each: each[1]["number"])
        return [Factor(scope, data["seconds"], data["nbytes"]) for scope, data in found]

    def node(self, name: str) -> fx.Node:
        """Returns the op, tensor or value that a decision is about."""
        data = self.graph.nodes[name]
        node = self.folded.nodes[data["position"]]
        return node.all_input_nodes[data["slot"]] if data["kind"] in ("stored", "read") else node

    def add(self, decision: Decision, node: fx.Node, states: Sequence[State]) -> str:
        """Adds a decision without costs, and returns its name."""
        name = name_of(decision.kind, node)
        costs = {
            "states": list(states),
            "seconds": np.zeros(len(states)),
            "nbytes": None,
            "number": next(self._numbers),
        }
        self.graph.add_node(name, **decision._asdict(), **costs)
        return name

    def cost(self, scope: Scope, seconds: Table | Sequence[float], nbytes: Table | None = None) -> None:
        """Adds to the costs of one decision, or of a pair of decisions."""
        table = np.asarray(seconds, dtype=float)
        if len(scope) == 2 and not self.graph.has_edge(*scope):
            self.graph.add_edge(*scope, ends=scope, seconds=table, nbytes=nbytes, number=next(self._numbers))
            return
        data = self.graph.nodes[scope[0]] if len(scope) == 1 else self.graph.edges[scope]
        if data.get("ends", scope) != scope:
            table, nbytes = table.T, None if nbytes is None else nbytes.T
        data["seconds"] = data["seconds"] + table
        if nbytes is not None:
            data["nbytes"] = nbytes if data["nbytes"] is None else data["nbytes"] + nbytes
