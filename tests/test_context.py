"""Axes that split the sequence: steps match the unsharded model's, for any mask, alone and with other axes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly, refused_input
from torchshard.testing import capture, collective, gradient_error, largest, on_ranks, run_ranks

LENGTH = 24


class Block(nn.Module):
    """A layer with grouped query heads, and a mask of one of several kinds."""

    def __init__(self, kind: str, width: int = 16) -> None:
        super().__init__()
        self.kind, self.norm, self.norm_mlp = kind, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).split([width, width // 2, width // 2], -1)
        q, k, v = (t.view(b, length, -1, 4).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.kind == "causal", enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, length, width))
        rows = self.norm_mlp(x).view(-1, width)  # as mixtures of experts and Conv1D join batch and length
        return x + self.down(F.gelu(self.up(rows))).view(b, length, width)


class Decoder(nn.Module):
    """A language model with a loss of labels that it shifts."""

    def __init__(self, kind: str = "causal", words: int = 37) -> None:
        super().__init__()
        self.kind, self.embed, self.positions = kind, nn.Embedding(words, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(2)])
        self.head = nn.Linear(16, words, bias=False)
        self.head.weight = self.embed.weight

    def mask(self, ids: Tensor, documents: Tensor | None) -> Tensor | None:
        at = torch.arange(ids.shape[1], device=ids.device)
        before = at[:, None] - at[None, :]
        if self.kind == "window":
            return ((before >= 0) & (before < 5))[None, None]
        if self.kind == "alibi":
            slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=ids.device)[:, None, None]
            return (-slopes * before.abs()).masked_fill(before < 0, -math.inf)[None].to(self.head.weight.dtype)
        if self.kind == "documents" and documents is not None:
            return (documents[:, :, None] == documents[:, None, :])[:, None] & (before >= 0)
        return None

    def forward(self, ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x, mask = (
            self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)),
            self.mask(ids, documents),
        )
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        if labels is None:
            return logits
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), shifted.reshape(-1))


def _call(kind: str, length: int = LENGTH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(37, (2, 4, length), generator=generator)
    labels[:, ::5] = -100
    documents = (torch.arange(length) * 3 // length).expand(4, length).contiguous()
    return (ids, labels, documents) if kind == "documents" else (ids, labels)


KINDS = ("causal", "whole", "window", "alibi", "documents")
MESHES: list[dict[str, Any]] = [
    {"cp": 2},
    {"cp": 3},
    {"cp": (4, "sequence_shard")},
    {"dp": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"dp": (2, "shard"), "cp": 2, "tp": 2},
]
QUICK = ("causal-0", "documents-0", "window-1", "alibi-2", "whole-3", "causal-5")


@nightly(but=QUICK)
@pytest.mark.parametrize("mesh", range(len(MESHES)))
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_whole_sequence(kind: str, mesh: int) -> None:
    torch.manual_seed(0)
    report = ts.check(Decoder(kind), {}, _call(kind), mesh=MESHES[mesh])
    assert report.ok, str(report)


def test_a_missing_collective_is_noticed() -> None:
    """Each of the graph's copies and exchanges between sequence and heads counts."""
    planned = capture(Decoder(), _call("causal"), dtype=torch.float64).plan({}, mesh={"cp": 2})
    names = [node.name for node in planned.graph.graph.nodes if collective(node) in ("copy", "reduce")]
    for name in names[:3] + names[-2:]:
        graph = planned.graph_copy()
        gone = next(node for node in graph.graph.nodes if node.name == name)
        gone.replace_all_uses_with(gone.args[0])
        graph.graph.erase_node(gone)
        assert not planned.check(graph).ok, name


def _trained(rank: int, mesh: Any, kind: str, parts: tuple[int, int]) -> dict[str, float]:
    """The largest differences of losses and gradients from the unsharded run, for local and global inputs.

    Args:
        parts: the number of parts of the batch and of the sequence.
    """
    worst, per_rank = {}, torch.distributed.get_world_size() // math.prod(parts)
    batch, sequence = divmod(rank // per_rank, parts[1])
    for inputs in ("local", "global"):
        torch.manual_seed(0)
        model = Decoder(kind).double()
        sharded = ts.shard(copy.deepcopy(model), {}, mesh=mesh, inputs=inputs)
        found = []
        for length in (LENGTH, LENGTH, 2 * LENGTH):  # a call of another length needs no new graph
            call = _call(kind, length)
            own = [t.chunk(parts[0])[batch].chunk(parts[1], 1)[sequence] for t in call]
            given = own if inputs == "local" else call
            for m in (model, sharded):
                m.zero_grad()
            inside = model(*call), sharded(*given)
            for loss in inside:
                loss.backward()
            found += [abs(inside[0] - inside[1]).item(), gradient_error(sharded, model)]
            logits = model(call[0], None, *call[2:]), sharded(given[0], None, *given[2:])  # a loss outside of the model
            whole = logits[0] if inputs == "global" else logits[0].chunk(parts[0])[batch].chunk(parts[1], 1)[sequence]
            found.append((whole - logits[1]).abs().max().item())
            for m, out in zip((model, sharded), logits, strict=True):
                m.zero_grad()
                out.square().mean().backward()
            found.append(gradient_error(sharded, model))
        worst[inputs] = largest(*found)
    return worst


@nightly(but=["2-causal"])
@pytest.mark.parametrize(
    ("world", "mesh", "kind", "parts"),
    [
        (2, {"cp": 2}, "causal", (1, 2)),
        (3, {"cp": (3, "sequence_shard")}, "window", (1, 3)),
        (4, {"dp": 2, "cp": 2}, "documents", (2, 2)),
        (4, {"cp": 2, "tp": 2}, "alibi", (1, 2)),
    ],
    ids=["2-causal", "3-window", "4-documents", "4-alibi"],
)
def test_training_is_that_on_the_whole_sequence(world: int, mesh: Any, kind: str, parts: tuple[int, int]) -> None:
    for worst in run_ranks(_trained, world, mesh, kind, parts, seconds=600):
        assert largest(*worst.values()) < 1e-10, worst


@pytest.mark.parametrize("split", ["heads", "queries"])
def test_a_token_of_one_document_moves_no_other(split: str) -> None:
    """Libraries that replace each mask by a causal one fail this probe: documents see the ones before them."""
    heads = {"heads": 4, "queries": 1}[split]

    class Attention(nn.Module):
        """Self-attention of heads that can't be split if there is one."""

        def forward(self, x: Tensor, documents: Tensor) -> Tensor:
            b, length, _ = x.shape
            at = torch.arange(length)
            mask = (documents[:, :, None] == documents[:, None, :]) & (at[:, None] >= at[None, :])
            y = x.view(b, length, heads, -1).transpose(1, 2)
            return F.scaled_dot_product_attention(y, y, y, mask[:, None]).transpose(1, 2).flatten(2)

    model = nn.ModuleList([nn.Linear(8, 8), Attention()])

    class Net(nn.Module):
        """A projection, which brings the heads, and attention."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor, documents: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x), documents)

    documents, x = torch.tensor([[0] * 5 + [1] * 7]), torch.randn(1, 12, 8)
    other = x.clone()
    other[0, 2] += 1
    results = []
    for given in (x, other):
        planned = capture(Net(), (given, documents)).plan({}, mesh={"cp": 2})
        results.append(torch.cat([of_rank[0] for of_rank in planned.run()], 1))
    assert not torch.equal(results[0][0, 2:5], results[1][0, 2:5])
    assert torch.equal(results[0][0, 5:], results[1][0, 5:])


def test_rows_of_batch_and_sequence_stay_split() -> None:
    """A flattened batch and sequence has slices of blocks, so the head's logits are never gathered."""
    call = [torch.zeros(4, 2048, dtype=torch.long) for _ in range(2)]
    model = Decoder(words=8000).to("meta")
    model.positions = nn.Embedding(2048, 16, device="meta")
    plan = ts.plan(model, {}, call, mesh={"cp": 2}, inputs="global", objective={"machine": "h100x8"})
    layouts = {layout for choice in plan.last.choices.values() for layout in map(str, choice.operands)}
    assert any(layout.startswith("S(0; *") for layout in layouts), layouts
    sent = {c.value: c for c in plan.last.costs.collectives if c.forward.nbytes}
    assert max(c.forward.nbytes for c in sent.values()) < 4 * 2048 * 8000, sent
    assert ts.Plan.from_json(plan.to_json()) == plan


OF_ROWS: dict[str, Any] = {
    "mean": lambda rows, b: rows - rows.mean(0),
    "variance": lambda rows, b: rows / (rows.var(0) + 1),
    "dropout": lambda rows, b: F.dropout(rows, 0.3),
    "cumsum": lambda rows, b: rows.cumsum(0),
    "softmax": lambda rows, b: rows.softmax(0),
    "sort": lambda rows, b: rows.sort(0).values,
    "roll": lambda rows, b: rows.roll(1, 0),
    "flip": lambda rows, b: rows.flip(0) * rows,
    "other sizes": lambda rows, b: rows.view(-1, b, rows.shape[1]).cumsum(0).flatten(0, 1),
    "by length": lambda rows, b: rows.view(b, -1, rows.shape[1]).transpose(0, 1).flatten(0, 1).cumsum(0),
    "halves": lambda rows, b: torch.cat([rows[: rows.shape[0] // 2] * 2, rows[rows.shape[0] // 2 :]]),
    "scores": lambda rows, b: _of_scores(rows.view(b, -1, rows.shape[1])).flatten(0, 1),
    "norm": lambda rows, b: F.batch_norm(rows, None, None, training=True),
    "chosen": lambda rows, b: rows * (rows[:, 0] > 0).double().unsqueeze(1),
    "table": lambda rows, b: rows[torch.arange(rows.shape[0] - 1, -1, -1)],
}
"""Functions of the rows of a flattened batch and sequence, of which only some treat each row alone."""


def _of_scores(x: Tensor) -> Tensor:
    """Scores of all pairs, flattened: the length occurs twice in one dim."""
    scores = x @ x.transpose(1, 2)
    return (scores.reshape(-1) * 2).view(scores.shape).softmax(-1) @ x


class Rows(nn.Module):
    """A function of rows between two projections."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.up, self.down = name, nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = OF_ROWS[self.name](self.up(x).view(-1, 6), x.shape[0])
        return self.down(rows).view(x.shape).tanh()


@nightly(but=[f"{name}-4" for name in ("mean", "dropout", "cumsum", "scores", "by length")])
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 3}, {"dp": 2, "cp": 2}], ids=["2", "3", "4"])
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_function_of_rows_is_that_of_the_whole(name: str, mesh: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 12, 8, dtype=torch.float64, requires_grad=True)
    report = ts.check(Rows(name), {}, (x,), mesh=mesh)
    assert report.ok, str(report)


def _gradients_of_inputs(rank: int) -> dict[str, float]:
    """The largest differences of the gradients of inputs on a mesh of two axes, of a chain of two models."""
    torch.manual_seed(0)
    body, head = nn.ModuleList([nn.Linear(16, 16)]), Block("causal")

    class Body(nn.Module):
        """The first model of the chain."""

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.block = copy.deepcopy(body), Block("whole")

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.layers[0](x), None).tanh()

    class Head(nn.Module):
        """The second one."""

        def __init__(self) -> None:
            super().__init__()
            self.block = copy.deepcopy(head)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x, None)

    plain = Body().double(), Head().double()
    mesh = {"dp": 2, "cp": 2}
    sharded = [ts.shard(copy.deepcopy(m), {}, mesh=mesh) for m in plain]
    x = torch.randn(4, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    own = x.chunk(2)[rank // 2].chunk(2, 1)[rank % 2].clone().requires_grad_()
    x.requires_grad_()
    plain[1](plain[0](x)).square().mean().backward()
    sharded[1](sharded[0](own)).square().mean().backward()
    assert x.grad is not None and own.grad is not None
    part = x.grad.chunk(2)[rank // 2].chunk(2, 1)[rank % 2]
    return {
        "the input": (part - own.grad).abs().max().item(),
        "the body": gradient_error(sharded[0], plain[0]),
        "the head": gradient_error(sharded[1], plain[1]),
    }


def test_gradients_of_inputs_and_of_a_chain() -> None:
    for worst in run_ranks(_gradients_of_inputs, 4):
        assert largest(*worst.values()) < 1e-10, worst


class Conditioned(nn.Module):
    """A model with states of another sequence, and one with a table that fixes the length."""

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(length, 4)) if length else None

    def forward(self, x: Tensor, states: Tensor | None = None, cache: dict[str, Tensor] | None = None) -> Tensor:
        y = self.linear(x)
        if cache is not None:
            cache["k"] = y if "k" not in cache else torch.cat([cache["k"], y], 1)
            y = y + cache["k"].sum(1, keepdim=True)
        if self.table is not None:
            y = y + self.table
        return y if states is None else (y[:, :, None] * states[:, None]).sum(2)


@on_ranks(2)
def test_an_argument_that_was_full_stays_full(rank: int) -> None:
    """At the second length a rank's part has as many tokens as the states."""
    torch.manual_seed(0)
    model = Conditioned()
    sharded, states = ts.shard(copy.deepcopy(model), {}, mesh={"cp": 2}), torch.randn(3, 10, 4)
    for length in (24, 20, 16):
        x = torch.randn(3, length, 4)
        assert torch.allclose(sharded(x.chunk(2, 1)[rank], states), model(x, states).chunk(2, 1)[rank], atol=1e-5)


@on_ranks(2)
def test_what_can_not_be_split_is_refused(rank: int) -> None:
    x = torch.randn(3, 8, 4)
    sharded = ts.shard(Conditioned(), {}, mesh={"cp": 2})
    assert refused_input(lambda: sharded(x, None, {}), "forward leaves values in its arguments")
    assert refused_input(lambda: sharded(x[:, :1]), "a rank's part of the sequence is one token")
    whole = ts.shard(Conditioned(), {}, mesh={"cp": 2}, inputs="global")
    assert refused_input(lambda: whole(x[:, :7]), "a sequence of 7 can't be divided among 2 ranks")
    fixed = ts.shard(Conditioned(8), {}, mesh={"cp": 2}, inputs="global")
    assert refused_input(lambda: fixed(x), "forward fixes the length of the sequence")


def test_a_mesh_that_does_not_say_what_an_axis_holds_is_refused() -> None:
    call = (torch.randn(4, 8, 4),)
    for mesh in ({"tp": 2, "cp": 2}, {"dp": 2, "ep": 2, "cp": 2}):
        assert refused_input(lambda mesh=mesh: ts.check(Conditioned(), {}, call, mesh=mesh), "does not say what")
    split = {"cp": 2}, {"sp": 2}, {"CP": (2, "sequence_shard")}
    assert all(ts.check(Conditioned(), {}, call, mesh=mesh).ok for mesh in split)
    options = {"mesh": {"cp": 2, "tp": 2}, "objective": {"split": "sequence"}}
    told = "the sequence is split over an axis of its own"
    assert refused_input(lambda: ts.plan(Conditioned(), {}, call, **options), told)
