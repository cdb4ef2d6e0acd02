"""Rows that are sent to the ranks of their experts."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import transformers
import transformers.integrations.moe
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import holding, nightly
from tests.test_experts import HYBRID, MOVES, WIDE, Move, _by_bias, _by_scatter, _by_sizes, _ends, _model, _Moved
from torchshard.testing import largest, rank_graph, run_ranks, step_graphs


def _sends(plan: Any) -> set[str]:
    """The messages of products and their weights, over the axis that is planned last."""
    last = plan.in_order[-1] if isinstance(plan, ts.Plan) else plan
    sent = [c for c in last.costs.collectives if c.nbytes]
    return {c.value if c.value in ("up", "down") else c.name for c in sent} & {"up", "down", "dispatch", "combine"}


NIGHTLY = pytest.mark.nightly
QUICK = [_by_scatter, _by_sizes]
NIGHTLY_MESHES = [({"dp": 2, "tp": 2}, "shard"), ({"dp": 4}, "shard_grad_op"), ({"dp": 2, "fsdp": 2}, HYBRID)]


@nightly("mesh0-shard-_by_sizes")
@pytest.mark.parametrize("move", [move if move in QUICK else pytest.param(move, marks=NIGHTLY) for move in MOVES])
@pytest.mark.parametrize(
    ("mesh", "data"),
    [({"dp": 2}, "shard"), *(pytest.param(*case, marks=NIGHTLY) for case in NIGHTLY_MESHES)],
)
def test_rows_go_to_the_ranks_that_have_their_experts(move: Move, mesh: dict[str, int], data: Any) -> None:
    model, x = _Moved(move, WIDE).double(), torch.randn(16, 16, dtype=torch.float64).requires_grad_()
    ts.check(model, "auto", mesh=holding(mesh, data), example_inputs=(x,)).raise_on_error()
    plan = ts.plan(model, {}, mesh=holding(mesh, data), example_inputs=(x[:4],))
    assert _sends(plan) == {"dispatch", "combine"}


def test_a_step_at_experts_sends_what_was_planned() -> None:
    model, x = _Moved(_by_sizes, WIDE).double(), torch.randn(6, 16, dtype=torch.float64).requires_grad_()
    plan = ts.plan(model, {}, example_inputs=(x,), mesh={"dp": (2, "shard")})
    parts = step_graphs(rank_graph(plan))
    sent = [c for c in plan.costs.collectives if c.name in ("dispatch", "combine")]
    duals = {"dispatch": "combine", "combine": "dispatch"}
    planned = [[c.name for c in sent if c.forward.nbytes], [duals[c.name] for c in sent if c.backward.nbytes]]
    nodes = [node for part in (parts.forward, parts.backward) for node in part.graph.nodes]
    made = [name for node in nodes if (name := str(node.target).split(".")[-2:][0]) in duals]
    assert sorted(made) == sorted(itertools.chain(*planned)) and len(made) == 6


@pytest.fixture
def prefers_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the planner send rows to their experts wherever possible, at any cost."""
    name = "torchshard.compiler.planning.seconds_of_step"
    monkeypatch.setattr(name, lambda solved: "dispatch" not in _sends(solved[-1].plan))


def _skew(model: _Moved, *scores: float) -> None:
    """Makes all rows of positive numbers choose the experts with the largest scores."""
    with torch.no_grad():
        model.gate.weight.copy_(torch.tensor(scores).unsqueeze(1).expand(4, 16))


def _scaled(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Multiplies by the number of rows, too."""
    keys, order = chosen[:, 0].sort()
    ends, grouped = _ends(keys), torch.ops.transformers.grouped_mm_fallback
    h = grouped(x[order], m.up, offs=ends)
    return torch.zeros_like(x).index_put((order,), grouped(h * h.shape[0], m.down, offs=ends))


def _by_other_ends(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The product in the middle counts its rows differently."""
    keys, order = chosen[:, 0].sort()
    ends, grouped = _ends(keys), torch.ops.transformers.grouped_mm_fallback
    others = torch.searchsorted(keys, torch.arange(4), right=True).to(torch.int32)
    h = grouped(grouped(x[order], m.up, offs=ends), m.down, offs=others)
    y = grouped(h, m.up, offs=ends)
    return torch.zeros_like(x).index_put((order,), torch.cat([y, y[:, :4]], 1))


def _without_expert(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The last rows choose a fifth expert, which does not exist."""
    keys, order = x[:, :5].topk(1).indices[:, 0].sort()
    return torch.zeros_like(x).index_put((order,), m.products(x[order], _ends(keys)))


def _without_last(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The ends are the starts of each expert's rows, so rows of the last expert have no product."""
    keys, order = chosen[:, 0].sort(descending=False)
    ends = torch.searchsorted(keys, torch.arange(4)).to(torch.int32)
    return torch.zeros_like(x).index_put((order,), m.products(x[order], ends))


@pytest.mark.parametrize("move", [_scaled, _by_other_ends, _without_expert, _without_last])
@pytest.mark.usefixtures("prefers_sending")
def test_rows_whose_number_matters_stay(move: Move) -> None:
    """All rows choose one expert, so neither rank has half of them."""
    model, x = _Moved(move).double(), torch.rand(8, 16, dtype=torch.float64).requires_grad_()
    _skew(model, 0.0, 0.0, 0.5, 1.0)
    ts.check(model, {}, example_inputs=(x,), mesh={"dp": (2, "shard")}).raise_on_error()


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert_counts, self.moved = nn.Linear(16, 16), _Moved(_by_scatter)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.moved(self.expert_counts(x))
        return moved


def test_names_of_a_model_are_its_own() -> None:
    x = torch.randn(8, 16, dtype=torch.float64)
    ts.check(_Named().double(), {}, example_inputs=(x,), mesh={"dp": (2, "shard")}).raise_on_error()


@pytest.mark.nightly
@pytest.mark.usefixtures("prefers_sending")
def test_a_part_of_a_step_at_experts_has_a_backward() -> None:
    """One of the two losses that a layer's part returns has a gradient."""
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1,
        vocab_size=64, num_local_experts=4, output_router_logits=True,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    model, ids = transformers.MixtralForCausalLM(config), torch.randint(0, 64, (4, 8))
    call: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = ts.plan(model, {}, example_kwargs=call, mesh={"dp": (2, "shard")})
    assert plan.costs.memory["activations"] > 0 and "dispatch" in _sends(plan)


@pytest.mark.nightly
def test_rows_go_to_experts_that_do_not_divide() -> None:
    """With five experts the last of three ranks has one; with four it would be empty, so all weights are gathered."""
    x = torch.randn(12, 16, dtype=torch.float64).requires_grad_()
    for experts, sent in ((5, {"dispatch", "combine"}), (4, {"up", "down"})):
        model, _ = _model(experts, inner=WIDE)
        ts.check(model, {}, example_inputs=(x,), mesh={"dp": (3, "shard")}).raise_on_error()
        plan = ts.plan(model, {}, example_inputs=(x[:4],), mesh={"dp": (3, "shard")})
        assert _sends(plan) == sent


@pytest.mark.parametrize(("rows", "sent"), [(8, {"dispatch", "combine"}), (40_000, {"up", "down"})])
def test_what_costs_less_is_sent(rows: int, sent: set[str]) -> None:
    model, _ = _model(inner=WIDE)
    plan = ts.plan(model, {}, example_inputs=(torch.empty(rows, 16, device="meta"),), mesh={"dp": (2, "shard")})
    assert _sends(plan) == sent


def _trained(rank: int, mesh: dict[str, int], data: Any, parts: int) -> float:
    """The largest difference after steps with all rows for one rank's experts, or for all ranks' experts."""
    worst = 0.0
    for move, skewed in ((_by_scatter, False), (_by_bias, True)):
        model = _Moved(move, WIDE).double()
        if skewed:
            _skew(model, 1.0, 0.5, 0.0, 0.0)
        sharded = ts.shard(copy.deepcopy(model), {}, mesh=holding(mesh, data))
        part = rank * parts // torch.distributed.get_world_size()
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, sharded)]
        for step, rows in enumerate((12, 12, 24, 12)):
            torch.manual_seed(step)
            x = torch.rand(rows * parts // 2, 16, dtype=torch.float64)
            own = x.chunk(parts)[part].clone().requires_grad_()
            for m, optimizer, given in zip((model, sharded), optimizers, (x.requires_grad_(), own), strict=True):
                m(given).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert x.grad is not None and own.grad is not None
            worst = largest(worst, (own.grad - x.grad.chunk(parts)[part]).abs().max().item())
        whole = sharded.full_state_dict()
        worst = largest(worst, *((whole[name] - p).abs().max().item() for name, p in model.named_parameters()))
    return worst


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "data", "parts"),
    [
        ({"dp": 2}, "shard", 2),
        pytest.param({"dp": 2, "tp": 2}, "shard", 2, marks=pytest.mark.nightly),
        pytest.param({"dp": 2, "fsdp": 2}, HYBRID, 4, marks=pytest.mark.nightly),
        pytest.param({"dp": 4}, "shard", 4, marks=pytest.mark.nightly),
    ],
)
def test_training_with_rows_at_their_experts(mesh: dict[str, int], data: Any, parts: int) -> None:
    for worst in run_ranks(_trained, math.prod(mesh.values()), mesh, data, parts, seconds=300):
        assert worst < 1e-10
