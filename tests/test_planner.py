"""Tests the planner against enumeration: elimination on tables, and plans of random graphs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers import nightly
from torchshard.core.choices import choices
from torchshard.core.layouts import I, Shard
from torchshard.core.mesh import MeshAxis
from torchshard.custom_ops.recurrent import SplitRecurrent
from torchshard.ir.editing import mark_needs_grad
from torchshard.ir.graph import is_tensor, is_tensor_op
from torchshard.planner.build import build
from torchshard.planner.constants import FORBIDDEN, MAX_PRICE
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.planner.elimination import Elimination, Power
from torchshard.planner.network import Network, name_of
from torchshard.planner.predict import predict
from torchshard.planner.properties import Op, Value
from torchshard.planner.prune import prune
from torchshard.planner.search import expand_to_all_layers, last_allowed, solve_within_budget
from torchshard.planner.solver import Solver
from torchshard.planner.states import GraphConstraints
from torchshard.plans.machine import Machine

aten = torch.ops.aten
MACHINE = Machine("test", 1e9, 1e8, 1e8, 1e-5, 2e-5)
"""Slow enough that computation and communication of small tensors cost about the same."""

# --- tables ----------------------------------------------------------------------------------------------------------


def _random_factors(rng: np.random.Generator) -> tuple[list[int], list[tuple[int, ...]], list[Any]]:
    sizes = [int(rng.integers(1, 4)) for _ in range(int(rng.integers(1, 8)))]
    scopes = [
        tuple(int(v) for v in rng.permutation(len(sizes))[: rng.integers(0, min(3, len(sizes)) + 1)])
        for _ in range(int(rng.integers(1, 10)))
    ]
    tables = [rng.integers(0, 20, [sizes[v] for v in scope]).astype(float) for scope in scopes]
    for table in tables:
        table[rng.random(table.shape) < 0.1] = np.inf
    return sizes, scopes, tables


def _dense(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], tables: Sequence[Any]) -> Any:
    total = np.zeros(sizes)
    for scope, table in zip(scopes, tables, strict=True):
        order = sorted(scope)
        shape = [sizes[v] if v in scope else 1 for v in range(len(sizes))]
        total = total + table.transpose([scope.index(v) for v in order]).reshape(shape)
    return total


@pytest.mark.parametrize("seed", range(100))
def test_elimination_is_the_minimum_over_all_states(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, scopes, tables = _random_factors(rng)
    keep = tuple(int(v) for v in rng.permutation(len(sizes))[: rng.integers(0, 3)])
    dense = _dense(sizes, scopes, tables)
    used = {v for scope in scopes for v in scope}
    order = Elimination(dict(enumerate(sizes)), scopes, tuple(v for v in keep if v in used))
    solved = order.run(tables)
    kept = [v for v in keep if v in used]
    expected = dense.min(tuple(v for v in range(len(sizes)) if v not in kept)).transpose(np.argsort(np.argsort(kept)))
    assert order.exact and np.array_equal(solved.table, expected)
    for states in itertools.product(*(range(sizes[v]) for v in kept)):
        found = solved.decode(dict(zip(kept, states, strict=True)))
        cost = sum(float(t[tuple(found[v] for v in scope)]) for scope, t in zip(scopes, tables, strict=True))
        assert cost == expected[states]


@pytest.mark.parametrize("seed", range(50))
def test_tables_that_are_too_large_give_a_bound(seed: int) -> None:
    sizes, scopes, tables = _random_factors(np.random.default_rng(seed))
    order = Elimination(dict(enumerate(sizes)), scopes, limit=4)
    solved, best = order.run(tables), _dense(sizes, scopes, tables).min()
    assert solved.table <= best and (not order.exact or solved.table == best)


def test_a_large_clique_is_bounded() -> None:
    scopes = list(itertools.combinations(range(6), 2))
    assert not Elimination(dict.fromkeys(range(6), 3), scopes, limit=9).exact


@pytest.mark.parametrize("count", range(1, 9))
def test_a_power_is_the_chain_written_out(count: int) -> None:
    table = np.random.default_rng(count).integers(0, 50, (3, 3, 2)).astype(float)
    power = Power(table, count)
    for entry, exit, shared in itertools.product(range(3), range(3), range(2)):
        paths = [(entry, *between, exit) for between in itertools.product(range(3), repeat=count - 1)]
        costs = {path: sum(table[a, b, shared] for a, b in itertools.pairwise(path)) for path in paths}
        assert power.table[entry, exit, shared] == min(costs.values())
        assert costs[tuple(power.decode(entry, exit, shared))] == min(costs.values())


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40))
def test_the_last_number_allowed_is_found(costs: list[float]) -> None:
    costs = sorted(costs)
    assert last_allowed(costs.__getitem__, len(costs) - 1) == sum(cost <= 0 for cost in costs) - 1


@given(st.integers(1, 1000), st.floats(-0.5, 1.5))
def test_where_costs_grow_evenly_few_numbers_are_tried(last: int, share: float) -> None:
    tried = set[int]()

    def cost(number: int) -> float:
        tried.add(number)
        return number - share * last

    assert last_allowed(cost, last) == max(-1, min(last, math.floor(share * last))) and len(tried) <= 7


# --- random graphs against enumeration -------------------------------------------------------------------------------

WIDTH = 6
FREE = 12


class _Drawn:
    """A graph of random ops on values of 4 x 6 and weights of 6 x 6 and 6, some of them used twice."""

    def __init__(self, seed: int) -> None:
        self.rng, self.mode = random.Random(seed), FakeTensorMode()
        self.graph = fx.Graph()
        self.weights: dict[tuple[int, ...], list[fx.Node]] = {(6,): [], (6, 6): []}
        for shape in self.weights:
            for i in range(self.rng.randint(1, 2)):
                self.weights[shape].append(self._placeholder(f"w{len(shape)}{i}", shape, "parameter"))
        self.values = [self._placeholder("x", (4, WIDTH), "input")]
        for _ in range(self.rng.randint(4, FREE - 3)):
            self._add_op()
        self.graph.output(tuple(n for n in self.values if not n.users or self.rng.random() < 0.1))
        self.module = fx.GraphModule(nn.Module(), self.graph)
        self.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
        names = [n.name for shape in self.weights.values() for n in shape]
        mark_needs_grad(self.module, [*names, *(["x"] if self.rng.random() < 0.5 else [])])

    def _placeholder(self, name: str, shape: tuple[int, ...], kind: str) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta = {"val": torch.empty(shape), "kind": kind, "path": name}
        return node

    def _add_op(self) -> None:
        fresh = [n for n in self.values if not n.users]
        a, b = self.rng.choice(fresh or self.values), self.rng.choice(self.values)
        square, row = (self.rng.choice(self.weights[shape]) for shape in ((6, 6), (6,)))
        target, args = self.rng.choice([
            (aten.linear.default, (a, square)),
            (aten.matmul.default, (a, square)),
            (aten.add.Tensor, (a, b)),
            (aten.mul.Tensor, (a, row)),
            (aten.relu.default, (a,)),
            (aten.softmax.int, (a, -1)),
            (aten.layer_norm.default, (a, [WIDTH], row)),
            (aten.sin.default, (a,)),
        ])  # fmt: skip
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta = {"val": target(*fx.map_arg(args, lambda n: n.meta["val"])), "module": ""}
        self.values.append(node)

    def asked(self, world: int) -> GraphConstraints:
        """Returns at most three choices per op, so that all combinations can be tried."""
        options = {}
        for node in self.graph.nodes:
            if is_tensor_op(node):
                row = Op.of(node).row
                assert row is not None
                found = choices(row, world)
                options[node] = [found[0], *self.rng.sample(found[1:], min(2, len(found) - 1))]
        return GraphConstraints(options)


def _enumerated(drawn: _Drawn, network: Network, model: CostModel) -> tuple[Any, Any]:
    """Returns the seconds and bytes of every combination of choices and stored layouts, from the definitions."""
    deciding = [v for v, kind in network.graph.nodes(data="kind") if kind in ("op", "stored")]
    axis = {v: i for i, v in enumerate(deciding)}
    nodes = list(drawn.graph.nodes)

    def variable(node: fx.Node) -> str:
        return name_of("stored" if node.op == "placeholder" else "op", node)

    sizes = [len(network.states[v]) for v in deciding]
    seconds, nbytes = np.zeros(sizes), np.zeros(sizes)

    def add(total: Any, over: list[fx.Node], cost: Any) -> Any:
        variables = list(dict.fromkeys(variable(n) for n in over))
        order = sorted(variables, key=axis.__getitem__)
        table = np.array([
            cost(dict(zip(order, states, strict=True)))
            for states in itertools.product(*(network.states[v] for v in order))
        ])  # fmt: skip
        return total + table.reshape([sizes[i] if deciding[i] in order else 1 for i in range(len(sizes))])

    for node in nodes:
        if is_tensor_op(node):
            op = Op.of(node)

            def work(at: Any, op: Op = op, node: fx.Node = node) -> float:
                choice = at[variable(node)]
                inside = sum(sent.seconds for _, _, *ways in model.inside(op, choice) for sent in ways)
                return model.seconds(op, choice) + inside

            seconds = add(seconds, [node], work)
        if is_tensor(node) and node.users:
            takers = [user for user in node.users if user.op != "output"]

            def moved(at: Any, node: fx.Node = node, takers: Any = tuple(takers)) -> float:
                given = at[variable(node)] if node.op == "placeholder" else at[variable(node)].results[0]
                wanted = {I} if len(takers) < len(node.users) else set()
                for user in takers:
                    inputs = Op.of(user).inputs
                    wanted |= {at[variable(user)].operands[i] for i, n in enumerate(inputs) if n is node}
                steps = model.plan_conversions(Value.converted(node), given, wanted)
                stored = node.op == "placeholder" and isinstance(given, Shard)
                if steps is None or (steps and stored):
                    return FORBIDDEN
                return sum(sent.seconds for step in steps for sent in model.sent(Value.converted(node), step))

            seconds = add(seconds, [node, *takers], moved)
        if node.op == "placeholder" and node.meta["kind"] == "parameter" and node.users and node.meta["val"].ndim > 1:

            def weigh(at: Any, node: fx.Node = node) -> float:
                shares = model.axis.size if isinstance(at[variable(node)], Shard) else 1
                return Value.of(node).nbytes / shares

            nbytes = add(nbytes, [node], weigh)
    return seconds, nbytes


@nightly(but=["0", "400"])
@pytest.mark.parametrize("start", range(0, 520, 40))
def test_the_plan_is_the_best_of_all(start: int) -> None:
    """On random graphs: the optimum at several prices of a byte, and within a budget up to the reported gap."""
    for seed in range(start, start + 40):
        drawn = _Drawn(seed)
        world = 2 + seed % 3
        model = CostModel(MACHINE, MeshAxis(world))
        network = build(drawn.graph, model, drawn.asked(world), fold=False)
        seconds, nbytes = _enumerated(drawn, network, model)
        prune(network)
        solver = Solver(network)
        assert solver.exact
        for price in (0.0, 1e-7, 1e-5, 1e-3):
            best = (seconds + price * nbytes).min()
            found = solver.best(price)
            assert found.seconds + price * found.nbytes == pytest.approx(best, rel=1e-9)
            assert found.bound == pytest.approx(best, rel=1e-9)
        fewest = nbytes[np.isfinite(seconds)].min()
        for more in (1.0, 1.2, 1.6, 3.0):
            smallest = solver.best(MAX_PRICE)
            found, gap, price = solve_within_budget(solver, lambda least, more=more: least * more, smallest)
            allowed = (seconds + price * nbytes)[nbytes <= fewest * more * (1 + 1e-12)].min()
            cost = found.seconds + price * found.nbytes
            assert found.nbytes <= fewest * more * (1 + 1e-12)
            assert allowed <= cost * (1 + 1e-9) and cost - gap <= allowed * (1 + 1e-9)


@pytest.mark.nightly
def test_if_tables_are_too_large_a_valid_plan_is_found_and_bounded() -> None:
    """With tables of at most 12 entries: allowed states, a gap that is never too small, mostly the optimum."""
    found, inexact = 0, 0
    for seed in range(60):
        drawn = _Drawn(seed)
        model = CostModel(MACHINE, MeshAxis(2))
        network = build(drawn.graph, model, drawn.asked(2), fold=False)
        prune(network)
        exact, narrow = Solver(network), Solver(network, limit=12)
        inexact += not narrow.exact
        for price in (0.0, 1e-7):
            best, near = exact.best(price), narrow.best(price)
            cost, least = (s.seconds + price * s.nbytes for s in (near, best))
            assert near.bound <= least * (1 + 1e-9) and least * (1 - 1e-9) <= cost < FORBIDDEN
            found += cost <= least * (1 + 1e-9)
    assert inexact >= 20 and found >= 110


def test_the_costs_of_the_network_equal_the_prediction() -> None:
    """The plan's computation and collectives sum up to the seconds in the tables."""
    for seed in range(60):
        drawn = _Drawn(seed)
        model = CostModel(MACHINE, MeshAxis(2))
        network = build(drawn.graph, model, drawn.asked(2), fold=False)
        found = Solver(network).best()
        held, layouts = expand_to_all_layers(drawn.graph, network, found)
        costs = predict(drawn.graph, model, held, layouts, conversions_of(drawn.graph, model, held, layouts))
        assert costs.seconds == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_recurrent_layer_runs_the_collectives_that_are_priced(
    layers: int, batch_first: bool, bidirectional: bool
) -> None:
    layer = nn.LSTM(6, 4, layers, batch_first=batch_first, bidirectional=bidirectional)
    states = [torch.randn(layers * (1 + bidirectional), 2, 4) for _ in range(2)]
    x = torch.randn((2, 5, 6) if batch_first else (5, 2, 6))
    split = SplitRecurrent(torch.lstm, ((4, 1),), group="of one rank")
    args = (x, states, layer._flat_weights, True, layers, 0.0, False, bidirectional, batch_first)
    steps, gathered = split.steps(*args), []
    with pytest.raises(StopIteration):
        call = next(steps)
        while True:
            gathered.append(call)
            call = steps.send(call[1][0])  # on one rank, the gathered tensor is its slice
    ((op, operands, times),) = split.collectives(*args)
    assert all(call[0] is op and call[1][1:] == operands[1:] for call in gathered)
    assert {call[1][0].shape for call in gathered} == {operands[0].shape}
    assert len(gathered) == times
