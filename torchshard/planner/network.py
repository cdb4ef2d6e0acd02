"""Builds a network of costs from a graph: variables for the decisions, tables for what they cost together.

    an op                       a variable, a state per choice; costs its work
    a parameter                 a variable, a state per layout that it may be stored in; costs its bytes
    a value of one consumer     a table over producer and consumer: the conversions from the produced layout to the
                                required one
    a value of several          a variable too, a state per (produced layout, other layouts it is converted to): a
                                conversion that several consumers share is paid once

Of a run of N repeated blocks only the first three and the last are built. The third represents all between, by the
table of least costs from the second to it, which is chained N - 3 times (`Chain`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from torchshard.core.choices import choices
from torchshard.core.conversions import ConversionStep
from torchshard.core.layouts import EQUAL, I, Layout, Shard, local_size
from torchshard.core.notation import Choice
from torchshard.custom_ops.store import STORE
from torchshard.ir.graph import (
    carried_inputs,
    is_carried,
    is_tensor,
    is_tensor_op,
    is_weight,
    passes_on_weight,
    required_layouts,
    where,
    whole_choice,
)
from torchshard.planner.axes import tensors_of, wanted_parts, weight_axes
from torchshard.planner.constants import FORBIDDEN, GATHERED_PARAMETER, MAX_SETS
from torchshard.planner.conversions import element_of
from torchshard.planner.costs import CostModel, Op, Value
from torchshard.planner.elimination import Scope, Table
from torchshard.planner.folded import Folded
from torchshard.planner.repeats import Repetition
from torchshard.planner.styles import Pin, cannot_have, pinned_layout_conflict

log = logging.getLogger("torchshard.planner")


@dataclass(frozen=True)
class GraphConstraints:
    """What the user and earlier calls have fixed for the nodes of one graph."""

    options: Mapping[fx.Node, list[Choice]] = field(default_factory=dict)
    """The choices left to an op."""
    pins: Mapping[fx.Node, Pin] = field(default_factory=dict)
    """Op -> the user's pin."""
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    """Parameter -> its fixed layout, by name."""
    vetoed: frozenset[tuple[fx.Node, ConversionStep]] = frozenset()
    """Conversions that are forbidden."""
    all_axes: bool = False
    """Whether dims that no weight touches (batch, sequence) may be split too."""
    dynamic: bool = True
    """Whether dynamic sizes that the ranks divide may be split without a pin."""
    weights: bool = True
    """Whether dims of weights may be split; else all ops that have the batch divide it."""
    per_parameter: float | None = None
    """How many times its bytes a trained parameter takes, with gradient and optimizer; None: only weights count."""
    trains: bool = True
    """Whether a step has a backward, and weights gradients and an optimizer's state."""
    steady: bool = False
    """Whether what a call leaves in its arguments has the layout in which it comes in."""

    @property
    def splits(self) -> bool:
        """Whether something is to be split that is fixed already."""
        return bool(self.pins) or any(isinstance(layout, Shard) for layout in self.parameters.values())

    def differences(self, graph: fx.Graph) -> dict[fx.Node, object]:
        """A value per constrained node, different where nodes of equal structure are constrained differently."""
        keys: dict[fx.Node, object] = dict(self.options)
        keys |= {node: (pin.style, pin.axes) for node, pin in self.pins.items()}
        for node, step in sorted(self.vetoed, key=str):
            keys[node] = (keys.get(node), step)
        stored = (node for node in graph.nodes if node.op == "placeholder" and node.meta["path"] in self.parameters)
        return keys | {node: self.parameters[node.meta["path"]] for node in stored}


@dataclass
class Factor:
    """Costs over a few variables."""

    scope: Scope
    seconds: Table
    nbytes: Table | None = None


@dataclass(frozen=True)
class Chain:
    """The inner blocks of a run, all alike."""

    run: Repetition
    factors: tuple[int, ...]
    """The factors of one block, including those that connect it to the block before."""
    entry: Scope
    """The variables of the block before in these factors."""
    exit: Scope
    """The variables of this block that the next block's factors hold."""
    shared: Scope
    """The variables outside the run in these factors."""

    @property
    def count(self) -> int:
        """How many blocks it represents."""
        return self.run.count - 3


Key = tuple[str, int, int]
"""Identifies a variable: ('op', position, 0), ('value', position, 0) or ('stored', position of first use, slot).

('value of', position of first use, slot) is the value of a parameter or input that several ops read."""


@dataclass
class Network:
    """Variables with their states, and factors."""

    folded: Folded
    states: list[list[Any]] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    keys: dict[Key, int] = field(default_factory=dict)
    """Key -> variable. The states of an op are Choices, those of a placeholder Layouts."""

    @property
    def sizes(self) -> list[int]:
        """The number of states of each variable."""
        return [len(states) for states in self.states]

    def variable(self, key: Key, states: Sequence[Any]) -> int:
        """Adds a variable, and returns its number."""
        self.keys[key] = len(self.states)
        self.states.append(list(states))
        return self.keys[key]


# --- the network -----------------------------------------------------------------------------------------------------


def build(graph: fx.Graph, costs: CostModel, constraints: GraphConstraints, *, fold: bool = True) -> Network:
    """The network of a graph; with `fold` each run of repeated blocks is there once."""
    try:
        keys = constraints.differences(graph)
        keys |= {node: (keys.get(node), "recomputed") for node in graph.nodes if costs.is_recomputed(node)}
        return _Builder(graph, costs, constraints, Folded.of(graph, keys, fold=fold)).network
    except _Uneven as error:
        log.info("repeated blocks are planned one by one: %s", error)
        return build(graph, costs, constraints, fold=False)


class _Uneven(Exception):
    """Blocks of equal structure have different states, because the first and the last have other neighbours."""


class _Builder:
    """Adds variables and factors, part by part; a variable's key says which block it is in."""

    def __init__(self, graph: fx.Graph, costs: CostModel, constraints: GraphConstraints, folded: Folded) -> None:
        self.costs, self.constraints, self.folded, self.ranks = costs, constraints, folded, costs.axis.size
        self.network, self.position = Network(folded), folded.position
        planned = [folded.nodes[i] for i in folded.planned()]
        self.ops = [Op.of(node) for node in planned if is_tensor_op(node)]
        self.tensors = {op.node: [n and self._representative(n) for n in tensors_of(op.node)] for op in self.ops}
        self.consumers: dict[fx.Node, list[Op]] = {}
        for op in self.ops:
            for operand in dict.fromkeys(self._inputs(op)):
                self.consumers.setdefault(operand, []).append(op)
        self.results = {self._representative(n) for n, _ in required_layouts(graph.output_node(), None)}
        stored = [n for n in graph.nodes if n.op == "placeholder" and n in self.consumers]
        self.left = _left_again(graph) if constraints.steady else {}
        self._add_ops()
        for node in stored:
            self._add_stored(node)
        for node in (*stored, *(n for n in planned if is_tensor(n))):
            self._add_value(node)
        for index, run in enumerate(folded.runs):
            self._add_chain(index, run)

    def _inputs(self, op: Op) -> list[fx.Node]:
        """Its operands, those of the planned blocks."""
        return [n for n in self.tensors[op.node][: len(op.inputs)] if n is not None]

    def _representative(self, node: fx.Node) -> fx.Node:
        return node if node.op == "placeholder" else self.folded.nodes[self.folded.representative(self.position[node])]

    def _factor(self, scope: Scope, seconds: Table | Sequence[float], nbytes: Table | None = None) -> None:
        self.network.factors.append(Factor(scope, np.asarray(seconds, dtype=float), nbytes))

    # --- ops and parameters ------------------------------------------------------------------------------------------

    def _add_ops(self) -> None:
        wanted = wanted_parts(self.ops, self.tensors, self.ranks)
        axes = weight_axes(self.ops, self.tensors) if not self.constraints.all_axes else None
        for op in self.ops:
            if op.node in self.constraints.options:
                states = self.constraints.options[op.node]
            else:
                around = enumerate(self.tensors[op.node])
                hints = [(i, s) for i, t in around if t is not None for s in wanted.get(t, ())]
                states = choices(op.row, self.ranks, hints) if op.row is not None else [whole_choice(op.node)]
                if op.node in self.constraints.pins:
                    states = pinned_choices(op, self.constraints.pins[op.node], states, self.ranks)
                else:
                    states = [c for c in states if axes is None or self._may_split(op, c, axes[op.node])]
                    if self.ranks == 1 and not self.constraints.splits:  # to split gains nothing
                        states = [c for c in states if not c.axes] or states
                if not self.constraints.weights:
                    states = [c for c in states if c.splits_dynamic] or states
                if is_carried(op.node) and self.constraints.weights:  # it grows: the next call's slices would be others
                    states = [c for c in states if not c.splits_dynamic]
                if is_carried(op.node) or not any(value.needs_grad for value in (*op.operands, *op.results)):
                    # the same as I where no gradient flows; and what is whole between two calls is I
                    states = [c for c in states if c.name != "R"]
            variable = self.network.variable(("op", self.position[op.node], 0), states)
            saved = None
            if self.constraints.per_parameter is not None:
                saved = np.array([self.costs.saved(op, choice) for choice in states])
            self._factor((variable,), [self._op_seconds(op, choice) for choice in states], saved)

    def _may_split(self, op: Op, choice: Choice, axes: set[str]) -> bool:
        """Whether a choice splits nothing but these axes, or a dynamic size."""
        c = self.constraints
        weights = c.weights or passes_on_weight(op.node) or op.node.target is STORE
        return all((axis in axes and weights) or (parts == EQUAL and c.dynamic) for axis, parts in choice.axes)

    def _op_seconds(self, op: Op, choice: Choice) -> float:
        inside = (sent.seconds for _, _, *ways in self.costs.inside(op, choice) for sent in ways)
        return self.costs.seconds(op, choice) + sum(inside)

    def _add_stored(self, node: fx.Node) -> None:
        wanted = [
            choice.operands[i]
            for op in self.consumers[node]
            for i, operand in enumerate(self._inputs(op))
            if operand is node
            for choice in self._states(op)[1]
        ]
        path = node.meta["path"]
        states: list[Layout] = [I]
        if path in self.constraints.parameters:
            states = [self.constraints.parameters[path]]
        elif node.meta["kind"] in ("parameter", "buffer") or node in self.left:
            states = [*dict.fromkeys(layout for layout in wanted if isinstance(layout, Shard)), I]
            states = self._pinned_layouts(node) or states
        variable = self.network.variable(("stored", *self.folded.first_use(node)), states)
        if node in self.left:
            after, choices_after = self._states_of(self._representative(self.left[node]))
            table = _spread_out([states, choices_after], lambda at, c: 0.0 if c.results[0] == at else FORBIDDEN)
            self._factor((variable, after), table)
        times = self._weight_of(node)
        if times:
            self._factor((variable,), np.zeros(len(states)), times * np.array([self._held(node, at) for at in states]))

    def _held(self, node: fx.Node, layout: Layout) -> float:
        """Bytes on the rank that holds the most, under a limit of memory; else on an average rank."""
        value = Value.of(node)
        if self.constraints.per_parameter is not None:
            return value.held(layout, self.ranks)
        return value.nbytes / self.ranks if isinstance(layout, Shard) else value.nbytes

    def _weight_of(self, node: fx.Node) -> float:
        """How many times a placeholder's bytes count in the budget."""
        if self.constraints.per_parameter is None:
            return float(is_weight(node))
        return self.constraints.per_parameter if node.meta["kind"] == "parameter" and node.meta["needs_grad"] else 1.0

    def _pinned_layouts(self, node: fx.Node) -> list[Layout]:
        """The layouts in which pinned ops can take a parameter; empty where no pinned op takes it.

        Raises:
            PlanError: two pinned ops require different layouts.
        """
        allowed: list[Layout] = []
        for op in self.consumers[node]:
            if op.node not in self.constraints.pins:
                continue
            places = [i for i, operand in enumerate(self._inputs(op)) if operand is node]
            states = self._states(op)[1]
            taken = ((c, c.operands[i]) for i in places for c in states)
            pinned = [layout for c, layout in taken if isinstance(layout, Shard) or c.name == "I"]
            common = [layout for layout in allowed if layout in pinned] if allowed and pinned else allowed or pinned
            if allowed and pinned and not common:
                raise pinned_layout_conflict(node.meta["path"], str(allowed[0]), str(pinned[0]), op.node)
            allowed = list(dict.fromkeys(common))
        return allowed

    # --- values ------------------------------------------------------------------------------------------------------

    def _produced(self, node: fx.Node) -> tuple[int, list[Layout]]:
        """The variable that decides the layout of a value, and the layout in each of its states."""
        if node.op == "placeholder":
            variable = self.network.keys["stored", *self.folded.first_use(node)]
            return variable, self.network.states[variable]
        source, index = (node, 0) if is_tensor_op(node) else element_of(node)
        variable = self.network.keys["op", self.position[self._representative(source)], 0]
        return variable, [choice.results[index] for choice in self.network.states[variable]]

    def _demands(self, node: fx.Node, op: Op) -> tuple[int, list[frozenset[Layout]], list[Layout | None]]:
        """A consumer's variable; per state the layouts of a value that it requires, and the one that it writes to."""
        variable, states = self._states(op)
        places = [i for i, operand in enumerate(self._inputs(op)) if operand is node]
        written = [i for i in places if op.row is not None and i in op.row.options.mutates]
        wanted = [frozenset(choice.operands[i] for i in places) for choice in states]
        return variable, wanted, [choice.operands[written[0]] if written else None for choice in states]

    def _states(self, op: Op) -> tuple[int, list[Choice]]:
        return self._states_of(op.node)

    def _states_of(self, node: fx.Node) -> tuple[int, list[Choice]]:
        variable = self.network.keys["op", self.position[node], 0]
        return variable, self.network.states[variable]

    def _add_value(self, node: fx.Node) -> None:
        producer, produced = self._produced(node)
        value, whole = Value.converted(node), self._is_taken_whole(node)
        demands = [self._demands(node, op) for op in self.consumers.get(node, ())]
        fixed = frozenset([I]) if node in self.results else frozenset[Layout]()
        for variable, required, written in demands:
            illegal = [
                [
                    (w is not None and w != g) or (whole and any(isinstance(x, Shard) for x in d))
                    for d, w in zip(required, written, strict=True)
                ]
                for g in produced
            ]
            if any(map(any, illegal)):
                self._factor((producer, variable), np.where(illegal, FORBIDDEN, 0.0))
        if len(demands) > 1 or (demands and fixed):
            self._share(node, value, producer, produced, [(v, r) for v, r, _ in demands], fixed)
        elif demands:
            ((variable, required, _),) = demands
            table = _spread_out([produced, required], lambda p, r: self._conversions(node, value, p, r))
            self._factor((producer, variable), table)
        elif fixed:
            self._factor((producer,), [self._conversions(node, value, layout, fixed) for layout in produced])

    def _is_taken_whole(self, node: fx.Node) -> bool:
        source = node if node.op == "placeholder" or is_tensor_op(node) else element_of(node)[0]
        return source in self.constraints.pins and self.constraints.pins[source].style.whole_result

    def _conversions(self, node: fx.Node, value: Value, produced: Layout, required: Iterable[Layout]) -> float:
        """Seconds to give a value all required layouts."""
        steps = self.costs.plan_conversions(value, produced, required)
        if steps is None or any((node, step) in self.constraints.vetoed for step in steps):
            return FORBIDDEN
        seconds = sum(sent.seconds for step in steps for sent in self.costs.sent(value, step))
        if steps and node.op == "placeholder" and isinstance(produced, Shard):
            # a parameter is stored as it is used; one whose layout is fixed may have to be gathered nevertheless
            return GATHERED_PARAMETER * seconds if node.meta["path"] in self.constraints.parameters else FORBIDDEN
        return seconds

    def _share(
        self,
        node: fx.Node,
        value: Value,
        producer: int,
        produced: Sequence[Layout],
        demands: Sequence[tuple[int, list[frozenset[Layout]]]],
        fixed: frozenset[Layout],
    ) -> None:
        """Adds a variable whose states are the sets of layouts that this value is converted to.

        Every consumer must find the layouts that it requires in the chosen set.
        """
        unions = {fixed}
        for _, required in demands:
            unions = {union | more for union in unions for more in set(required)}
            if len(unions) > MAX_SETS:
                unions = set(sorted(unions, key=_by_size)[:MAX_SETS])
        sets = sorted(unions, key=_by_size)
        states = dict.fromkeys((layout, layouts - {layout}) for layout in produced for layouts in sets)
        costs = {state: self._conversions(node, value, *state) for state in states}
        legal = [state for state in states if costs[state] < FORBIDDEN]
        place = self.position.get(node)
        key = ("value", place, 0) if place is not None else ("value of", *self.folded.first_use(node))
        variable = self.network.variable(key, legal)
        self._factor((variable,), [costs[state] for state in legal])
        table = _spread_out([produced, legal], lambda layout, state: 0.0 if layout == state[0] else FORBIDDEN)
        self._factor((producer, variable), table)
        for consumer, required in demands:
            table = _spread_out([legal, required], lambda state, r: 0.0 if r <= state[1] | {state[0]} else FORBIDDEN)
            self._factor((variable, consumer), table)

    # --- repeated blocks ---------------------------------------------------------------------------------------------

    def _add_chain(self, index: int, run: Repetition) -> None:
        """Describes the third block of a run, which represents all inner ones, for the solver to chain.

        `inner` are the factors that touch the third block and not the last, `around` the variables of the third block
        that the last one reads. Each of these is a variable of the chain's exit, and its twin one block earlier is one
        of the entry. To chain a block, its entry and exit must have the same states in the same order; otherwise the
        blocks are uneven, and planned one by one.
        """
        block: dict[int, int] = {}
        for (_, position, _), variable in self.network.keys.items():
            place = self.folded.place(position)
            if place is not None and place[0] == index:
                block[variable] = place[1]
        keys = self.network.keys
        second = [(key, variable) for key, variable in keys.items() if block.get(variable) == 1]
        shifted = {variable: keys.get((kind, at + run.period, slot)) for (kind, at, slot), variable in second}
        earlier = {after: before for before, after in shifted.items() if after is not None}
        inner, around = [], set[int]()
        for i, factor in enumerate(self.network.factors):
            blocks = {block.get(v) for v in factor.scope}
            if 2 in blocks and 3 not in blocks:
                inner.append(i)
            elif 2 in blocks:
                around |= {v for v in factor.scope if block.get(v) == 2}
        scope = {v for i in inner for v in self.network.factors[i].scope}
        if not around <= earlier.keys():
            raise _Uneven(f"the blocks of the run at {run.start} read different values")
        entry = {v for v in scope if block.get(v) == 1} | {earlier[v] for v in around}
        order = sorted(entry)
        later = {before: after for before, after in shifted.items() if after is not None}
        for variable in order:
            if variable not in later or self.network.states[variable] != self.network.states[later[variable]]:
                raise _Uneven(f"variable {variable} of the run at {run.start}")
        self.network.chains.append(
            Chain(
                run,
                tuple(inner),
                tuple(order),
                tuple(later[v] for v in order),
                tuple(sorted(v for v in scope if block.get(v) not in (1, 2))),
            )
        )


def _left_again(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """An input -> the value that a call leaves in its place."""
    inputs = {node.meta["path"]: node for node in carried_inputs(graph)}
    return {inputs[n.meta["place"]]: n for n in graph.nodes if is_carried(n) and n.meta["place"] in inputs}


def _by_size(layouts: frozenset[Layout]) -> tuple[int, list[str]]:
    return len(layouts), sorted(map(str, layouts))


def pinned_choices(op: Op, pin: Pin, legal: Sequence[Choice], ranks: int) -> list[Choice]:
    """The choices that a pin leaves to an op.

    Raises:
        PlanError: the op can't be split as its pin says.
    """
    if not pin.axes:
        return [whole_choice(op.node)]
    for axis in pin.axes:
        named = [c for c in legal if c.name == f"split {axis}"]
        if named:
            return [c for c in named if _fills_ranks(op, c, ranks)] or named
    if pin.style.name == "sequence":  # that it has the axis does not say that it can be split there
        return list(legal)
    module = op.node.meta.get("module", "")
    why = f"{where(op.node)} can't be split along {pin.axes[0]}"
    raise cannot_have(pin.key, module, pin.style.name, why, ())


def _fills_ranks(op: Op, choice: Choice, ranks: int) -> bool:
    """Whether every rank gets a part of each split axis, or the axes are too small for that."""
    sizes = [op.sizes[axis] for axis, _ in choice.axes]
    static = [parts for _, parts in choice.axes if parts != EQUAL]
    return all(s < ranks for s in sizes) or all(local_size(parts, ranks - 1, ranks) > 0 for parts in static)


def _spread_out(states: Sequence[Sequence[Any]], cost: Callable[[Any, Any], float]) -> Table:
    """A table over two variables' states; equal states are priced once, for many are equal."""
    rows, columns = ({state: place for place, state in enumerate(dict.fromkeys(each))} for each in states)
    small = np.array([[cost(a, b) for b in columns] for a in rows], dtype=float).reshape(len(rows), len(columns))
    at = [[places[state] for state in each] for places, each in zip((rows, columns), states, strict=True)]
    return small[np.ix_(*at)]
