"""The costs of a graph's plans as an `nx.Graph`: a node per decision, an edge per table of what two cost together.

    op linear               the choice of an op; its seconds, and the bytes that it saves for the backward
    stored up_weight        the layout in which a parameter or input is stored; its bytes
    value add               for a value that several ops read: its layout, and the other layouts it is converted to, so
                            that a conversion which several of them share is paid once
    edge                    the conversions of a value from the layout of one end to that of the other; `FORBIDDEN`
                            where the two do not go together

Data of a node: kind, position and slot (see `Decision`), states, and for each state seconds and nbytes. Data of an
edge: ends (the decisions of its table's rows and columns), seconds and nbytes. Where nbytes is None, all states take
none. Nodes and edges have a number: tables are summed in this order, so that rounding breaks ties always alike.

Of a run of N repeated blocks only the first three and the last are built. The third represents all between, by the
table of least costs from the second to it, which is chained N - 3 times (`Chain`).
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
from torchshard.core.notation import Choice
from torchshard.planner.elimination import Scope, Table
from torchshard.planner.folded import Folded
from torchshard.planner.repeats import Repetition

State: TypeAlias = Choice | Layout | tuple[Layout, frozenset[Layout]]
"""Of an op, of a stored tensor, of a value with several readers."""


class Decision(NamedTuple):
    """What identifies a decision in each block of a run."""

    kind: str
    """'op', 'stored' or 'value'; 'read' in place of 'value' for a parameter or input."""
    position: int
    """Of the op; of a parameter or input, that of the first op that reads it."""
    slot: int = 0
    """Which operand of that op it is."""


def name_of(kind: str, node: fx.Node) -> str:
    """The name of a decision about a planned node."""
    return f"{kind} {node.name}"


class Factor(NamedTuple):
    """Costs over one or two decisions."""

    scope: Scope
    seconds: Table
    nbytes: Table | None


@dataclass(frozen=True)
class Chain:
    """The inner blocks of a run, all alike."""

    run: Repetition
    scopes: tuple[Scope, ...]
    """Of the tables of one block, including those that connect it to the block before."""
    entry: Scope
    """The decisions of the block before in these."""
    exit: Scope
    """The decisions of this block that the next block's tables hold."""
    shared: Scope
    """The decisions outside the run in these."""

    @property
    def count(self) -> int:
        """How many blocks it represents."""
        return self.run.count - 3

    @property
    def around(self) -> Scope:
        """What is left when the inner decisions of a block are eliminated."""
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
        """The op, tensor or value that a decision is about."""
        data = self.graph.nodes[name]
        node = self.folded.nodes[data["position"]]
        return node.all_input_nodes[data["slot"]] if data["kind"] in ("stored", "read") else node

    def add(self, decision: Decision, node: fx.Node, states: Sequence[State]) -> str:
        """Adds a decision that costs nothing yet, and returns its name."""
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
        """Adds costs of one decision, or of two together, to what they cost already."""
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
