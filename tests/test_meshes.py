"""Meshes split the weights over one axis and the batch over the others; steps match the unsharded model's."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, fx, nn

import torchshard as ts
from tests.helpers import holding, nightly
from tests.test_batches import CASES, WAYS, _batch, _model, _own
from torchshard.testing import (
    Call,
    PlannedCall,
    Row,
    begun,
    capture,
    changed_rule,
    collective,
    largest,
    on_ranks,
    step_graphs,
)

MESHES = [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}]
HYBRID = {"dp": "replicate", "fsdp": "shard"}
"""Weights sliced over one axis, replicated over another (HSDP)."""


def _cases() -> Iterator[Any]:
    for name in CASES:
        for mesh in MESHES:
            for data in WAYS:
                is_quick = name != "llama" and mesh == MESHES[1 if name == "pairs" else 0]
                marks = () if is_quick else pytest.mark.nightly
                yield pytest.param(
                    name, mesh, data, marks=marks, id=f"{name}-{'x'.join(map(str, mesh.values()))}-{data}"
                )
        for mesh in ({"dp": 2, "fsdp": 2}, {"dp": 2, "fsdp": 2, "tp": 3}, {"fsdp": 3, "dp": 2, "tp": 2}):
            marks = () if name == "sizes" else pytest.mark.nightly
            yield pytest.param(name, mesh, HYBRID, marks=marks, id=f"{name}-{mesh}-hybrid")


@nightly(but=["sizes-2x2-shard"])
@pytest.mark.parametrize(("name", "mesh", "data"), [*_cases()])
def test_a_step_is_that_of_the_whole_batch(name: str, mesh: dict[str, int], data: Any) -> None:
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    report = ts.check(model, "auto", mesh=holding(mesh, data), example_inputs=args, example_kwargs=kwargs)
    assert report.ok and report.world_size == math.prod(mesh.values()), str(report)


class Pieces(nn.Module):
    """A model with `split`: the number of pieces fixes the batch size of the graph, for each axis of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).split(2)[0].softmax(0)


def test_a_batch_of_one_size_alone_is_divided_over_two_axes() -> None:
    report = ts.check(Pieces(), "auto", example_inputs=(torch.randn(8, 6),), mesh=holding({"dp": 2, "fsdp": 2}, HYBRID))
    assert report.ok, str(report)


class Fixed(nn.Module):
    """A model with a buffer that has one row per sample of the full batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("rows", torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.rows


@on_ranks(2)
def test_of_a_batch_that_forward_fixes_a_rank_has_its_part(rank: int) -> None:
    torch.manual_seed(0)
    model, x = Fixed().double(), torch.randn(8, 6).double()
    sharded = ts.shard(copy.deepcopy(model), {}, mesh={"dp": (2, "replicate"), "tp": 1})
    mine = slice(4 * rank, 4 * rank + 4)
    with pytest.warns(UserWarning, match="the graph is for a batch of 8 alone"):
        part = sharded(x[mine])
    whole = model(x)
    assert part.shape == whole[mine].shape
    whole.square().mean().backward()
    part.square().mean().backward()
    pairs = [(part, whole[mine]), (sharded.linear.weight.grad, model.linear.weight.grad)]
    assert largest(*((a - b).abs().max().item() for a, b in pairs)) < 1e-12


class Positions(nn.Module):
    """A model with positions: their first dim is the sequence, which only the weights' axis may split."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p = nn.Embedding(20, 12), nn.Embedding(20, 12)
        self.up, self.down, self.norm = nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)

    def forward(self, scale: Tensor, positions: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.e(ids * (scale[:, None] > -9)) + self.p(positions)
        h = self.norm(h + self.down(self.up(h).relu()))
        return h.mean(), h


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_a_length_that_one_axis_divides_is_not_split_over_the_other(mesh: dict[str, int]) -> None:
    plan = {"norm": "sequence", "up": "column", "down": "row"}
    for length in (8, 9, 12):
        torch.manual_seed(0)
        call = (torch.randn(12), torch.arange(length), torch.randint(20, (12, length)))
        report = ts.check(Positions(), plan, mesh=mesh, example_inputs=call)
        assert report.ok, str(report)


class Uneven(nn.Module):
    """Three heads over two ranks: planned separately, the ranks would choose different layouts after the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.f = nn.Linear(64, 24), nn.Linear(64, 8), nn.Linear(24, 8, bias=False)
        self.f.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.a(x).view(-1, 3, 8).softmax(-1).mean(0, keepdim=True).flatten(1)
        return self.f(heads).sin() * self.c(x).tanh()


@pytest.mark.parametrize("data", WAYS)
def test_ranks_with_slices_of_other_sizes_divide_the_batch_in_one_way(data: Any) -> None:
    torch.manual_seed(0)
    plan = {"f": "row", "a": "column", "c": "replicate"}
    report = ts.check(Uneven(), plan, mesh=holding(MESHES[0], data), example_inputs=(torch.randn(4, 64),))
    assert report.ok, str(report)


class Bank(nn.Module):
    """A second input with its own rows, which are only known to be divisible along the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.a = nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor, bank: Tensor) -> Tensor:
        return (self.a(x) @ self.a(self.n(bank)).T).softmax(-1)


@nightly("10")
@pytest.mark.parametrize("rows", [10, 16])
def test_rows_that_the_other_axis_divides_are_not_split(rows: int) -> None:
    torch.manual_seed(0)
    call = (torch.randn(12, 8), torch.randn(rows, 8))
    report = ts.check(Bank(), "auto", example_inputs=call, mesh=MESHES[1], objective={"split": "sequence"})
    assert report.ok, str(report)


def _planned(data: Any, plan: Any) -> PlannedCall:
    """Plans a call on a mesh with two ranks along each axis."""
    by_name = data if isinstance(data, dict) else {"dp": data}
    call = capture(_model(p=0.0), _batch(2 ** len(by_name)))
    return call.plan(plan, mesh=holding(dict.fromkeys((*by_name, "tp"), 2), by_name))


PLAN = {"blocks.*.q": "column", "blocks.*.k": "column", "blocks.*.v": "column", "blocks.*.o": "row"}


def test_what_a_rank_holds_is_a_word() -> None:
    made = _planned("shard", PLAN)
    words = made.shardings
    assert words["blocks.0.q.weight"] == "model: S(0) . data: S(0)"  # a slice of this rank's rows
    assert words["blocks.0.o.weight"] == "data: S(0) . model: S(1)"
    assert words["blocks.0.q.bias"] == "model: S(0)" and words["blocks.0.n1.weight"] == "I"
    assert words["ids"] == "data: S(0)"
    assert str(made.program.held["blocks.0.q.weight"]) == "(tp: S(0), dp: S(0))"


@pytest.mark.nightly
def test_slices_over_one_axis_are_held_alike_over_another() -> None:
    made = _planned(HYBRID, PLAN)
    words = made.shardings
    assert words["blocks.0.q.weight"] == "model: S(0) . data2: S(0)" and words["blocks.0.q.bias"] == "model: S(0)"
    assert words["ids"] == "data1: S(0) . data2: S(0)"
    (graph, *_) = made.rank_graphs()
    (weight,) = graph.graph.find_nodes(op="placeholder", target="blocks_0_q_weight")
    (copied,) = weight.users  # so the sum over dp is of a slice, not of the full weight
    (gathered,) = copied.users
    assert (str(copied.target), str(gathered.target)) == ("torchshard.copy.default", "torchshard.all_gather.default")
    assert gathered.meta["gathered_again"]


def test_a_plan_says_what_is_sent_of_slices() -> None:
    """The planned bytes of gradient sums over dp equal those in a rank's graph."""
    made = _planned(HYBRID, PLAN)
    (over_dp, _) = made.program.priced(with_memory=False).across
    told = {c.value: c.backward.nbytes for c in over_dp.costs.collectives if c.name == "copy"}
    made = _planned(HYBRID, PLAN)
    (graph, *_) = made.rank_graphs()
    sent = {}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.torchshard.copy.default):
        if "/data1" in str(node.args[-1]):
            summed = node.args[0].meta["val"]
            sent[node.args[0].name] = 2 * (2 - 1) / 2 * summed.numel() * summed.itemsize  # a ring of two
    assert told == sent and told["blocks_0_q_weight"] == 4 * 16 * 8


class LossOfTokens(nn.Module):
    """A model with flat labels: PyTorch only knows that their number equals the number of tokens."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.tok, self.head, self.smoothing = nn.Embedding(32, 4), nn.Linear(4, 65536), smoothing

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.tok(ids)).view(-1, 65536)
        return nn.functional.cross_entropy(logits, labels.view(-1), label_smoothing=self.smoothing)


@nightly("0.1")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_over_split_classes_gathers_nothing_over_the_batch(smoothing: float) -> None:
    model, mesh, batch = LossOfTokens(smoothing).double(), {"dp": 2, "tp": 2}, _batch(2)
    plan = ts.plan(model, {"head": "column"}, mesh=mesh, example_inputs=_own(batch, 0))
    assert plan.parameters["head.weight"] == ts.S(0) and len(plan.axes) == 2
    assert not {c.name for c in plan.costs.collectives if c.value == "head"}
    assert {c.name for c in plan.axes[0].costs.collectives if c.type.startswith("f64")} == {"copy", "reduce"}
    assert ts.check(model, plan, mesh=mesh, example_inputs=batch).ok


class TargetsInside(LossOfTokens):
    """A model with labels in a buffer, which only fixes the product of batch size and length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("labels", torch.randint(0, 32, (32,)))

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, self.labels)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_targets_of_the_whole_batch_in_a_buffer(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, ids, plan = (
        TargetsInside().double(),
        torch.randint(0, 32, (4, 8)),
        {"head": "column"} if "tp" in mesh else {},
    )
    assert ts.check(model, plan, mesh=holding(mesh, {"dp": "replicate"}), example_inputs=(ids,)).ok


class Sine(nn.Module):
    """A sine between two split layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.mark.nightly
def test_operators_of_a_replacement_have_rules_over_the_next_axis() -> None:
    sine = torch.ops.aten.sin.default

    def rule(call: Call) -> Row:
        return call.row("... -> ...", local={"*": lambda ctx, x: (sine(x) * 2.0 - sine(x)) / 1.0}, any_size="*")

    model, mesh = nn.Sequential(nn.Linear(8, 16), Sine(), nn.Linear(16, 4)).double(), {"dp": 2, "tp": 2}
    x = torch.randn(8, 8).double()
    with changed_rule(sine, rule):
        plan = ts.plan(model, {"0": "column", "2": "row"}, mesh=mesh, example_inputs=(x[:4],))
        assert {c.name for c in plan.axes[0].costs.collectives} == {"copy"}
        assert ts.check(model, plan, mesh=mesh, example_inputs=(x,)).ok


def test_dropouts_gather_nothing_over_several_axes_of_the_batch() -> None:
    """Every rank draws the full batch's mask, and each batch axis in turn slices it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).double()
    mesh = {"dp": 2, "hosts": 2}
    plan = ts.plan(
        model, mesh=holding(mesh, dict.fromkeys(mesh, "replicate")), example_inputs=(torch.ones(8, 8).double(),)
    )
    assert len(plan.axes) == 3
    for of_axis in plan.across:
        assert {c.name for c in of_axis.costs.collectives} == {"copy"}


@pytest.mark.nightly
@pytest.mark.parametrize("data", [*WAYS, HYBRID], ids=str)
def test_a_missing_sum_over_any_axis_is_seen(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a `copy`, results stay exact, and some gradients miss the terms of other ranks."""
    made = _planned(data, PLAN)
    assert made.check().ok
    lockstep = sys.modules["torchshard.checking.lockstep"]
    rank_graphs = lockstep.rank_graphs
    (graph, *_) = made.rank_graphs()
    copies = [n for n in graph.graph.nodes if n.target is torch.ops.torchshard.copy.default]
    of_weights, of_values = ([n.name for n in copies if ("settled" in n.meta) is settled] for settled in (False, True))
    for name in (*of_weights[::15], of_values[0]):

        def without(*args: Any, name: str = name) -> list[fx.GraphModule]:
            found = rank_graphs(*args)
            for graph in found:
                (gone,) = (n for n in graph.graph.nodes if n.name == name)
                gone.replace_all_uses_with(gone.args[0])
                graph.graph.erase_node(gone)
            return found

        monkeypatch.setattr(lockstep, "rank_graphs", without)
        report = _planned(data, PLAN).check()
        assert {c.kind for c in report.comparisons if c.error > report.tolerance} == {"parameter gradient"}, name


@pytest.mark.nightly
def test_gradients_of_both_axes_are_sent_by_their_own_groups() -> None:
    made = _planned("replicate", PLAN | {"blocks.*.n?": "sequence"})  # norm gradients are summed over both
    (graph, *_) = made.rank_graphs()
    backward = step_graphs(graph).backward
    groups = {str(n.args[-1]).rpartition("/")[2] for n in backward.graph.nodes if begun(n)}
    assert groups == {"model at data 0", "data at model 0"}
    assert any(collective(n) and "settled" in n.meta for n in graph.graph.nodes)
