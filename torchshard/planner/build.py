"""Builds the network of costs of a graph: decisions with their states, and the costs of pairs of decisions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from torch import fx

from torchshard.core.layouts import I, Layout, Shard
from torchshard.core.rows import Choice
from torchshard.ir.effects import carried_inputs
from torchshard.ir.graph import is_carried, is_tensor, is_tensor_op, is_weight
from torchshard.planner.chains import UnevenError, chain_of
from torchshard.planner.constants import FORBIDDEN, GATHERED_PARAMETER, MAX_SETS
from torchshard.planner.conversions import element_of
from torchshard.planner.costs import CostModel
from torchshard.planner.elimination import Table
from torchshard.planner.folded import Folded
from torchshard.planner.network import Decision, Network, name_of
from torchshard.planner.properties import Op, Value
from torchshard.planner.states import GraphConstraints, PlannedOps, States

log = logging.getLogger("torchshard.planner")
A = TypeVar("A")
B = TypeVar("B")


def build(graph: fx.Graph, costs: CostModel, constraints: GraphConstraints, *, fold: bool = True) -> Network:
    """Builds the network of a graph; `fold` represents a run of repeated blocks by four of them."""
    try:
        keys = constraints.differences(graph)
        keys |= {node: (keys.get(node), "recomputed") for node in graph.nodes if costs.is_recomputed(node)}
        folded = Folded.of(graph, keys, fold=fold)
        folded.share_rows()
        return _Builder(graph, costs, constraints, folded).network
    except UnevenError as error:
        log.info("repeated blocks are planned one by one: %s", error)
        return build(graph, costs, constraints, fold=False)


class _Demand(NamedTuple):
    """The layouts in which an op requires a value, in each of the op's states."""

    name: str
    """The decision of the op."""
    required: list[frozenset[Layout]]
    written: list[Layout | None]
    """The layout in which the op writes to the value, if it does."""


class _Builder:
    def __init__(self, graph: fx.Graph, costs: CostModel, constraints: GraphConstraints, folded: Folded) -> None:
        self.costs, self.constraints, self.folded, self.ranks = costs, constraints, folded, costs.axis.size
        self.network, self.planned = Network(folded), PlannedOps(graph, folded)
        self.chosen: dict[fx.Node, list[Choice]] = {}
        """Op -> its states."""
        self.layouts: dict[fx.Node, list[Layout]] = {}
        """Parameter or input -> its states."""
        states, left = States(self.planned, constraints, self.ranks), _left_again(graph) if constraints.steady else {}
        for op in self.planned.ops:
            self.chosen[op.node] = states.of_op(op)
            self._add_op(op)
        for node in self.planned.stored:
            self.layouts[node] = states.of_stored(node, self.chosen, is_left=node in left)
            self._add_stored(node, left.get(node))
        for node in (*self.planned.stored, *(n for n in self.planned.nodes if is_tensor(n))):
            self._add_value(node)
        self.network.chains = [chain_of(self.network, index, run) for index, run in enumerate(folded.runs)]

    # --- ops and parameters ------------------------------------------------------------------------------------------

    def _add_op(self, op: Op) -> None:
        states, saved = self.chosen[op.node], None
        name = self.network.add(Decision("op", self.folded.position[op.node]), op.node, states)
        if self.constraints.optimizer is not None:
            saved = np.array([self.costs.saved(op, choice) for choice in states])
        self.network.cost((name,), [self._op_seconds(op, choice) for choice in states], saved)

    def _op_seconds(self, op: Op, choice: Choice) -> float:
        inside = (sent.seconds for _, _, *ways in self.costs.inside(op, choice) for sent in ways)
        return self.costs.seconds(op, choice) + sum(inside)

    def _add_stored(self, node: fx.Node, left: fx.Node | None) -> None:
        """Adds a parameter or input.

        Args:
            left: the value that a call writes in its place.
        """
        states = self.layouts[node]
        name = self.network.add(Decision("stored", *self.folded.first_use(node)), node, states)
        if left is not None:
            after = self.folded.planned_node(left)
            same = _spread_out(states, self.chosen[after], lambda at, c: 0.0 if c.results[0] == at else FORBIDDEN)
            self.network.cost((name, name_of("op", after)), same)
        times = self._weight_of(node)
        if times:
            held = times * np.array([self._held(node, layout) for layout in states])
            self.network.cost((name,), np.zeros(len(states)), held)

    def _held(self, node: fx.Node, layout: Layout) -> float:
        """Returns the bytes on the rank that stores the most; without a memory limit, on an average rank."""
        value = Value.of(node)
        if self.constraints.optimizer is not None:
            return value.held(layout, self.ranks)
        return value.nbytes / self.ranks if isinstance(layout, Shard) else value.nbytes

    def _weight_of(self, node: fx.Node) -> float:
        """Returns the factor with which a placeholder's bytes count in the budget."""
        optimizer = self.constraints.optimizer
        if optimizer is None:
            return float(is_weight(node))
        if node.meta["kind"] != "parameter" or not node.meta["needs_grad"]:
            return 1.0
        itemsize = node.meta["val"].dtype.itemsize
        return (2 + optimizer.held(itemsize) / itemsize) / self.constraints.slices

    # --- values ------------------------------------------------------------------------------------------------------

    def _produced(self, node: fx.Node) -> tuple[str, list[Layout]]:
        """Returns the decision about a value's layout, and the layout in each of its states."""
        if node.op == "placeholder":
            return name_of("stored", node), self.layouts[node]
        source, index = (node, 0) if is_tensor_op(node) else element_of(node)
        source = self.folded.planned_node(source)
        return name_of("op", source), [choice.results[index] for choice in self.chosen[source]]

    def _demand(self, node: fx.Node, op: Op) -> _Demand:
        places, states = self.planned.places(node, op), self.chosen[op.node]
        written = [i for i in places if op.row is not None and i in op.row.options.mutates]
        required = [frozenset(choice.operands[i] for i in places) for choice in states]
        return _Demand(
            name_of("op", op.node), required, [choice.operands[written[0]] if written else None for choice in states]
        )

    def _add_value(self, node: fx.Node) -> None:
        producer, produced = self._produced(node)
        value, whole = Value.converted(node), self._is_taken_whole(node)
        demands = [self._demand(node, op) for op in self.planned.consumers.get(node, ())]
        fixed = frozenset([I]) if node in self.planned.results else frozenset[Layout]()
        for demand in demands:
            if whole or any(layout is not None for layout in demand.written):
                illegal = _illegal(produced, demand, whole=whole)
                if np.isinf(illegal).any():
                    self.network.cost((producer, demand.name), illegal)
        if len(demands) > 1 or (demands and fixed):
            self._share(node, value, producer, produced, demands, fixed)
        elif demands:
            (demand,) = demands
            table = _spread_out(produced, demand.required, lambda p, r: self._conversions(node, value, p, r))
            self.network.cost((producer, demand.name), table)
        elif fixed:
            self.network.cost((producer,), [self._conversions(node, value, layout, fixed) for layout in produced])

    def _is_taken_whole(self, node: fx.Node) -> bool:
        source = node if node.op == "placeholder" or is_tensor_op(node) else element_of(node)[0]
        return source in self.constraints.pins and self.constraints.pins[source].style.whole_result

    def _conversions(self, node: fx.Node, value: Value, produced: Layout, required: Iterable[Layout]) -> float:
        """Returns the seconds to convert a value to all required layouts; FORBIDDEN if that is illegal."""
        steps = self.costs.plan_conversions(value, produced, required)
        if steps is None or any((node, step) in self.constraints.vetoed for step in steps):
            return FORBIDDEN
        seconds = sum(sent.seconds for step in steps for sent in self.costs.sent(value, step))
        if steps and node.op == "placeholder" and isinstance(produced, Shard):
            # a parameter is stored as it is used; only a fixed layout may make a gather necessary
            return GATHERED_PARAMETER * seconds if node.meta["path"] in self.constraints.parameters else FORBIDDEN
        return seconds

    def _share(
        self,
        node: fx.Node,
        value: Value,
        producer: str,
        produced: Sequence[Layout],
        demands: Sequence[_Demand],
        fixed: frozenset[Layout],
    ) -> None:
        """Adds a decision about the set of layouts that this value is converted to.

        Every consumer must find the layouts that it requires in the chosen set.
        """
        sets = _unions(fixed, [demand.required for demand in demands])
        states = dict.fromkeys((layout, layouts - {layout}) for layout in produced for layouts in sets)
        costs = {state: self._conversions(node, value, *state) for state in states}
        legal = [state for state in states if costs[state] < FORBIDDEN]
        place = self.folded.position.get(node)
        decision = Decision("value", place) if place is not None else Decision("read", *self.folded.first_use(node))
        name = self.network.add(decision, node, legal)
        self.network.cost((name,), [costs[state] for state in legal])
        table = _spread_out(produced, legal, lambda layout, state: 0.0 if layout == state[0] else FORBIDDEN)
        self.network.cost((producer, name), table)
        for consumer, required, _ in demands:
            table = _spread_out(legal, required, lambda state, r: 0.0 if r <= state[1] | {state[0]} else FORBIDDEN)
            self.network.cost((name, consumer), table)


def _left_again(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns input -> the carried value that a call writes in its place."""
    inputs = {node.meta["path"]: node for node in carried_inputs(graph)}
    return {inputs[n.meta["place"]]: n for n in graph.nodes if is_carried(n) and n.meta["place"] in inputs}


def _illegal(produced: Sequence[Layout], demand: _Demand, *, whole: bool) -> Table:
    """Forbids writing to a value in a different layout, and slicing a value that is pinned replicated."""
    sliced = [whole and any(isinstance(layout, Shard) for layout in required) for required in demand.required]
    written = demand.written
    illegal = [[s or (w is not None and w != p) for s, w in zip(sliced, written, strict=True)] for p in produced]
    return np.where(np.array(illegal, dtype=bool).reshape(len(produced), len(written)), FORBIDDEN, 0.0)


def _unions(fixed: frozenset[Layout], required: Sequence[Sequence[frozenset[Layout]]]) -> list[frozenset[Layout]]:
    """Returns the sets of layouts that serve all consumers, each in some state; the smallest first."""
    unions = {fixed}
    for states in required:
        unions = {union | more for union in unions for more in set(states)}
        if len(unions) > MAX_SETS:
            unions = set(sorted(unions, key=_by_size)[:MAX_SETS])
    return sorted(unions, key=_by_size)


def _by_size(layouts: frozenset[Layout]) -> tuple[int, list[str]]:
    return len(layouts), sorted(map(str, layouts))


def _spread_out(first: Sequence[A], second: Sequence[B], cost: Callable[[A, B], float]) -> Table:
    """Returns a table over two decisions' states; prices equal states once, because many are equal."""
    rows, columns = _numbered(first), _numbered(second)
    small = np.array([[cost(a, b) for b in columns] for a in rows], dtype=np.float64)
    return small.reshape(len(rows), len(columns))[np.ix_([rows[a] for a in first], [columns[b] for b in second])]


def _numbered(states: Sequence[A]) -> dict[A, int]:
    return {state: number for number, state in enumerate(dict.fromkeys(states))}
