"""Listings before and after each pass; `UPDATE_GOLDEN=1 pytest tests/test_passes.py` rewrites tests/golden."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchshard as ts
from tests.golden import check_golden
from tests.models import MLP
from torchshard import testing
from torchshard.capture import capture
from torchshard.capture.facts import ModelFacts
from torchshard.checking.check import check_program
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.planning import plan_graph
from torchshard.compiler.prepare import prepared
from torchshard.compiler.program import Program
from torchshard.core.choices import choices
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.ir.editing import duplicate, mark_needs_grad
from torchshard.ir.graph import node_row, op_name
from torchshard.ir.listing import listing
from torchshard.ops import OPS
from torchshard.passes import annotate, insert, localized, lower, normalize, rewrite, simplify, step_graphs, verify
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.plans.data import AxisPlan
from torchshard.plans.objective import Mode, read_aim
from torchshard.plans.plan import Plan

pytestmark = pytest.mark.quick

WORLD = 2
PLAN = {"tok": "vocab", "q": "column", "k": "column", "o": "row"}


class Model(nn.Module):
    """A model with three heads on two ranks, a vocabulary-split embedding, an in-place write and a no-op cast."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.q, self.k, self.o = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids).float()
        q = self.q(x).view(*ids.shape, 3, -1)
        k = self.k(x)[:, :].view(*ids.shape, 3, -1)
        h = F.gelu(q * k).flatten(2)
        h.mul_(2.0)
        return x + self.o(h)


def _stages() -> dict[str, fx.GraphModule]:
    model = Model()
    graph = capture(model, (torch.zeros(2, 5, dtype=torch.long),)).graph
    stages = {"captured": duplicate(graph)}
    assert normalize(graph)
    mark_needs_grad(graph, [name for name, _ in model.named_parameters()])
    stages["normalized"] = duplicate(graph)
    facts = ModelFacts.of(model)
    mesh = Mesh((MeshAxis(WORLD),))
    plan = plan_graph(graph, facts, read_constraints(facts, PLAN, mesh, read_aim({"machine": "h100x8"}))).plan
    graph.meta["axis"] = MeshAxis(WORLD)
    for name, changed, stage in (
        ("annotated", lambda: annotate(graph, plan), "annotated"),
        ("inserted", lambda: insert(graph, plan.conversions), "inserted"),
        ("simplified", lambda: simplify(graph), "inserted"),
    ):
        assert changed(), name
        verify(graph, stage, after=name)
        stages[name] = duplicate(graph)
    for rank in range(WORLD):
        stages[f"localized_{rank}"] = localized(graph, MeshAxis(WORLD).simulated()[rank])
    step = step_graphs(stages["localized_0"])
    stages |= {"forward_0": step.forward, "backward_0": step.backward, "lowered_0": duplicate(step.backward)}
    assert lower(stages["lowered_0"])
    verify(stages["lowered_0"], "lowered", after="lower")
    return stages


def test_every_pass_has_its_listing() -> None:
    stages = _stages()
    text = "\n".join(f"--- {name}\n{listing(graph, sources=False)}\n" for name, graph in stages.items())
    check_golden("passes.txt", text)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_bias_is_back_in_its_op_where_no_sum_comes_between(mode: Mode) -> None:
    """Linear ops keep their bias unless a reduce comes between, also for values without gradients."""
    model, pins = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), {"0": "column", "2": "row"}
    plan = ts.plan(model, pins, example_inputs=(torch.randn(4, 8),), mesh=2, objective={"mode": mode})
    shown = [op_name(node) for node in plan.graph.graph.nodes if node.op == "call_function"]
    assert shown == ["linear", "relu", "linear", "reduce", "add"]


def test_normalize_and_simplify_do_nothing_the_second_time() -> None:
    stages = _stages()
    assert not normalize(stages["normalized"])
    assert not simplify(stages["simplified"])


def test_sibling_copies_are_one() -> None:
    stages = _stages()
    kinds = {
        name: [OPS[n.target].name for n in graph.graph.nodes if n.target in OPS]
        for name, graph in stages.items()
        if name in ("inserted", "simplified")
    }
    assert kinds["inserted"] == kinds["simplified"]
    assert kinds["inserted"].count("copy") == 1 and kinds["inserted"].count("reduce") == 2


def test_a_conversion_of_a_conversion_follows_it() -> None:
    """The conversion from columns to other columns goes through rows, which another consumer needs."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.relu()
            return y.exp(), y.sin()

    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    captured = prepared(Model(), (x,), {}, dynamic=False)
    wanted = {"relu": ts.S(1), "exp": ts.S(1, ((1, 1), (5, 1))), "sin": ts.S(0)}
    chosen = {
        node.name: next(
            c for c in choices(node_row(node), 4, [(0, wanted[node.name])]) if c.operands == (wanted[node.name],)
        )
        for node in captured.graph.graph.nodes
        if node.name in wanted
    }
    slow = CostModel(ts.Machine("slow to send", link_bandwidth=1.0, launch=0.0), MeshAxis(4))
    plan = AxisPlan(MeshAxis(4), {}, chosen, conversions_of(captured.graph.graph, slow, chosen, {}))
    graph = rewrite(captured.graph, plan)
    names = [OPS[n.target].name for n in graph.graph.nodes if n.target in OPS]
    assert names == ["scatter", "all_to_all", "all_to_all", "gather", "gather"]
    report = check_program(Model(), Program(captured, Plan((plan,)), graph), graph, (x,), {})
    assert report.ok, str(report)


def test_a_cast_there_and_back_rounds() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().double()

    graph = prepared(Model(), (torch.randn(4, dtype=torch.float64),), {}).graph
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"] == ["aten.to.dtype"] * 2


def test_a_ranks_values_know_no_numbers() -> None:
    """A fake tensor with a constant would compute ops on it (here a bound on ids), wrongly for a slice."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(7, 6)

        def forward(self, ids: Tensor) -> Tensor:
            return self.tok(ids).index_select(0, torch.tensor([0])) + self.tok(torch.tensor([6]))

    made = testing.capture(Places(), (torch.zeros(1, dtype=torch.long),)).plan({"tok": "vocab"}, 2)
    for rank in range(2):
        graph = localized(made.graph, MeshAxis(2).simulated()[rank])
        assert all(getattr(n.meta.get("val"), "constant", None) is None for n in graph.graph.nodes)


class _ChannelsLast(nn.Module):
    """A view of a channels-last value, which a gather for another consumer leaves in a different memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.conv(x.contiguous(memory_format=torch.channels_last))
        return h, h.permute(0, 2, 3, 1).view(-1, 6).cumsum(1)


class _Masked(nn.Module):
    """A model with a data-dependent size: a mask selects the same number of elements as is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        h = self.down(self.up(x))[:, 0]
        picked = h[order.argsort()].clone()
        picked[order == order] += 0.5 * h
        return picked


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_view_accepts_the_memory_order_that_a_collective_leaves(world_size: int) -> None:
    example = (torch.randn(2, 4, 8, 8),)
    ts.check(_ChannelsLast(), {"conv": "column"}, example_inputs=example, mesh=world_size).raise_on_error()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_size_by_values_that_is_known_to_be_another(world_size: int) -> None:
    example = (torch.randn(6, 8), torch.arange(6))
    ts.check(_Masked(), "auto", example_inputs=example, mesh=world_size).raise_on_error()


def test_verify_writes_nothing_and_finds_a_wrong_shape() -> None:
    """A verifier that stored its own results would hide the error that it should find."""
    made = testing.capture(MLP(), (torch.randn(3, 12),)).plan({"up": "column", "down": "row"}, 2)
    graph = localized(made.graph, MeshAxis(2).simulated()[0])
    before = {node: dict(node.meta) for node in graph.graph.nodes}
    verify(graph, "localized", after="localize")
    for node in graph.graph.nodes:
        assert node.meta.keys() == before[node].keys()
        assert all(node.meta[key] is value for key, value in before[node].items())
    node = next(n for n in graph.graph.nodes if n.name.startswith("relu"))
    node.meta["val"] = node.meta["val"][:1]
    with pytest.raises(ts.InternalError, match="a local shape is not what its layout gives") as kept:
        verify(graph, "localized", after="localize")
    assert type(torch.zeros(1)) is Tensor, f"fake while somebody keeps {kept}"
