"""From a graph to a network of costs: what is to be decided, and what each decision costs together with its neighbours.

    an op                       a variable, a state per choice; costs its work
    a parameter                 a variable, a state per layout that it may be stored in; costs its bytes
    a value of one consumer     a table over producer and consumer: the conversions from what the one gives to what the
                                other wants
    a value of several          a variable too, a state per (layout given, layouts had besides): a conversion that
                                several consumers share is paid once

Repeated blocks: of a run of N only the first three and the last are built. The third stands for all between, by the
table of least costs from the second to it, which is chained N - 3 times (`Chain`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from torchshard.core.conversions import ConversionStep
from torchshard.core.layouts import I, Layout, Shard, local_size
from torchshard.core.notation import Choice, choices
from torchshard.ir.graph import is_tensor, is_tensor_op, is_weight, where, whole_choice
from torchshard.planner.axes import tensors_of, wanted_parts, weight_axes
from torchshard.planner.costs import CostModel, Op, Value
from torchshard.planner.elimination import Scope, Table
from torchshard.planner.folded import Folded
from torchshard.planner.repeats import Run
from torchshard.planner.styles import Pin, cannot_have, pinned_layout_conflict

log = logging.getLogger("torchshard.planner")
FORBIDDEN = float("inf")
GATHERED_PARAMETER = 1e6
"""A slice that a parameter must be stored in is gathered only where nothing else is legal: so many times its cost."""
MOST_SETS = 1024
"""Of a value whose consumers want it in many layouts, so many sets of them are looked at, the smallest."""


@dataclass(frozen=True)
class GraphConstraints:
    """What the caller fixes."""

    options: Mapping[fx.Node, list[Choice]] = field(default_factory=dict)
    """The choices that an op may take."""
    pins: Mapping[fx.Node, Pin] = field(default_factory=dict)
    """What the user's plan says of an op."""
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    """How parameters are stored, by name."""
    vetoed: frozenset[tuple[fx.Node, ConversionStep]] = frozenset()
    """Conversions of values that may not be made."""
    all_axes: bool = False
    """Whether dims that no weight touches (batch, sequence) may be split too."""
    per_parameter: float | None = None
    """How many times its bytes a trained parameter takes, with gradient and optimizer; None: only weights count."""

    def differences(self, graph: fx.Graph) -> dict[fx.Node, object]:
        """What tells apart nodes that look alike."""
        found: dict[fx.Node, object] = dict(self.options)
        found |= {node: (pin.style, pin.axes) for node, pin in self.pins.items()}
        for node, link in sorted(self.vetoed, key=str):
            found[node] = (found.get(node), link)
        stored = (node for node in graph.nodes if node.op == "placeholder" and node.meta["path"] in self.parameters)
        return found | {node: self.parameters[node.meta["path"]] for node in stored}


@dataclass
class Factor:
    """Costs over a few variables."""

    scope: Scope
    seconds: Table
    nbytes: Table | None = None


@dataclass(frozen=True)
class Chain:
    """A run's inner blocks, all alike."""

    run: Run
    factors: tuple[int, ...]
    """The factors of one block, among them those with the block before."""
    entry: Scope
    """The variables of the block before that these hold."""
    exit: Scope
    """The same of this block."""
    shared: Scope
    """Variables outside the run that these hold."""

    @property
    def count(self) -> int:
        """How many blocks it stands for."""
        return self.run.count - 3


Key = tuple[str, int, int]
"""What a variable is of: ('op', position, 0), ('value', position, 0) or ('stored', position of first use, slot)."""


@dataclass
class Network:
    """Variables with their states, and factors."""

    folded: Folded
    states: list[list[Any]] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    keys: dict[Key, int] = field(default_factory=dict)
    """What a variable is of -> the variable. The states of an op are Choices, those of a placeholder Layouts."""

    @property
    def sizes(self) -> list[int]:
        """The number of states of each variable."""
        return [len(states) for states in self.states]

    def variable(self, key: Key, states: Sequence[Any]) -> int:
        """A new variable."""
        self.keys[key] = len(self.states)
        self.states.append(list(states))
        return self.keys[key]


# --- the network -----------------------------------------------------------------------------------------------------


def build(graph: fx.Graph, costs: CostModel, constraints: GraphConstraints, *, fold: bool = True) -> Network:
    """The network of a graph; with `fold` each run of repeated blocks is there once."""
    try:
        return _Builder(graph, costs, constraints, Folded.of(graph, constraints.differences(graph), fold=fold)).network
    except _Uneven as error:
        log.info("repeated blocks are planned one by one: %s", error)
        return build(graph, costs, constraints, fold=False)


class _Uneven(Exception):
    """Blocks that look alike have different states, by what is around the first and the last of them."""


class _Builder:
    """Adds variables and factors, part by part; a variable's key says which block it is in."""

    def __init__(self, graph: fx.Graph, costs: CostModel, constraints: GraphConstraints, folded: Folded) -> None:
        self.costs, self.constraints, self.folded, self.ranks = costs, constraints, folded, costs.axis.size
        self.network, self.position = Network(folded), folded.position
        planned = [folded.nodes[i] for i in folded.planned()]
        self.ops = [Op.of(node) for node in planned if is_tensor_op(node)]
        self.tensors = {op.node: [n and self._stand_in(n) for n in tensors_of(op.node)] for op in self.ops}
        self.consumers: dict[fx.Node, list[Op]] = {}
        for op in self.ops:
            for operand in dict.fromkeys(self._inputs(op)):
                self.consumers.setdefault(operand, []).append(op)
        self.results = {self._stand_in(n) for n in graph.output_node().all_input_nodes if is_tensor(n)}
        stored = [n for n in graph.nodes if n.op == "placeholder" and n in self.consumers]
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

    def _stand_in(self, node: fx.Node) -> fx.Node:
        return node if node.op == "placeholder" else self.folded.nodes[self.folded.stand_in(self.position[node])]

    def _factor(self, scope: Scope, seconds: Table, nbytes: Table | None = None) -> None:
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
                    states = [c for c in states if axes is None or all(a in axes[op.node] for a, _ in c.axes)]
                if not any(value.needs_grad for value in (*op.operands, *op.results)):
                    states = [c for c in states if c.name != "R"]  # the same as I where no gradient flows
            variable = self.network.variable(("op", self.position[op.node], 0), states)
            saved = None
            if self.constraints.per_parameter is not None:
                saved = np.array([self.costs.saved(op, choice) for choice in states])
            self._factor((variable,), [self._op_seconds(op, choice) for choice in states], saved)

    def _op_seconds(self, op: Op, choice: Choice) -> float:
        inside = (sent.seconds for _, *ways in self.costs.inside(op, choice) for sent in ways)
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
        elif node.meta["kind"] in ("parameter", "buffer"):
            states = [*dict.fromkeys(layout for layout in wanted if isinstance(layout, Shard)), I]
            states = self._pinned_layouts(node) or states
        variable = self.network.variable(("stored", *self.folded.home(node)), states)
        times = self._weight_of(node)
        if times:
            self._factor((variable,), np.zeros(len(states)), times * np.array([self._held(node, at) for at in states]))

    def _held(self, node: fx.Node, layout: Layout) -> float:
        """Bytes on the rank that holds the most, where memory is what counts; else of an average rank."""
        value = Value.of(node)
        if self.constraints.per_parameter is not None:
            return value.held(layout, self.ranks)
        return value.nbytes / self.ranks if isinstance(layout, Shard) else value.nbytes

    def _weight_of(self, node: fx.Node) -> float:
        """How many times a placeholder's bytes count."""
        if self.constraints.per_parameter is None:
            return float(is_weight(node))
        return self.constraints.per_parameter if node.meta["kind"] == "parameter" and node.meta["needs_grad"] else 1.0

    def _pinned_layouts(self, node: fx.Node) -> list[Layout]:
        """How the ops that the plan names leave a parameter to be stored; empty where they say nothing.

        Raises:
            PlanError: two of them want it stored in different ways.
        """
        held: list[Layout] = []
        for op in self.consumers[node]:
            if op.node not in self.constraints.pins:
                continue
            places = [i for i, operand in enumerate(self._inputs(op)) if operand is node]
            states = self._states(op)[1]
            said = [c.operands[i] for i in places for c in states if isinstance(c.operands[i], Shard) or c.name == "I"]
            common = [layout for layout in held if layout in said] if held and said else held or said
            if held and said and not common:
                raise pinned_layout_conflict(node.meta["path"], str(held[0]), str(said[0]), op.node)
            held = list(dict.fromkeys(common))
        return held

    # --- values ------------------------------------------------------------------------------------------------------

    def _given(self, node: fx.Node) -> tuple[int, list[Layout]]:
        """The variable that decides how a value lies where it is made, and how it lies in each of its states."""
        if node.op == "placeholder":
            variable = self.network.keys["stored", *self.folded.home(node)]
            return variable, self.network.states[variable]
        source: Any = node if is_tensor_op(node) else node.args[0]
        index: Any = 0 if source is node else node.args[1]
        variable = self.network.keys["op", self.position[self._stand_in(source)], 0]
        return variable, [choice.results[index] for choice in self.network.states[variable]]

    def _demands(self, node: fx.Node, op: Op) -> tuple[int, list[frozenset[Layout]], list[Layout | None]]:
        """A consumer's variable; in each of its states the layouts that it wants of a value, and that it writes to."""
        variable, states = self._states(op)
        places = [i for i, operand in enumerate(self._inputs(op)) if operand is node]
        written = [i for i in places if op.row is not None and i in op.row.options.mutates]
        wanted = [frozenset(choice.operands[i] for i in places) for choice in states]
        return variable, wanted, [choice.operands[written[0]] if written else None for choice in states]

    def _states(self, op: Op) -> tuple[int, list[Choice]]:
        variable = self.network.keys["op", self.position[op.node], 0]
        return variable, self.network.states[variable]

    def _add_value(self, node: fx.Node) -> None:
        producer, given = self._given(node)
        value, whole = Value.of(node), self._is_taken_whole(node)
        found = [self._demands(node, op) for op in self.consumers.get(node, ())]
        fixed = frozenset([I]) if node in self.results else frozenset[Layout]()
        for variable, wanted, written in found:
            illegal = [
                [
                    (w is not None and w != g) or (whole and any(isinstance(x, Shard) for x in d))
                    for d, w in zip(wanted, written, strict=True)
                ]
                for g in given
            ]
            if any(map(any, illegal)):
                self._factor((producer, variable), np.where(illegal, FORBIDDEN, 0.0))
        if len(found) > 1 or (found and fixed):
            self._share(node, value, producer, given, [(v, w) for v, w, _ in found], fixed)
        elif found:
            ((variable, wanted, _),) = found
            table = _spread_out([given, wanted], lambda g, w: self._conversions(node, value, g, w))
            self._factor((producer, variable), table)
        elif fixed:
            self._factor((producer,), [self._conversions(node, value, layout, fixed) for layout in given])

    def _is_taken_whole(self, node: fx.Node) -> bool:
        source: Any = node if node.op == "placeholder" or is_tensor_op(node) else node.args[0]
        return source in self.constraints.pins and self.constraints.pins[source].style.whole_result

    def _conversions(self, node: fx.Node, value: Value, given: Layout, wanted: Iterable[Layout]) -> float:
        """Seconds to bring a value to some layouts."""
        steps = self.costs.plan_conversions(value, given, wanted)
        if steps is None or any((node, step) in self.constraints.vetoed for step in steps):
            return FORBIDDEN
        seconds = sum(sent.seconds for step in steps for sent in self.costs.sent(value, step))
        if steps and node.op == "placeholder" and isinstance(given, Shard):
            return GATHERED_PARAMETER * seconds if node.meta["path"] in self.constraints.parameters else FORBIDDEN
        return seconds

    def _share(
        self,
        node: fx.Node,
        value: Value,
        producer: int,
        given: Sequence[Layout],
        found: Sequence[tuple[int, list[frozenset[Layout]]]],
        fixed: frozenset[Layout],
    ) -> None:
        """A variable for the layouts that a value is had in, which all its consumers find what they want among."""
        had = {fixed}
        for _, wanted in found:
            had = {sofar | more for sofar in had for more in set(wanted)}
            if len(had) > MOST_SETS:
                had = set(sorted(had, key=_by_size)[:MOST_SETS])
        sets = sorted(had, key=_by_size)
        states = dict.fromkeys((layout, layouts - {layout}) for layout in given for layouts in sets)
        costs = {state: self._conversions(node, value, *state) for state in states}
        states_ = [state for state in states if costs[state] < FORBIDDEN]
        place = self.position.get(node)
        key = ("value", place, 0) if place is not None else ("value of", *self.folded.home(node))
        variable = self.network.variable(key, states_)
        self._factor((variable,), [costs[state] for state in states_])
        self._factor((producer, variable), _spread_out([given, states_], lambda g, s: 0.0 if g == s[0] else FORBIDDEN))
        for consumer, wanted in found:
            table = _spread_out([states_, wanted], lambda s, w: 0.0 if w <= s[1] | {s[0]} else FORBIDDEN)
            self._factor((variable, consumer), table)

    # --- repeated blocks ---------------------------------------------------------------------------------------------

    def _add_chain(self, index: int, run: Run) -> None:
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
        held = {v for i in inner for v in self.network.factors[i].scope}
        if not around <= earlier.keys():
            raise _Uneven(f"the blocks of the run at {run.start} hold different values")
        entry = {v for v in held if block.get(v) == 1} | {earlier[v] for v in around}
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
                tuple(sorted(v for v in held if block.get(v) not in (1, 2))),
            )
        )


def _by_size(layouts: frozenset[Layout]) -> tuple[int, list[str]]:
    return len(layouts), sorted(map(str, layouts))


def pinned_choices(op: Op, pin: Pin, found: Sequence[Choice], ranks: int) -> list[Choice]:
    """The choices that a pin leaves an op.

    Raises:
        PlanError: the op can't be split as its pin says.
    """
    if not pin.axes:
        return [whole_choice(op.node)]
    for axis in pin.axes:
        named = [c for c in found if c.name == f"split {axis}"]
        if named:
            return [c for c in named if _fills_ranks(op, c, ranks)] or named
    module = op.node.meta.get("module", "")
    raise cannot_have(pin.key, module, pin.style.name, f"{where(op.node)} can't be split along {pin.axes[0]}")


def _fills_ranks(op: Op, choice: Choice, ranks: int) -> bool:
    """Whether every rank holds something, or the axis is too small for that anyway."""
    sizes = [op.sizes[axis] for axis, _ in choice.axes]
    return all(s < ranks for s in sizes) or all(local_size(p, ranks - 1, ranks) > 0 for _, p in choice.axes)


def _spread_out(states: tuple[Sequence[Any], Sequence[Any]] | list[Any], cost: Any) -> Table:
    """A table over two variables' states, of which many are alike."""
    rows, columns = (list(dict.fromkeys(s)) for s in states)
    small = np.array([[cost(a, b) for b in columns] for a in rows], dtype=float).reshape(len(rows), len(columns))
    at = [[known.index(s) for s in given] for known, given in zip((rows, columns), states, strict=True)]
    return small[np.ix_(*at)]
