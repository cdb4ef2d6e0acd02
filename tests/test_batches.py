"""A batch that is split across ranks: each rank passes its own part, and gradients equal the full batch's."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn

import torchshard as ts
from tests.helpers import holding, nightly
from tests.test_sequence import Model
from torchshard.testing import (
    PlannedCall,
    awaited,
    begun,
    capture,
    full_gradient,
    largest,
    nbytes,
    rank_graph,
    run_ranks,
    step_graphs,
)

PART = 3
WAYS = ("replicate", "shard")


def _model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def _batch(ranks: int, length: int = 12) -> tuple[Tensor, Tensor]:
    """Token ids and labels; the number of valid labels differs between the ranks' parts."""
    ids = torch.randint(0, 32, (ranks * PART, length), generator=torch.Generator().manual_seed(length))
    labels = ids.clone()
    labels[0, :7], labels[-1] = -100, -100
    return ids, labels


class Sizes(nn.Module):
    """Reads its batch size, computes across the batch, and has an argument and results without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        batch, length = x.shape[:2]
        y = self.linear(x) * mask[None, :length, :1] + torch.arange(batch, dtype=x.dtype)[:, None, None] / batch
        every = y.sum((1, 2)).softmax(0) * torch.arange(0, x.numel(), x[0].numel()) / x.numel()
        return y.sum() / batch, y.mean(0), y.reshape(batch * length, 4), y.transpose(0, 1), y.std(), every, y.flip(0)


class Pairs(nn.Module):
    """A contrastive loss, which compares each sample of the batch with each other sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        similar = F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).t()
        return F.cross_entropy(5 * similar, torch.arange(x.shape[0]))


class Images(nn.Module):
    """A batch norm, which computes its statistics and buffers over the full batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(128, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))
        return F.cross_entropy(logits, y), logits


def _llama() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    ids, labels = _batch(4)
    mask = (torch.arange(12) >= torch.arange(12)[:, None] % 4).long()
    return transformers.LlamaForCausalLM(config), (), {"input_ids": ids, "labels": labels, "attention_mask": mask}


CASES: dict[str, Any] = {
    "a GPT with dropouts": lambda: (_model(), _batch(4), {}),
    "sizes": lambda: (Sizes(), (torch.randn(12, 5, 4, requires_grad=True), torch.rand(5, 5)), {}),
    "pairs": lambda: (Pairs(), (torch.randn(12, 6), torch.randn(12, 6)), {}),
    "images": lambda: (Images(), (torch.randn(12, 3, 8, 8), torch.randint(0, 5, (12,))), {}),
    "llama": _llama,
}


@nightly(but=["images-2-shard", "images-3-shard", "sizes-12-replicate"])
@pytest.mark.parametrize("data", WAYS)
@pytest.mark.parametrize("world", [2, 3, 12])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_the_whole_batch(name: str, world: int, data: Any) -> None:
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    report = ts.check(model, {}, args, kwargs, mesh={"dp": (world, data)})
    assert report.ok, str(report)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_slices_may_be_gathered_once(mesh: dict[str, int]) -> None:
    """`shard_grad_op` gathers each weight that backward needs only once, but keeps the full weight in memory."""
    of_batch = {}
    for data in ("shard", "shard_grad_op"):
        model, batch = _model(), _batch(2)
        plan = ts.plan(model, mesh=holding(mesh, data), example_inputs=tuple(t[:PART] for t in batch))
        assert ts.check(model, plan, mesh=holding(mesh, data), example_inputs=batch).ok
        of_batch[data] = plan.axes[0], plan.step_memory
    (again, less), (once, more) = of_batch.values()
    assert again.parameters == once.parameters and again.costs.kinds == once.costs.kinds
    assert again.costs.nbytes > 1.2 * once.costs.nbytes and less["parameters"] == more["parameters"]
    assert less["peak"] < more["peak"]
    assert again.costs.collectives and not any(c.again.nbytes for c in once.costs.collectives)


def _planned(data: Any) -> PlannedCall:
    made = capture(_model(p=0.0), _batch(2)).plan({}, {"dp": (2, data)})
    assert made.plan.inputs == {"ids": ts.S(0), "labels": ts.S(0)}
    return made


@nightly("replicate")
@pytest.mark.parametrize("data", WAYS)
def test_a_missing_sum_is_seen(data: Any) -> None:
    """Without a weight's `copy`, each rank computes the gradient of its own part only; all results are still exact."""
    made = _planned(data)
    assert made.check().ok
    copies = [node.name for node in made.graph.graph.nodes if node.target is torch.ops.torchshard.copy.default]
    assert len(copies) > 20
    for name in copies[::5]:
        graph = made.graph_copy()
        (gone,) = (node for node in graph.graph.nodes if node.name == name)
        gone.replace_all_uses_with(gone.args[0])
        graph.graph.erase_node(gone)
        report = made.check(graph)
        assert {c.kind for c in report.comparisons if c.error > report.tolerance} == {"parameter gradient"}, name


@nightly("False")
@pytest.mark.parametrize("bucketed", [True, False])
def test_weights_in_slices_are_gathered_one_ahead_and_again_in_the_backward(
    bucketed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like FSDP2: at most two groups are gathered at a time, full weights aren't saved, and gradients are scattered."""
    if not bucketed:
        monkeypatch.setattr("torchshard.ir.buckets.BUCKETED_BYTES", 0)
    made = _planned("shard")
    split = {name for name, layout in made.plan.parameters.items() if layout != ts.I}
    assert split == {name for name, stored in made.plan.stored.items() if len(stored.shape) > 1}
    groups = len({re.sub(r"(\.\d+)\..*", r"\1", name) if bucketed else name.rpartition(".")[0] for name in split})
    parts = made.step_graphs()
    assert not [name for name in parts.saved if "gather" in name]
    gathered = [_begun(graph, "all_gather") for graph in (parts.forward, parts.backward)]
    assert gathered == [groups, groups - 2]  # look-ups don't gather again
    assert [_begun(graph, "reduce_scatter") for graph in (parts.forward, parts.backward)] == [0, groups - 1]
    kernels = Counter(kernel for c in made.plan.costs.collectives for kernel in _kernels(c))
    assert kernels["all_gather"] == sum(gathered) and kernels["reduce_scatter"] == groups - 1
    for graph, kernel in itertools.product((parts.forward, parts.backward), ("all_gather", "reduce_scatter")):
        under_way = 0
        for node in graph.graph.nodes:
            begin = awaited(node)
            under_way += _begins(node, kernel) - (begin is not None and _begins(begin, kernel))
            assert under_way <= 2


def _kernels(collective: Any) -> list[str]:
    """The kernels that a collective runs, one per message."""
    return [sent.kernel for sent in collective.sent for _ in range(sent.times if sent.nbytes else 0)]


def _begun(graph: fx.GraphModule, kernel: str) -> int:
    """The number of collectives of a kernel that a graph begins."""
    return sum(_begins(node, kernel) for node in graph.graph.nodes)


def _begins(node: fx.Node, kernel: str) -> bool:
    row = begun(node)
    return row is not None and row.kernel == kernel


class Casts(nn.Module):
    """A model with weights that autocast casts, and a dim of 5, which splits unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x)))).float().square().sum()


def _casts(parts: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Casts(), torch.randn(parts * PART, 8)


@nightly("replicate")
@pytest.mark.parametrize("data", WAYS)
def test_what_autocast_casts_is_gathered_in_bfloat16_and_summed_in_float32(data: Any) -> None:
    model, x = _casts(2)
    with torch.autocast("cpu", torch.bfloat16):
        plan = ts.plan(model, {}, example_inputs=(x[:PART],), mesh={"dp": (2, data)})
        assert ts.check(model, plan, example_inputs=(x,), mesh={"dp": (2, data)}).ok
    parts = step_graphs(rank_graph(plan))
    counted = 0.0
    nodes = [node for part in (parts.forward, parts.backward) for node in part.graph.nodes]
    for node, row in ((node, row) for node in nodes if (row := begun(node)) is not None):
        operand, kernel = node.args[0].meta["val"], row.kernel
        is_cast = kernel == "all_gather" and operand.ndim
        assert operand.dtype == (torch.bfloat16 if is_cast else torch.float32), node
        counted += {"all_reduce": 1, "reduce_scatter": 0.5, "all_gather": 1}[kernel] * nbytes(operand)
    assert counted == pytest.approx(plan.costs.nbytes, rel=0.15)  # rows of 5 and 8 are split unevenly


def _summed(rank: int, data: Any) -> bool:
    world = torch.distributed.get_world_size()
    model, x = _casts(world)
    sharded = ts.shard(copy.deepcopy(model), {}, _own((x,), rank), mesh=data)
    for _ in range(2):
        for m in (model, sharded):
            m.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model(part) for part in x.split(PART)]
            sharded(*_own((x,), rank)).backward()
        for loss in losses:  # autograd sums the parts' gradients in float32
            loss.backward()
        for p, own in zip(model.parameters(), sharded.parameters(), strict=True):
            if not torch.allclose(full_gradient(own), p.grad, rtol=1e-6, atol=1e-7):
                return False
    return True


@nightly("2-replicate")
@pytest.mark.parametrize(("world", "data"), [(2, "replicate"), (3, "shard")])
def test_gradients_of_casts_are_summed_in_float32(world: int, data: Any) -> None:
    assert all(run_ranks(_summed, world, data))


def test_gradients_of_a_layer_are_one_message() -> None:
    ids, labels = _batch(2)
    plan = ts.plan(_model(), {}, example_inputs=(ids[:PART], labels[:PART]), mesh={"dp": (2, "replicate")})
    assert set(plan.parameters.values()) == {ts.I}
    # forward: the count of valid labels, the loss; backward: two blocks' gradients, all other gradients
    assert plan.costs.calls == (2, 3)
    again = ts.Plan.from_json(plan.to_json())
    assert again == plan and again.last.data == "replicate"
    assert ts.check(_model(), again, example_inputs=(ids, labels), mesh=2).ok


def _own(batch: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
    return tuple(t[rank * PART : (rank + 1) * PART] for t in batch)


KINDS = ("inside", "outside", "accumulated", "frozen")
"""A loss inside the model; a loss outside; gradients accumulated over two calls; a frozen part of the model."""


def _model_of(kind: str) -> Model:
    model = _model()
    if kind == "frozen":
        for p in model.blocks[0].parameters():
            p.requires_grad_(False)
    return model


def _train_both(
    kind: str, model: Model, sharded: Any, parts: int, part: int, lengths: tuple[int, ...]
) -> tuple[float, torch.optim.Optimizer]:
    """Trains on full batches and on one part; returns a parameter's largest difference, and the part's optimizer."""
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, sharded)]
    for step, length in enumerate(lengths):
        batch = _batch(parts, length)
        for m, optimizer, own in ((model, optimizers[0], batch), (sharded, optimizers[1], _own(batch, part))):
            for turn in range(2 if kind == "accumulated" else 1):
                torch.manual_seed(10 * step + turn)
                loss, logits = m(*own)
                (logits.square().mean() if kind == "outside" else loss).backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    named, whole = dict(model.named_parameters()), sharded.full_state_dict()
    assert sharded.captures == 1
    return largest(*((whole[name] - p).abs().max().item() for name, p in named.items())), optimizers[1]
