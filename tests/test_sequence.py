"""Sequence parallelism: norms, dropouts and residuals on slices, for lengths that are multiples of the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn
from torch.distributed.tensor.parallel import SequenceParallel

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import Partition, begun, capture, kept_graphs, largest, nbytes, run_ranks, split

MEGATRON = {"*.q": "column", "*.k": "column", "*.v": "column", "*.o": "row", "*.up": "column", "*.down": "row"}
PINS = MEGATRON | {"blocks.?": "sequence"}
NORMS = MEGATRON | {"blocks.*.n?": "sequence"}


class Block(nn.Module):
    """A block of a GPT with dropouts in its residuals."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.n1(x)
        q, k, v = (m(y).view(batch, length, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.o(mixed.transpose(1, 2).reshape(batch, length, width)), self.p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.n2(x)))), self.p, self.training)


class Model(nn.Module):
    """A GPT that returns its loss first."""

    def __init__(self, width: int = 16, heads: int = 4, p: float = 0.1, blocks: int = 2, positions: int = 64) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(32, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, p) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def _ids(length: int, batch: int = 3) -> Tensor:
    return torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4])
def test_norms_and_residuals_are_computed_on_slices(world: int) -> None:
    model, ids = _model(), _ids(12)
    plan = ts.plan(model, PINS, example_inputs=(ids, ids), mesh=world, objective={"machine": "cpu-memory"})
    choices = plan.choices
    on_slices = [name for name, choice in choices.items() if any(str(r) == "S(1)" for r in choice.results)]
    # Per block: two norms, two dropouts and two residuals. The linear layers in between are split by features.
    assert sum(name.endswith(("n1", "n2")) for name in on_slices) == 4
    assert sum("dropout" in name for name in on_slices) == 4
    report = ts.check(model, PINS, example_inputs=(ids, ids), mesh=world)
    assert report.ok, str(report)
    # Partial sums are reduce-scattered; or, with this few features, operands are resplit before the product.
    kinds = {c.name for c in plan.costs.collectives}
    assert "all_gather" in kinds and kinds & {"reduce_scatter", "all_to_all"}, kinds


@pytest.mark.nightly
@pytest.mark.parametrize("word", ["sequence", "sequence_parallel", SequenceParallel()], ids=["ours", "hf", "dtensor"])
def test_norms_that_are_many_ops(word: Any) -> None:
    """A Llama's norms are products and means; its plan is saved and loaded, and serves other lengths too."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, use_cache=False,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).double(), _ids(12)
    call = {"input_ids": ids, "labels": ids}
    plan = ts.plan(model, {"*layernorm": word}, example_kwargs=call, mesh=3)
    norms = [c for name, c in plan.choices.items() if "layernorm" in name and c.splits_dynamic]
    assert len(norms) >= 4 * 5
    again = ts.Plan.from_json(plan.to_json())
    assert again.choices == plan.choices
    report = ts.check(model, again, example_kwargs=call, mesh=3)
    assert report.ok, str(report)
    with pytest.warns(UserWarning, match="a length of 13 is no multiple of 3 ranks"):
        odd = {"input_ids": _ids(13), "labels": _ids(13)}
        report = ts.check(model, again, example_kwargs=odd, mesh=3)
    assert report.ok, str(report)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_a_module_without_a_sequence_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Mean(), nn.Linear(8, 4))
    x = torch.randn(3, 12, 8)
    with pytest.raises(ts.PlanError, match="no sequence"):
        ts.plan(model, {"2": "sequence"}, example_inputs=(x,), mesh=2)


@pytest.mark.nightly
def test_the_planner_splits_the_sequence_to_fit() -> None:
    """The sequence is only split if necessary: a plan that fits without it serves every length."""
    model, x = nn.Sequential(*(Residual(8, 64) for _ in range(2))), torch.randn(8, 64, 64)
    roomy = ts.plan(model, "auto", (x,), mesh=4, objective={"machine": "h100x8", "memory": "1GiB"})
    limit = 0.7 * roomy.costs.memory["peak"]
    tight = ts.plan(model, "auto", (x,), mesh=4, objective={"machine": "h100x8", "memory": limit})
    assert tight.splits_dynamic and not roomy.splits_dynamic
    assert tight.costs.memory["peak"] <= limit


class Residual(nn.Module):
    """An MLP with a residual, and small values in between."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.norm(self.down(F.gelu(self.up(x)))))


def _worst(model: nn.Module, sharded: ts.ShardedModule, length: int) -> float:
    """Returns the largest gradient error of this rank's slices, after a step with inputs of a length."""
    for module in (model, sharded):
        torch.manual_seed(5)
        module.zero_grad()
        module(_ids(length), _ids(length))[0].backward()
    whole, group, layouts = dict(model.named_parameters()), sharded.group, sharded.plan.parameters
    errors = (
        (p.grad - split(whole[name].grad, layouts[name], group.rank, group.size)).abs().max().item()
        for name, p in sharded.named_parameters()
    )
    return largest(*errors)


LENGTH = 512
"""Long enough that a reduce-scatter and an all-gather take less time than an all-reduce and a scatter."""


def _step_of(plan: dict[str, str], world: int, **options: Any) -> tuple[Partition, tuple[int, int]]:
    """Returns the first rank's step graphs, and the numbers of forward and backward collectives in the plan."""
    ids = _ids(LENGTH)
    made = capture(_model(positions=LENGTH, **options).bfloat16(), (ids, ids)).plan(plan, world)
    return made.step_graphs(), made.plan.costs.calls


def _saved(parts: Partition) -> int:
    """Returns the bytes that forward saves; a view counts as its base."""
    held = set()
    for value in parts.forward.graph.output_node().args[0][len(parts.given) :]:
        while isinstance(value, fx.Node) and getattr(value.target, "is_view", False):
            value = value.all_input_nodes[0]
        if isinstance(value, fx.Node) and value.op != "placeholder" and isinstance(value.meta["val"], Tensor):
            held.add(value)
    return sum(nbytes(value.meta["val"]) for value in held)


@pytest.mark.nightly
def test_backward_gathers_again_what_it_needs() -> None:
    """As in Megatron-LM, a layer saves 34 bytes per element of the sequence, divided by the number of ranks."""
    width, tokens = 256, 3 * LENGTH
    per_layer = {}
    for name, plan in (("tensor", MEGATRON), ("sequence", NORMS)):
        saved = []
        for blocks in (2, 3):
            parts, calls = _step_of(plan, 8, width=width, heads=8, blocks=blocks)
            counted = [sum(begun(n) is not None for n in p.graph.nodes) for p in (parts.forward, parts.backward)]
            assert tuple(counted) == calls
            saved.append(_saved(parts))
        per_layer[name] = (saved[1] - saved[0]) / (tokens * width)
    # two dropouts save masks of two bytes; Megatron's have one
    assert per_layer["sequence"] <= (34 + 2) / 8 + 0.1
    assert 10 + 24 / 8 <= per_layer["tensor"] <= 10 + 24 / 8 + 0.6
    names = [n.name for n in parts.backward.graph.nodes if n.name.endswith("all_gather_begun")]
    assert len(names) == 2 * 3, names


def _compiled(rank: int) -> list[float]:
    model = _model(p=0.0)
    sharded = ts.shard(model, PINS, (_ids(12), _ids(12)), objective={"compile": {"backend": "aot_eager"}})
    return [_worst(model, sharded, length) for length in (12, 24, 18)]


@pytest.mark.nightly
def test_compiled_steps() -> None:
    for errors in run_ranks(_compiled, 2):
        assert largest(*errors) < 1e-12


def _steps(rank: int, lengths: list[int]) -> list[tuple[int, int, float]]:
    """Returns (length, number of captured graphs so far, largest gradient error) for each length."""
    model = _model()
    sharded = ts.shard(model, PINS, (_ids(12), _ids(12)))
    found = []
    for length in lengths:
        worst = _worst(model, sharded, length)
        found.append((length, sharded.captures, worst))
    for name, p in sharded.named_parameters():  # a layer's gradients came in one message
        assert p.grad is not None and p.grad.untyped_storage().nbytes() == p.grad.nbytes, name
    assert all(kept.has_step_graphs for kept in kept_graphs(sharded))
    return found


@nightly("3")
@pytest.mark.parametrize("world", [2, 3])
def test_any_length_on_real_ranks(world: int) -> None:
    """Divisible lengths share a graph, and so do the others; gradients are the unsharded model's."""
    for found in run_ranks(_steps, world, [12, 24, 13, 18, 25, 6, world]):
        assert [captures for _, captures, _ in found] == [1, 1, 2, 2, 2, 2, 2]
        assert largest(*(worst for _, _, worst in found)) < 1e-12
