"""Mixtures of experts with real routing: the best experts of each token, sorted rows, grouped products."""

from __future__ import annotations

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
from tests.helpers import holding, nightly
from torchshard.testing import capture

aten = torch.ops.aten
HYBRID = {"dp": "replicate", "fsdp": "shard"}


class _Experts(nn.Module):
    """A mixture that sends each token to its two best experts."""

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
    """Float64 uses a fallback: PyTorch's own product rejects float64, and during a capture accepts only bfloat16."""
    torch.manual_seed(0)
    product = F.grouped_mm if dtype is torch.bfloat16 else torch.ops.transformers.grouped_mm_fallback
    x = torch.randn(10, 16, dtype=dtype).requires_grad_()
    return _Experts(experts, 16, inner, product).to(dtype), (x,)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_experts_are_split_inside(world: int) -> None:
    """Every rank has a shard of every expert; one all-reduce adds the partial sums."""
    model, inputs = _model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = ts.plan(model, "auto", example_inputs=inputs, mesh=world)
    assert (plan.parameters["up"], plan.parameters["down"]) == (ts.S(2), ts.S(1))
    assert {c.name: c.calls for c in plan.costs.collectives if c.forward.nbytes} == {"reduce": 1}
    report = ts.check(model, plan, example_inputs=inputs, mesh=world)
    assert report.ok, str(report)


def test_pytorchs_own_product() -> None:
    model, inputs = _model(inner=64, dtype=torch.bfloat16)
    plan = ts.plan(model, "auto", example_inputs=inputs, mesh=2)
    assert (plan.parameters["up"], plan.parameters["down"]) == (ts.S(2), ts.S(1))
    report = ts.check(model, plan, example_inputs=inputs, mesh=2, dtype=None)
    assert report.ok, str(report)


@nightly("40-False")
@pytest.mark.parametrize("inner, is_split", [(40, False), (64, True)])
def test_pytorchs_own_product_is_split_where_rows_stay_aligned(inner: int, is_split: bool) -> None:
    """Its rows must be multiples of 16 bytes: 40 elements of 2 bytes are 5 times 16, which 4 ranks can't split."""
    model, inputs = _model(inner=inner, dtype=torch.bfloat16)
    plan = ts.plan(model, "auto", example_inputs=inputs, mesh=4)
    assert (plan.parameters["up"] == ts.S(2)) is is_split
    report = ts.check(model, plan, example_inputs=inputs, mesh=4, dtype=None)
    assert report.ok, str(report)
    if not is_split:
        with pytest.raises(ts.PlanError):
            ts.plan(model, {"up": "column"}, example_inputs=inputs, mesh=4)


@pytest.mark.parametrize("world, experts", [(2, 4), (3, 4), (4, 3)])
def test_experts_across_ranks(world: int, experts: int) -> None:
    """Every rank has some experts, unsharded; with 3 experts the last of 4 ranks is empty."""
    model, inputs = _model(experts)
    made = capture(model, inputs).plan(
        {}, world, objective={"machine": "cpu-gloo"}, layouts={"up": ts.S(0), "down": ts.S(0)}
    )
    gathered = {c.value for c in made.plan.costs.collectives} & {"up", "down"}
    assert not gathered
    report = made.check()
    assert report.ok, str(report)


@pytest.mark.nightly
def test_memory_of_a_mixture_on_meta() -> None:
    """On GPUs, Hugging Face counts each expert's rows with an op that CPUs support only for other dtypes."""
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
        ids = torch.empty(2, 6, dtype=torch.long)
    plan = ts.plan(model, "auto", example_kwargs={"input_ids": ids}, mesh=2, objective={"memory": "1GiB"})
    assert plan.costs.memory["parameters"] > 0


class _Moved(nn.Module):
    """The two best experts of each token; the function `move` sorts the rows for the products, and moves them back."""

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
    """The end offset of each expert's rows."""
    return torch.histc(keys.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)


def _by_inverse(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Repeats rows, and moves them back by a second sort."""
    order = chosen.view(-1).argsort()
    y = m.products(x.repeat_interleave(2, 0)[order], _ends(chosen.view(-1)))
    return (y[order.argsort()].view(-1, 2, 16) * weight.unsqueeze(-1)).sum(1)


def _by_scatter(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Gathers rows, and adds them back by scatter_add, like torchtitan."""
    ends = _ends(chosen.view(-1))
    order = chosen.view(-1).argsort(stable=True)
    tokens = (order // 2).reshape(-1, 1).expand(-1, 16)
    y = m.products(x.gather(0, tokens), ends) * weight.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, tokens, y)


def _by_bias(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows look up a bias of their experts; a division computes each row's token."""
    keys, order = chosen.flatten().sort()
    tokens = torch.div(order, 2, rounding_mode="floor")
    rows = F.layer_norm(x[tokens], (16,)) + m.bias[keys].mean(-1, keepdim=True)
    y = m.products(rows, _ends(keys)) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_put((tokens,), y, accumulate=True)


def _by_place(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """One expert for each token; index_put moves rows back to their places."""
    keys, order = chosen[:, 0].sort()
    y = m.products(x[order], _ends(keys)) * weight[:, 0][order].unsqueeze(-1)
    return torch.zeros_like(y).index_put((order,), y)


def _by_int32(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Moves rows back by an inverse order in int32."""
    keys, order = chosen[:, 0].sort()
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(order.shape[0], dtype=torch.int32)
    return m.products(x[order], _ends(keys))[inverse]


def _by_sizes(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Between the products, views rows by their number and multiplies them by a bias of their experts."""
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
    """With the batch split, ranks send only gradients of weights, over the batch's axis."""
    model, x = _Moved(move).double(), torch.randn(12, 16, dtype=torch.float64).requires_grad_()
    for data in ("replicate", "shard"):
        ts.check(model, "auto", mesh=holding(mesh, data), example_inputs=(x,)).raise_on_error()
    plan = ts.plan(model, {}, example_inputs=(x[:6],), mesh={"dp": (2, "replicate")})
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
    """Averages neighbours in the order of all rows."""
    keys, order = chosen.flatten().sort()
    y = m.products(x[order // 2], _ends(keys))
    pairs = y.view(-1, 2, 16).mean(1, keepdim=True).expand(-1, 2, -1).reshape(-1, 16)
    return torch.zeros_like(y).index_put((order,), pairs).view(-1, 2, 16).sum(1)


def _limited(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Each expert accepts at most two rows of the full batch, and drops later ones."""
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
    """Groups are in reverse order, so a row's product depends on its place among all rows."""
    keys, order = chosen[:, 0].sort(descending=True)
    return torch.zeros_like(x).index_put((order,), m.products(x[order], _ends(keys)))


def _left_sorted(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    return m.products(x[order], _ends(keys))


def _inverse_backwards(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    return m.products(x[order], _ends(keys))[order.argsort(descending=True)]


def _padded(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows of padding come first but are not counted, so the other rows have the products of other places."""
    keys, order = torch.where(x[:, 0] > 0, chosen[:, 0], -1).sort()
    y = m.products(x[order], _ends(keys)) * (keys >= 0).unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order, y)


def _counts_as_ends(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    keys, order = chosen[:, 0].sort()
    counts = torch.histc(keys.float(), bins=4, min=0, max=3).to(torch.int32)
    return torch.zeros_like(x).index_put((order,), m.products(x[order], counts))


def _other_keys(m: _Moved, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Sorts by a coarser key than the one that is counted."""
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
    ts.check(model, {}, example_inputs=(x,), mesh={"dp": (2, "replicate")}).raise_on_error()
    plan = ts.plan(model, {}, example_inputs=(x[:6],), mesh={"dp": (2, "replicate")})
    assert not any("own_order" in node.meta for node in plan.graph.graph.nodes)


@pytest.mark.nightly
def test_a_mixture_with_its_auxiliary_loss() -> None:
    """Its first call sets an attribute; the rehearsal must choose the same product as a capture, by its dtype."""
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
    assert not ts.plan(model, {}, example_kwargs=call, mesh=2).last.data
    with torch.device("meta"):  # here it counts integers, unlike on CPUs
        model = transformers.MixtralForCausalLM(config)
    plan = ts.plan(model, {}, example_kwargs=call, mesh=2, objective={"memory": "1GiB"})
    assert plan.costs.memory["activations"] > 0


WIDE = 8192
"""A width at which a step sends rows to the experts instead of the experts' weights to the rows."""
