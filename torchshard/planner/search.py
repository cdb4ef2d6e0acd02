"""From a graph and pins to a Plan: op by op in order, each unpinned op takes what costs the fewest bytes.

A pinned op splits the axis that its style names; in which parts (seven heads of eight, not 56 rows) is learnt from
the ops around it first. An unpinned op follows what is split already, or has it gathered, whichever sends fewer
bytes given its operands. A parameter that no pin names is stored split where its first use takes it split.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from torchshard.conversions import route, step_bytes
from torchshard.errors import PlanError
from torchshard.graph import hint, is_tensor, is_tensor_op, nbytes, node_row, operands, values, where
from torchshard.layouts import I, Layout, Shard, is_whole, local_size
from torchshard.notation import Choice, Row, choices, spread
from torchshard.planner.plan import Plan
from torchshard.planner.styles import Pin, cannot_have, pinned_layout_conflict

FORBIDDEN = float("inf")
GATHER_PARAMETER = 1e6
"""A stored slice of a parameter is gathered only where nothing else is legal: this many times its bytes."""
MAX_WANTED = 4
"""Segmentations kept per tensor while learning which are wanted."""
MAX_WANTED_PARTS = 8


@dataclass
class _State:
    """What is decided while walking the graph."""

    world: int
    layouts: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    chosen: dict[str, Choice] = field(default_factory=dict)
    paid: set[tuple[fx.Node, Layout]] = field(default_factory=set)
    comm_bytes: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A graph with the rows of its ops, ready to be planned for any pins."""

    graph: fx.Graph
    world: int
    rows: Mapping[fx.Node, Row | None]
    wanted: Mapping[fx.Node, list[Shard]]
    """The segmented Shards that ops around a value could use."""


def problem(graph: fx.Graph, world: int) -> Problem:
    """Reads the rows of a graph's ops, and learns which segmentations are wanted where."""
    rows = {n: node_row(n) for n in graph.nodes if is_tensor_op(n)}
    return Problem(graph, world, rows, _wanted(rows, world))


def _wanted(rows: Mapping[fx.Node, Row | None], world: int) -> dict[fx.Node, list[Shard]]:
    wanted: dict[fx.Node, list[Shard]] = {}
    order = [n for n, row in rows.items() if row is not None]
    for node in (*reversed(order), *order):
        row, tensors = rows[node], _tensors(node)
        assert row is not None
        hints = [(i, s) for i, t in enumerate(tensors) if t is not None for s in wanted.get(t, ())]
        for position, shard in spread(row, world, hints):
            target = tensors[position]
            known = wanted.setdefault(target, []) if target is not None else []
            small = shard.parts is not None and len(shard.parts) <= MAX_WANTED_PARTS
            if shard not in known and len(known) < MAX_WANTED and small:
                known.append(shard)
    return wanted


def _tensors(node: fx.Node) -> list[fx.Node | None]:
    """Operands, then results: the node itself, or the getitems of its results (None where nobody takes one)."""
    if is_tensor(node):
        return [*operands(node), node]
    taken: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
    return [*operands(node), *(taken.get(i) for i in range(len(values(node))))]


def search(
    made: Problem,
    options: Mapping[fx.Node, list[Choice]],
    whole_results: Collection[fx.Node] = (),
    parameters: Mapping[str, Layout] | None = None,
) -> Plan:
    """The plan for these pins.

    Args:
        options: the choices that a pinned op may take, alike but for the parts that their axis is split in.
        whole_results: ops whose results are wanted whole on every rank.
        parameters: layouts of parameters that are fixed already, by name.

    Raises:
        PlanError: an op can't run as it is pinned, or one parameter is asked to lie in two ways.
    """
    fixed = dict(parameters or {})
    prefer = {node: 0 for node, found in options.items() if not _takes_split(node, found[0])}
    best = _walk(made, options, prefer, whole_results, fixed)
    groups: dict[tuple[str, int], list[fx.Node]] = {}
    for node in prefer:
        if len(options[node]) > 1:
            groups.setdefault((re.sub(r"\d+", "*", node.name), len(options[node])), []).append(node)
    for (_, count), nodes in groups.items():
        for option in range(1, count):
            trial = prefer | dict.fromkeys(nodes, option)
            plan = _walk(made, options, trial, whole_results, fixed)
            if plan.comm_bytes < best.comm_bytes:
                best, prefer = plan, trial
    return best


def _takes_split(node: fx.Node, choice: Choice) -> bool:
    """Whether a pinned op takes a split value (row parallel): in which parts, then follows from the value."""
    pairs = zip(operands(node), choice.operands, strict=True)
    return any(isinstance(layout, Shard) and operand.op != "placeholder" for operand, layout in pairs)


def pinned_options(made: Problem, pins: Mapping[fx.Node, Pin]) -> dict[fx.Node, list[Choice]]:
    """The choices that each pin leaves its op.

    Raises:
        PlanError: an op can't be split as its pin says.
    """
    return {node: _pinned_choices(made, node, pin) for node, pin in pins.items()}


def _pinned_choices(made: Problem, node: fx.Node, pin: Pin) -> list[Choice]:
    row = made.rows[node]
    if not pin.axes:
        return [Choice("I", (I,) * len(operands(node)), (I,) * len(values(node)))]
    hints = [(i, s) for i, t in enumerate(_tensors(node)) if t is not None for s in made.wanted.get(t, ())]
    found = choices(row, made.world, hints) if row is not None else []
    for axis in pin.axes:
        named = [c for c in found if c.name == f"split {axis}"]
        if named:
            plain = [c for c in named if _fills_ranks(row, c, made.world)]
            return plain or named
    raise cannot_have(
        pin.key, node.meta.get("module", ""), pin.style.name, f"{where(node)} can't be split along {pin.axes[0]}"
    )


def _fills_ranks(row: Row | None, choice: Choice, world: int) -> bool:
    """Whether every rank holds something, or the axis is too small for that anyway."""
    assert row is not None
    sizes = [row.sizes[axis] for axis, _ in choice.axes]
    return all(s < world for s in sizes) or all(local_size(p, world - 1, world) > 0 for _, p in choice.axes)


# --- one walk over the graph -----------------------------------------------------------------------------------------


def _walk(
    made: Problem,
    options: Mapping[fx.Node, list[Choice]],
    prefer: Mapping[fx.Node, int],
    whole_results: Collection[fx.Node],
    fixed: Mapping[str, Layout],
) -> Plan:
    state = _State(made.world)
    stored = _stored(made, options, prefer, fixed)
    for node in made.graph.nodes:
        if node.op == "placeholder":
            if node.meta["kind"] not in ("parameter", "buffer"):
                state.layouts[node] = (I,)
            elif node in stored:
                state.layouts[node] = (stored[node],)
        elif node in made.rows:
            found = options.get(node)
            _plan_op(made, state, node, found[prefer[node] :][:1] if found and node in prefer else found)
            if node in whole_results:
                state.comm_bytes += _convert_cost(state, node, I)
        elif node.op == "call_function" and is_tensor(node):
            source: Any = node.args[0]
            state.layouts[node] = (state.layouts[source][node.args[1]],)
        elif node.op == "output":
            for result in node.all_input_nodes:
                if is_tensor(result):
                    state.comm_bytes += _convert_cost(state, result, I)
    kinds = {n.meta["path"]: n for n in made.graph.nodes if n.op == "placeholder"}
    named = {
        path: state.layouts.get(n, (I,))[0] for path, n in kinds.items() if n.meta["kind"] in ("parameter", "buffer")
    }
    return Plan(made.world, named, state.chosen, state.comm_bytes)


def _stored(made: Problem, options: Any, prefer: Any, fixed: Mapping[str, Layout]) -> dict[fx.Node, Layout]:
    """The layouts of the parameters that pins (or the caller) fix."""
    stored = {n: fixed[n.meta["path"]] for n in made.graph.nodes if n.op == "placeholder" and n.meta["path"] in fixed}
    given = set(stored)
    for node, found in options.items():
        if node not in prefer:
            continue
        choice = found[prefer[node]]
        for operand, layout in zip(operands(node), choice.operands, strict=True):
            is_weight = operand.op == "placeholder" and operand.meta["kind"] == "parameter"
            if not is_weight or not (isinstance(layout, Shard) or choice.name == "I"):
                continue
            if operand not in given and stored.setdefault(operand, layout) != layout:
                raise pinned_layout_conflict(operand.meta["path"], str(stored[operand]), str(layout), node)
    return stored


def _plan_op(made: Problem, state: _State, node: fx.Node, options: list[Choice] | None) -> None:
    inputs, row = operands(node), made.rows[node]
    found = options or _followed(made, state, node, row, inputs)
    costs = [_op_cost(state, node, row, inputs, choice) for choice in found]
    at = min(range(len(found)), key=costs.__getitem__)
    if costs[at][0] == FORBIDDEN:
        raise PlanError(
            "no legal way to run an op given how its operands lie",
            where=where(node),
            why=f"operands lie as {', '.join(str(state.layouts.get(n, (I,))[0]) for n in inputs)}",
            attempt="unpin one of the modules around it",
        )
    choice = found[at]
    for operand, layout in zip(inputs, choice.operands, strict=True):
        if operand not in state.layouts:
            state.layouts[operand] = (layout if isinstance(layout, Shard) else I,)
        state.comm_bytes += _convert_cost(state, operand, layout)
        state.paid.add((operand, layout))
    state.comm_bytes += _inner_bytes(node, row, choice, made.world)
    state.layouts[node] = choice.results
    state.chosen[node.name] = choice


def _followed(made: Problem, state: _State, node: fx.Node, row: Row | None, inputs: list[fx.Node]) -> list[Choice]:
    """The choices of an unpinned op: whole, or along what is split (or Partial) already."""
    if row is None:
        return [Choice("I", (I,) * len(inputs), (I,) * len(values(node)))]
    held = [state.layouts.get(n, (None,))[0] for n in inputs]
    if all(layout is None or is_whole(layout) for layout in held):
        return choices(row, made.world)[:1]
    hints = [(i, layout) for i, layout in enumerate(held) if isinstance(layout, Shard)]
    hints += [(i, s) for i, n in enumerate(inputs) for s in made.wanted.get(n, ())]
    return [
        choice
        for choice in choices(row, made.world, hints)
        if not choice.axes
        or any(isinstance(have, Shard) and have == want for have, want in zip(held, choice.operands, strict=True))
    ]


def _op_cost(
    state: _State, node: fx.Node, row: Row | None, inputs: list[fx.Node], choice: Choice
) -> tuple[float, float]:
    """Bytes to bring the operands to what the choice wants; of two equals, bytes to bring its results to whole."""
    mutates = row.options.mutates if row is not None else frozenset()
    total, seen = 0.0, set()
    for i, (operand, layout) in enumerate(zip(inputs, choice.operands, strict=True)):
        if (operand, layout) in seen:
            continue
        seen.add((operand, layout))
        cost = _convert_cost(state, operand, layout)
        if i in mutates and operand in state.layouts and state.layouts[operand][0] != layout:
            return FORBIDDEN, 0.0
        total += cost
    later = 0.0
    for value, layout in zip(values(node), choice.results, strict=True):
        if isinstance(value, Tensor):
            later += _route_bytes(layout, I, nbytes(value), state.world, node) if layout != I else 0.0
    return total + _inner_bytes(node, row, choice, state.world), later


def _convert_cost(state: _State, operand: fx.Node, layout: Layout) -> float:
    have = state.layouts.get(operand, (None,))[0]
    if (operand, layout) in state.paid:
        return 0.0
    if have is None:
        have = layout if isinstance(layout, Shard) else I
    cost = _route_bytes(have, layout, nbytes(operand.meta["val"]), state.world, operand)
    stored_slice = operand.op == "placeholder" and isinstance(have, Shard) and have != layout
    return cost * GATHER_PARAMETER if stored_slice else cost


def _route_bytes(have: Layout, want: Layout, size: int, world: int, node: fx.Node) -> float:
    needs_grad = bool(node.meta.get("needs_grad"))
    steps = route(have, want, needs_grad=needs_grad)
    if steps is None:
        return FORBIDDEN
    return sum(step_bytes(name, size, world, needs_grad=needs_grad) for name, _ in steps)


def _inner_bytes(node: fx.Node, row: Row | None, choice: Choice, world: int) -> float:
    """Bytes of the all-reduces inside a replacement: some numbers per row of the split operand."""
    if row is None or not choice.axes or choice.axes[0][0] not in row.options.comm:
        return 0.0
    axis = choice.axes[0][0]
    whole = nbytes(operands(node)[0].meta["val"]) / max(hint(row.sizes[axis]), 1)
    return 2 * (world - 1) / world * whole * row.options.comm[axis]
