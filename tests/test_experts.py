"""Mixtures of experts with real routing: the best few of each token, sorted, in grouped products."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import transformers.integrations.moe
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import capture, largest, rank_graph, run_ranks, step_graphs

aten = torch.ops.aten
HYBRID = {"dp": "replicate", "fsdp": "shard"}


class _Experts(nn.Module):
    """The two best of some experts."""

    def __init__(self, experts: int, hidden: int, inner: int, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.product = product
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        expert, order = chosen.flatten().sort()
        offsets = torch.searchsorted(expert, torch.arange(self.up.shape[0]), right=True).to(torch.int32)
        h = F.silu(self.product(x[order // 2], self.up, offs=offsets))
        y = self.product(h, self.down, offs=offsets) * weight.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // 2, y)


def _model(experts: int = 4, inner: int = 90, dtype: torch.dtype = torch.float64) -> tuple[_Experts, tuple[Tensor]]:
    """PyTorch's own product takes no float64, and while a graph is captured nothing but bfloat16."""
    torch.manual_seed(0)
    product = F.grouped_mm if dtype is torch.bfloat16 else torch.ops.transformers.grouped_mm_fallback
    x = torch.randn(10, 16, dtype=dtype).requires_grad_()
    return _Experts(experts, 16, inner, product).to(dtype), (x,)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_experts_are_split_inside(world: int) -> None:
    """Every rank has a part of every expert, and one all-reduce makes the sum."""
    model, inputs = _model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = ts.plan(model, "auto", world_size=world, example_inputs=inputs)
    assert (plan.parameters["up"], plan.parameters["down"]) == (ts.S(2), ts.S(1))
    assert {c.name: c.calls for c in plan.costs.collectives if c.forward.nbytes} == {"reduce": 1}
    report = ts.check(model, plan, world_size=world, example_inputs=inputs)
    assert report.ok, str(report)


def test_pytorchs_own_product() -> None:
    model, inputs = _model(inner=64, dtype=torch.bfloat16)
    plan = ts.plan(model, "auto", world_size=2, example_inputs=inputs)
    assert (plan.parameters["up"], plan.parameters["down"]) == (ts.S(2), ts.S(1))
    report = ts.check(model, plan, world_size=2, example_inputs=inputs, dtype=None)
    assert report.ok, str(report)


@nightly("40-False")
@pytest.mark.parametrize("inner, is_split", [(40, False), (64, True)])
def test_pytorchs_own_product_is_split_where_rows_stay_aligned(inner: int, is_split: bool) -> None:
    """It takes rows of a multiple of 16 bytes: 40 of two bytes are five of them, for four ranks."""
    model, inputs = _model(inner=inner, dtype=torch.bfloat16)
    plan = ts.plan(model, "auto", world_size=4, example_inputs=inputs)
    assert (plan.parameters["up"] == ts.S(2)) is is_split
    report = ts.check(model, plan, world_size=4, example_inputs=inputs, dtype=None)
    assert report.ok, str(report)
    if not is_split:
        with pytest.raises(ts.PlanError):
            ts.plan(model, {"up": "column"}, world_size=4, example_inputs=inputs)


@pytest.mark.parametrize("world, experts", [(2, 4), (3, 4), (4, 3)])
def test_experts_across_ranks(world: int, experts: int) -> None:
    """Every rank has some experts whole: with 3 of them, the last of 4 ranks has none."""
    model, inputs = _model(experts)
    made = capture(model, inputs).plan({}, world, machine="cpu-gloo", layouts={"up": ts.S(0), "down": ts.S(0)})
    gathered = {c.value for c in made.plan.costs.collectives} & {"up", "down"}
    assert not gathered
    report = made.check()
    assert report.ok, str(report)


@pytest.mark.nightly
def test_memory_of_a_mixture_on_meta() -> None:
    """On a GPU Hugging Face counts the rows of each expert with an op that CPUs have for other dtypes alone."""
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
        ids = torch.empty(2, 6, dtype=torch.long)
    plan = ts.plan(model, "auto", world_size=2, example_kwargs={"input_ids": ids}, memory="1GiB")
    assert plan.costs.memory["parameters"] > 0


class _Moved(nn.Module):
    """The two best experts of each token, its rows moved by a function of the rows, their experts and the products."""

    def __init__(self, move: Move, inner: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.move, self.gate = move, nn.Linear(16, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 16, inner) / 4)
        self.down = nn.Parameter(torch.randn(4, inner, 16) / inner**0.5)
        self.bias = nn.Parameter(torch.randn(4, 12))

    def products(self, rows: Tensor, offsets: Tensor) -> Tensor:
        grouped: Callable[..., Tensor] = torch.ops.transformers.grouped_mm_fallback
        return grouped(F.silu(grouped(rows, self.up, offs=offsets)), self.down, offs=offsets)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        return self.move(self, x, weight, chosen)


Move = Callable[[_Moved, Tensor, Tensor, Tensor], Tensor]


def _ends(keys: Tensor) -> Tensor:
    """Where the rows of each expert end."""
    return torch.histc(keys.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)


def _by_inverse(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows are repeated, and put back by a second sort."""
    order = chosen.view(-1).argsort()
    y = m.products(x.repeat_interleave(2, 0)[order], _ends(chosen.view(-1)))
    return (y[order.argsort()].view(-1, 2, 16) * weight.unsqueeze(-1)).sum(1)


def _by_scatter(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """As torchtitan has it: gather, and scatter_add of whole rows."""
    ends = _ends(chosen.view(-1))
    order = chosen.view(-1).argsort(stable=True)
    tokens = (order // 2).reshape(-1, 1).expand(-1, 16)
    y = m.products(x.gather(0, tokens), ends) * weight.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, tokens, y)


def _by_bias(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows look up what their experts have; tokens are those of a division."""
    keys, order = chosen.flatten().sort()
    tokens = torch.div(order, 2, rounding_mode="floor")
    rows = F.layer_norm(x[tokens], (16,)) + m.bias[keys].mean(-1, keepdim=True)
    y = m.products(rows, _ends(keys)) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_put((tokens,), y, accumulate=True)


def _by_place(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """One expert for each token; rows are put where they were."""
    keys, order = chosen[:, 0].sort()
    y = m.products(x[order], _ends(keys)) * weight[:, 0][order].unsqueeze(-1)
    return torch.zeros_like(y).index_put((order,), y)


def _by_int32(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The inverse is in int32."""
    keys, order = chosen[:, 0].sort()
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(order.shape[0], dtype=torch.int32)
    return m.products(x[order], _ends(keys))[inverse]


def _by_sizes(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Between the products rows are viewed by their number, and meet something that their experts have."""
    keys, order = chosen.flatten().sort()
    ends, rows = _ends(keys), x[order // 2]
    h = torch.ops.transformers.grouped_mm_fallback(rows, m.up, offs=ends)
    h = h.view(h.shape[0], 2, -1).tanh().view(rows.shape[0], -1) * m.bias[keys].mean(-1, keepdim=True)
    y = torch.ops.transformers.grouped_mm_fallback(h, m.down, offs=ends) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // 2, y)


MOVES = [_by_inverse, _by_scatter, _by_bias, _by_place, _by_int32, _by_sizes]


@nightly(but=["mesh0-_by_int32"])
@pytest.mark.parametrize("move", [*MOVES[:-1], pytest.param(_by_sizes, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 2},
        pytest.param({"dp": 3}, marks=pytest.mark.nightly),
        pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.nightly),
    ],
)
def test_ranks_sort_rows_of_their_own(move: Move, mesh: dict[str, int]) -> None:
    """Ranks that divide the batch send nothing but gradients of weights, over the axis of the batch."""
    model, x = _Moved(move).double(), torch.randn(12, 16, dtype=torch.float64).requires_grad_()
    for data in ("replicate", "shard"):
        ts.check(model, "auto", mesh=mesh, data=data, example_inputs=(x,)).raise_on_error()
    plan = ts.plan(model, {}, world_size=2, data="replicate", example_inputs=(x[:6],))
    assert {c.name for c in plan.costs.collectives if c.forward.nbytes or c.backward.nbytes} == {"copy"}


def _softmax(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    return torch.zeros_like(x).index_put((order,), m.products(x[order], _ends(keys)).softmax(0))


def _places_kept(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    y = torch.zeros_like(x).index_put((order,), m.products(x[order], _ends(keys)))
    return y + torch.linspace(0, 1, 16, dtype=x.dtype) * order.argsort().unsqueeze(-1)


def _counted(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    ends = _ends(keys)
    return torch.zeros_like(x).index_put((order,), m.products(x[order], ends)) * ends.diff().max()


def _paired(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Neighbours in the order of all rows are averaged."""
    keys, order = chosen.flatten().sort()
    y = m.products(x[order // 2], _ends(keys))
    pairs = y.view(-1, 2, 16).mean(1, keepdim=True).expand(-1, 2, -1).reshape(-1, 16)
    return torch.zeros_like(y).index_put((order,), pairs).view(-1, 2, 16).sum(1)


def _limited(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """No expert takes more than two rows; later ones of all are dropped."""
    keys, order = chosen[:, 0].sort()
    counts = torch.histc(keys.float(), bins=4, min=0, max=3)
    place = torch.arange(x.shape[0]) - (counts.cumsum(0) - counts)[keys]
    y = m.products(x[order], _ends(keys)) * (place < 2).unsqueeze(-1)
    return torch.zeros_like(x).index_put((order,), y)


def _mixed(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    return torch.zeros_like(x).index_put((order,), m.products(x[order], _ends(keys)) + x)


def _dropped(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    return torch.zeros_like(x).index_put((order,), m.products(F.dropout(x[order], 0.5), _ends(keys)))


def _backwards(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Groups and their products do not belong together: which product a row has depends on its place among all."""
    keys, order = chosen[:, 0].sort(descending=True)
    return torch.zeros_like(x).index_put((order,), m.products(x[order], _ends(keys)))


def _left_sorted(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    return m.products(x[order], _ends(keys))


def _inverse_backwards(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    return m.products(x[order], _ends(keys))[order.argsort(descending=True)]


def _padded(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows of padding come first, and are not counted: the others have the products of other places."""
    keys, order = torch.where(x[:, 0] > 0, chosen[:, 0], -1).sort()
    y = m.products(x[order], _ends(keys)) * (keys >= 0).unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order, y)


def _counts_as_ends(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    counts = torch.histc(keys.float(), bins=4, min=0, max=3).to(torch.int32)
    return torch.zeros_like(x).index_put((order,), m.products(x[order], counts))


def _other_keys(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """What is sorted is less than what is counted."""
    order = chosen[:, 0].bool().int().argsort(stable=True)
    return torch.zeros_like(x).index_put((order,), m.products(x[order], _ends(chosen[:, 0])))


def _added_inverse(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    places = torch.arange(order.shape[0])
    inverse = (-torch.ones_like(order)).index_put((order,), places, accumulate=True)
    return m.products(x[order], _ends(keys))[inverse]


def _mean(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    rows = x[order]
    return torch.zeros_like(x).index_put((order,), m.products(rows - rows.mean(), _ends(keys)))


ACROSS = [_softmax, _places_kept, _counted, _paired, _limited, _mixed, _dropped, _backwards, _left_sorted]
ACROSS += [_inverse_backwards, _padded, _counts_as_ends, _other_keys, _added_inverse, _mean]


@nightly(but=["_counts_as_ends", "_mean"])
@pytest.mark.parametrize("move", ACROSS)
def test_what_looks_across_sorted_rows_has_all_of_them(move: Move) -> None:
    model, x = _Moved(move).double(), torch.randn(12, 16, dtype=torch.float64).requires_grad_()
    ts.check(model, {}, mesh={"dp": 2}, data="replicate", example_inputs=(x,)).raise_on_error()
    plan = ts.plan(model, {}, world_size=2, data="replicate", example_inputs=(x[:6],))
    assert not any("own_order" in node.meta for node in plan.graph.graph.nodes)


@pytest.mark.nightly
def test_a_mixture_with_its_auxiliary_loss() -> None:
    """Its first call sets an attribute; rehearsed, it has to choose the product that a capture has, by its dtype."""
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=64,
        num_local_experts=4,
        output_router_logits=True,
    )
    torch.manual_seed(0)
    model, ids = transformers.MixtralForCausalLM(config), torch.randint(0, 64, (4, 8))
    call: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    assert not ts.plan(model, {}, world_size=2, example_kwargs=call).data
    with torch.device("meta"):  # where it counts integers, which PyTorch's CPU does not
        model = transformers.MixtralForCausalLM(config)
    plan = ts.plan(model, {}, world_size=2, example_kwargs=call, memory="1GiB")
    assert plan.costs.memory["activations"] > 0


WIDE = 8192
"""So wide that a step sends its rows to the experts, and not the experts' weights to the rows."""


def _sends(plan: ts.Plan) -> set[str]:
    """What is sent of products and their weights."""
    sent = [c for c in plan.over_all[-1].costs.collectives if c.nbytes]
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
    ts.check(model, "auto", mesh=mesh, data=data, example_inputs=(x,)).raise_on_error()
    plan = ts.plan(model, {}, mesh=mesh, data=data, example_inputs=(x[:4],), world_size=math.prod(mesh.values()))
    assert _sends(plan) == {"dispatch", "combine"}


def test_a_step_at_experts_sends_what_was_planned() -> None:
    model, x = _Moved(_by_sizes, WIDE).double(), torch.randn(6, 16, dtype=torch.float64).requires_grad_()
    plan = ts.plan(model, {}, world_size=2, data="shard", example_inputs=(x,))
    parts = step_graphs(rank_graph(plan))
    sent = [c for c in plan.costs.collectives if c.name in ("dispatch", "combine")]
    duals = {"dispatch": "combine", "combine": "dispatch"}
    planned = [[c.name for c in sent if c.forward.nbytes], [duals[c.name] for c in sent if c.backward.nbytes]]
    nodes = [node for part in (parts.forward, parts.backward) for node in part.graph.nodes]
    made = [name for node in nodes if (name := str(node.target).split(".")[-2:][0]) in duals]
    assert sorted(made) == sorted(itertools.chain(*planned)) and len(made) == 6


@pytest.fixture
def prefers_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go to their experts wherever they can, whatever that costs."""
    name = "torchshard.compiler.program.seconds_of_step"
    monkeypatch.setattr(name, lambda plans: "dispatch" not in _sends(plans[-1]))


def _skew(model: _Moved, *scores: float) -> None:
    """Has all rows of positive numbers choose the experts of the largest scores."""
    with torch.no_grad():
        model.gate.weight.copy_(torch.tensor(scores).unsqueeze(1).expand(4, 16))


def _scaled(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """How many rows there are is a number, too."""
    keys, order = chosen[:, 0].sort()
    ends, grouped = _ends(keys), torch.ops.transformers.grouped_mm_fallback
    h = grouped(x[order], m.up, offs=ends)
    return torch.zeros_like(x).index_put((order,), grouped(h * h.shape[0], m.down, offs=ends))


def _by_other_ends(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Between two products there is one more, whose rows are counted in another way."""
    keys, order = chosen[:, 0].sort()
    ends, grouped = _ends(keys), torch.ops.transformers.grouped_mm_fallback
    others = torch.searchsorted(keys, torch.arange(4), right=True).to(torch.int32)
    h = grouped(grouped(x[order], m.up, offs=ends), m.down, offs=others)
    y = grouped(h, m.up, offs=ends)
    return torch.zeros_like(x).index_put((order,), torch.cat([y, y[:, :4]], 1))


def _without_expert(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The last rows have none: they choose a fifth."""
    keys, order = x[:, :5].topk(1).indices[:, 0].sort()
    return torch.zeros_like(x).index_put((order,), m.products(x[order], _ends(keys)))


def _without_last(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Ends are where each expert begins, so that rows of the last one have none."""
    keys, order = chosen[:, 0].sort(descending=False)
    ends = torch.searchsorted(keys, torch.arange(4)).to(torch.int32)
    return torch.zeros_like(x).index_put((order,), m.products(x[order], ends))


@pytest.mark.parametrize("move", [_scaled, _by_other_ends, _without_expert, _without_last])
@pytest.mark.usefixtures("prefers_sending")
def test_rows_whose_number_matters_stay(move: Move) -> None:
    """All rows choose one expert, so that none of the ranks has half of them."""
    model, x = _Moved(move).double(), torch.rand(8, 16, dtype=torch.float64).requires_grad_()
    _skew(model, 0.0, 0.0, 0.5, 1.0)
    ts.check(model, {}, world_size=2, data="shard", example_inputs=(x,)).raise_on_error()


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert_counts, self.moved = nn.Linear(16, 16), _Moved(_by_scatter)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.moved(self.expert_counts(x))
        return moved


def test_names_of_a_model_are_its_own() -> None:
    x = torch.randn(8, 16, dtype=torch.float64)
    ts.check(_Named().double(), {}, world_size=2, data="shard", example_inputs=(x,)).raise_on_error()


@pytest.mark.nightly
@pytest.mark.usefixtures("prefers_sending")
def test_a_part_of_a_step_at_experts_has_a_backward() -> None:
    """Of the two losses that a layer's part gives, one has a gradient."""
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1,
        vocab_size=64, num_local_experts=4, output_router_logits=True,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    model, ids = transformers.MixtralForCausalLM(config), torch.randint(0, 64, (4, 8))
    call: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = ts.plan(model, {}, world_size=2, data="shard", example_kwargs=call)
    assert plan.costs.memory["activations"] > 0 and "dispatch" in _sends(plan)


@pytest.mark.nightly
def test_rows_go_to_experts_that_do_not_divide() -> None:
    """Of five experts the last of three ranks has one; of four it has none, and all weights are gathered."""
    x = torch.randn(12, 16, dtype=torch.float64).requires_grad_()
    for experts, sent in ((5, {"dispatch", "combine"}), (4, {"up", "down"})):
        model, _ = _model(experts, inner=WIDE)
        ts.check(model, {}, world_size=3, data="shard", example_inputs=(x,)).raise_on_error()
        plan = ts.plan(model, {}, world_size=3, data="shard", example_inputs=(x[:4],))
        assert _sends(plan) == sent


@pytest.mark.parametrize(("rows", "sent"), [(8, {"dispatch", "combine"}), (40_000, {"up", "down"})])
def test_what_costs_less_is_sent(rows: int, sent: set[str]) -> None:
    model, _ = _model(inner=WIDE)
    plan = ts.plan(model, {}, world_size=2, data="shard", example_inputs=(torch.empty(rows, 16, device="meta"),))
    assert _sends(plan) == sent


def _trained(rank: int, mesh: dict[str, int], data: Any, parts: int) -> float:
    """The worst difference after steps, in which all rows go to one rank's experts, or to those of all."""
    worst = 0.0
    for move, skewed in ((_by_scatter, False), (_by_bias, True)):
        model = _Moved(move, WIDE).double()
        if skewed:
            _skew(model, 1.0, 0.5, 0.0, 0.0)
        sharded = ts.shard(copy.deepcopy(model), {}, mesh=mesh, data=data)
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
