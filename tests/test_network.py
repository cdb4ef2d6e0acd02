"""Tests of the cost network: components, elimination orders, weight factors and files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import torchshard as ts
from tests.models import CASES
from torchshard.core.choices import factor_groups
from torchshard.ir.graph import is_tensor
from torchshard.planner.axes import Tensors, brings_axes, is_parameter, weight_axes
from torchshard.planner.elimination import HEURISTICS, Elimination, apart, decomposed_order, primal_graph
from torchshard.planner.folded import Folded
from torchshard.planner.network import Decision, Network
from torchshard.planner.properties import Op
from torchshard.planner.search import MAX_PRICE, solve_within_budget
from torchshard.planner.solver import Solver
from torchshard.planner.states import PlannedOps
from torchshard.report.network import network_of, plain
from torchshard.testing import capture

# --- components -------------------------------------------------------------------------------------------------------


def _drawn(seed: int) -> Network:
    """Draws up to seven decisions, some with one state, and few edges, so most networks have several components."""
    rng, graph = np.random.default_rng(seed), fx.Graph()
    network = Network(Folded([], [], {}))
    names, sizes = [], [int(rng.integers(1, 4)) for _ in range(int(rng.integers(2, 8)))]
    for i, size in enumerate(sizes):
        names.append(network.add(Decision("stored", i), graph.placeholder(f"x{i}"), range(size)))  # type: ignore[arg-type]
        network.cost((names[-1],), rng.integers(0, 9, size).astype(float), rng.integers(0, 9, size).astype(float))
    for _ in range(int(rng.integers(0, len(names) + 1))):
        a, b = (int(v) for v in rng.permutation(len(names))[:2])
        table = rng.integers(0, 9, (sizes[a], sizes[b])).astype(float)
        table[1:, 1:][rng.random((sizes[a] - 1, sizes[b] - 1)) < 0.2] = np.inf
        network.cost((names[a], names[b]), table)
    return network


def _dense(network: Network) -> tuple[Any, Any]:
    """Returns the seconds and bytes of all joint states."""
    names, sizes = list(network.graph), list(network.sizes.values())
    totals = np.zeros(sizes), np.zeros(sizes)
    for factor in network.factors:
        order = sorted(range(len(factor.scope)), key=lambda i, scope=factor.scope: names.index(scope[i]))
        shape = [size if name in factor.scope else 1 for name, size in zip(names, sizes, strict=True)]
        for total, table in zip(totals, (factor.seconds, factor.nbytes), strict=True):
            if table is not None:
                total += table.transpose(order).reshape(shape)
    return totals


@given(st.integers(0, 10**6))
def test_parts_that_are_solved_apart_are_together_the_best(seed: int) -> None:
    """Parts solved separately are optimal together, at any price of a byte, or up to the gap in a shared budget."""
    network = _drawn(seed)
    seconds, nbytes = _dense(network)
    solver = Solver(network)
    for price in (0.0, 0.5, 2.0):
        best, found = (seconds + price * nbytes).min(), solver.best(price)
        assert found.seconds + price * found.nbytes == found.bound == best
        at = tuple(found.states[name] for name in network.graph)
        assert (seconds[at], nbytes[at]) == (found.seconds, found.nbytes)
    smallest = solver.best(MAX_PRICE)
    most = smallest.nbytes * 1.3
    found, gap, price = solve_within_budget(solver, lambda _: most, smallest)
    allowed = (seconds + price * nbytes)[nbytes <= most].min()
    assert found.nbytes <= most and found.seconds + price * found.nbytes - gap <= allowed * (1 + 1e-9) + 1e-9


@given(st.integers(0, 10**6))
def test_parts_are_the_components_between_fixed_decisions(seed: int) -> None:
    network = _drawn(seed)
    sizes, scopes = network.sizes, [factor.scope for factor in network.factors]
    *parts, constants = apart(sizes, scopes)
    free = network.graph.subgraph(name for name, size in sizes.items() if size > 1)
    found = [{name for i in part for name in scopes[i] if sizes[name] > 1} for part in parts]
    assert sorted(map(sorted, found)) == sorted(map(sorted, nx.connected_components(free)))
    assert all(sizes[name] == 1 for i in constants for name in scopes[i])
    assert sorted(itertools.chain(*parts, constants)) == list(range(len(scopes)))


def test_costs_of_the_same_two_decisions_are_one_table() -> None:
    network, graph = Network(Folded([], [], {})), fx.Graph()
    a, b = (network.add(Decision("stored", i), graph.placeholder(name), "pq") for i, name in enumerate("ab"))  # type: ignore[arg-type]
    network.cost((a, b), np.array([[1.0, 2.0], [3.0, 4.0]]))
    network.cost((b, a), np.array([[10.0, 20.0], [30.0, 40.0]]), np.array([[0.0, 1.0], [0.0, 0.0]]))
    network.cost((a,), [5.0, 6.0])
    assert np.array_equal(network.graph.edges[a, b]["seconds"], [[11.0, 32.0], [23.0, 44.0]])
    assert np.array_equal(network.graph.edges[a, b]["nbytes"], [[0.0, 0.0], [1.0, 0.0]])
    assert [factor.scope for factor in network.factors] == [(a,), (b,), (a, b)]
    assert np.array_equal(network.graph.nodes[a]["seconds"], [5.0, 6.0])


# --- elimination orders -----------------------------------------------------------------------------------------------


def _scopes(seed: int) -> tuple[dict[str, int], list[tuple[str, ...]], list[Any], tuple[str, ...]]:
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(int(rng.integers(2, 9)))]
    sizes = {name: int(rng.integers(1, 4)) for name in names}
    pairs = [pair for pair in itertools.combinations(names, 2) if rng.random() < 0.5]
    scopes: list[tuple[str, ...]] = [*((name,) for name in names), *pairs]
    tables = [rng.integers(0, 20, [sizes[v] for v in scope]).astype(float) for scope in scopes]
    keep = tuple(str(v) for v in rng.permutation(names)[: rng.integers(0, 3)])
    return sizes, scopes, tables, keep


@given(st.integers(0, 10**6))
def test_orders_that_compete_find_the_same_optimum_and_the_cheapest_wins(seed: int) -> None:
    sizes, scopes, tables, keep = _scopes(seed)
    ours = Elimination(sizes, scopes, keep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchshard.planner.elimination.COMPETE", 0)
        both = Elimination(sizes, scopes, keep)
    assert both.entries <= ours.entries
    assert np.array_equal(ours.run(tables).table, both.run(tables).table)
    if both.entries == ours.entries:
        assert both._buckets == ours._buckets


@given(st.integers(0, 10**6))
def test_an_order_without_a_table_that_is_too_large_goes_before_one_with(seed: int) -> None:
    """An exact result is the optimum; an inexact one is a lower bound."""
    sizes, scopes, tables, _ = _scopes(seed)
    best = Elimination(sizes, scopes).run(tables).table
    ours = Elimination(sizes, scopes, limit=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchshard.planner.elimination.COMPETE", 0)
        both = Elimination(sizes, scopes, limit=20)
    assert both.exact >= ours.exact
    found = both.run(tables).table
    assert found == best if both.exact else found <= best


@pytest.mark.parametrize("heuristic", HEURISTICS)
@given(seed=st.integers(0, 10**6))
def test_an_order_of_networkx_eliminates_all_but_what_is_kept(heuristic: Any, seed: int) -> None:
    _, scopes, _, keep = _scopes(seed)
    near = primal_graph(scopes)
    assert sorted(decomposed_order(heuristic, near, keep)) == sorted(set(near).difference(keep))


# --- weight factors ---------------------------------------------------------------------------------------------------


def _spread_until_nothing_is_new(ops: Sequence[Op], tensors: Tensors) -> dict[fx.Node, set[str]]:
    """Finds the factors of weights by their definition, as a fixed point.

    Dims that weights bring are marked. An op with a marked dim gets its factors, and those split together with them,
    and marks all dims that contain one of these factors.
    """
    computed = set[fx.Node]()
    marked, axes = set[tuple[fx.Node, int]](), {op.node: set[str]() for op in ops}
    for op in ops:
        inputs = [n for n in op.node.all_input_nodes if is_tensor(n)]
        if inputs and all(n in computed or is_parameter(n) for n in inputs):
            computed.update(t for t in tensors[op.node][len(op.operands) :] if t is not None)
        weights = [i for i, t in enumerate(op.inputs) if t in computed or is_parameter(t)]
        if op.row is not None and brings_axes(op, weights):
            marked.update((op.inputs[i], d) for i in weights for d in range(len(op.operands[i].shape)))
    before = -1
    while before != len(marked):
        before = len(marked)
        for op in (op for op in ops if op.row is not None):
            assert op.row is not None
            around = zip(tensors[op.node], (*op.row.operands, *op.row.results), strict=False)
            held = [(t, d, {a for term in dim for a in term}) for t, dims in around for d, dim in enumerate(dims)]
            axes[op.node].update(a for t, d, own in held if (t, d) in marked for a in own)
            axes[op.node].update(
                a for group in factor_groups(op.row) if axes[op.node].intersection(group) for a in group
            )
            marked.update((t, d) for t, d, own in held if t is not None and axes[op.node] & own)
    return axes


@pytest.mark.parametrize("name", CASES)
def test_axes_of_weights_are_what_spreads_from_their_dims(name: str) -> None:
    case = CASES[name]
    graph = capture(case.build(), case.inputs(), case.kwargs).graph.graph
    planned = PlannedOps(graph, Folded.of(graph, {}, fold=False))
    found = weight_axes(planned.ops, planned.tensors)
    assert any(found.values()) and found == _spread_until_nothing_is_new(planned.ops, planned.tensors)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> ts.Plan:
    case = CASES["gpt"]
    return ts.plan(case.build(), example_inputs=case.inputs(), mesh=2)


def test_the_network_of_a_plan_has_its_choices(plan: ts.Plan) -> None:
    network = network_of(plan)
    assert isinstance(network, nx.Graph) and nx.is_connected(network)
    for name, data in network.nodes(data=True):
        kind, _, node = name.partition(" ")
        assert kind == data["kind"] and len(data["seconds"]) == len(data["states"]) >= 1
        if kind == "op":
            assert data["states"][data["chosen"]] == plan.choices[node]
        if kind == "stored" and data["label"] in plan.parameters:
            assert data["states"][data["chosen"]] == plan.parameters[data["label"]]
    for a, b, data in network.edges(data=True):
        assert {a, b} == {*data["ends"]}
        assert data["seconds"].shape == tuple(len(network.nodes[name]["states"]) for name in data["ends"])


def test_the_network_goes_through_graphml(plan: ts.Plan, tmp_path: Path) -> None:
    network = network_of(plan)
    ts.draw(network, tmp_path / "network.graphml")
    read, written = nx.read_graphml(tmp_path / "network.graphml"), plain(network)
    assert dict(read.nodes(data=True)) == dict(written.nodes(data=True))
    assert {frozenset((a, b)): data for a, b, data in read.edges(data=True)} == {
        frozenset((a, b)): data for a, b, data in written.edges(data=True)
    }


def test_the_network_is_drawn(plan: ts.Plan, tmp_path: Path) -> None:
    network = network_of(plan)
    ts.draw(network, tmp_path / "network.svg")
    ts.draw(network, tmp_path / "network.dot")
    svg = ElementTree.parse(tmp_path / "network.svg").getroot()
    assert len(svg.findall("{*}g/{*}rect")) == len(network) and len(svg.findall("{*}g/{*}path")) == len(network.edges)
    dot = (tmp_path / "network.dot").read_text()
    assert dot.count(" -- ") == len(network.edges) and '"op blocks_0_attn_q" [shape=box' in dot
    with pytest.raises(ts.InputError, match=r"\.svg, \.dot, \.graphml"):
        ts.draw(network, tmp_path / "network.html")


def test_a_plan_from_a_file_has_its_network(plan: ts.Plan) -> None:
    loaded = ts.Plan.from_json(plan.to_json())
    assert ts.network_of(loaded).nodes.keys() == network_of(plan).nodes.keys()
    with pytest.raises(ts.PlanError, match="no network of costs"):
        network_of(ts.Plan.from_json(plan.to_json(question=False)))
