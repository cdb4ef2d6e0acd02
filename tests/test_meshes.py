"""Meshes: the ranks divide the weights over one axis, the batch over the others; steps are the unsharded model's."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import transformers
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import nightly, refused, refused_input
from tests.test_batches import CASES, KINDS, PART, WAYS, _batch, _model, _model_of, _own, _train_both
from tests.test_folders import _saved
from torchshard.testing import (
    Call,
    PlannedCall,
    Row,
    begun,
    capture,
    changed_rule,
    collective,
    gradient_error,
    largest,
    listing,
    on_ranks,
    rank_graph,
    run_ranks,
    step_graphs,
)

MESHES = [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}]
HYBRID = {"dp": "replicate", "fsdp": "shard"}
"""Slices of weights over one axis, held alike over another (HSDP)."""


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
    report = ts.check(model, "auto", mesh=mesh, data=data, example_inputs=args, example_kwargs=kwargs)
    assert report.ok and report.world_size == math.prod(mesh.values()), str(report)


class Pieces(nn.Module):
    """In a graph `split` has as many pieces as the batch gave it: the batch is one number, known to each axis of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).split(2)[0].softmax(0)


def test_a_batch_of_one_size_alone_is_divided_over_two_axes() -> None:
    report = ts.check(Pieces(), "auto", mesh={"dp": 2, "fsdp": 2}, data=HYBRID, example_inputs=(torch.randn(8, 6),))
    assert report.ok, str(report)


class Fixed(nn.Module):
    """Has a row for each sample of the whole batch."""

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
    sharded = ts.shard(copy.deepcopy(model), {}, mesh={"dp": 2, "tp": 1}, data="replicate")
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
    """The first dim of the positions is the sequence, of which the ranks of the one axis may have a part."""

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
    """Three heads over two ranks: after a mean over the batch each rank would choose another layout for its own."""

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
    report = ts.check(Uneven(), plan, mesh=MESHES[0], data=data, example_inputs=(torch.randn(4, 64),))
    assert report.ok, str(report)


class Bank(nn.Module):
    """Of rows beside the batch it is known that the ranks of the batch divide them, and nothing about the others."""

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
    report = ts.check(Bank(), "auto", mesh=MESHES[1], axes="sequence", example_inputs=call)
    assert report.ok, str(report)


def _planned(data: Any, plan: Any) -> PlannedCall:
    """For two ranks along each axis."""
    by_name = data if isinstance(data, dict) else {"dp": data}
    call = capture(_model(p=0.0), _batch(2 ** len(by_name)))
    return call.plan(plan, mesh=dict.fromkeys((*by_name, "tp"), 2), data=by_name)


PLAN = {"blocks.*.q": "column", "blocks.*.k": "column", "blocks.*.v": "column", "blocks.*.o": "row"}


def test_what_a_rank_holds_is_a_word() -> None:
    made = _planned("shard", PLAN)
    words = made.shardings
    assert words["blocks.0.q.weight"] == "model: S(0) . data: S(0)"  # of its rows of the weight a slice
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
    (copied,) = weight.users  # so that the sum over dp is of a slice, not of the whole
    (gathered,) = copied.users
    assert (str(copied.target), str(gathered.target)) == ("torchshard.copy.default", "torchshard.all_gather.default")
    assert gathered.meta["gathered_again"]


def test_a_plan_says_what_is_sent_of_slices() -> None:
    """Over dp slices of gradients are summed, as many bytes as the graph of a rank has."""
    made = _planned(HYBRID, PLAN)
    (over_dp, _) = made.program.priced(with_memory=False).over_batch
    told = {c.value: c.backward.nbytes for c in over_dp.costs.collectives if c.name == "copy"}
    made = _planned(HYBRID, PLAN)
    (graph, *_) = made.rank_graphs()
    sent = {}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.torchshard.copy.default):
        if "/data1" in str(node.args[-1]):
            summed = node.args[0].meta["val"]
            sent[node.args[0].name] = 2 * (2 - 1) / 2 * summed.numel() * summed.itemsize  # by a ring of two
    assert told == sent and told["blocks_0_q_weight"] == 4 * 16 * 8


class LossOfTokens(nn.Module):
    """Labels are as many as tokens in all, of which PyTorch knows no more than that."""

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
    assert plan.parameters["head.weight"] == ts.S(0) and plan.batch is not None
    assert not {c.name for c in plan.costs.collectives if c.value == "head"}
    assert {c.name for c in plan.batch.costs.collectives if c.type.startswith("f64")} == {"copy", "reduce"}
    assert ts.check(model, plan, mesh=mesh, example_inputs=batch).ok


class TargetsInside(LossOfTokens):
    """Which are a buffer, of as many as the tokens of the whole batch: only their product with the length is known."""

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
    assert ts.check(model, plan, mesh=mesh, data={"dp": "replicate"}, example_inputs=(ids,)).ok


class Sine(nn.Module):
    """Between a split layer and the next."""

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
        assert plan.batch is not None and {c.name for c in plan.batch.costs.collectives} == {"copy"}
        assert ts.check(model, plan, mesh=mesh, example_inputs=(x,)).ok


def test_dropouts_gather_nothing_over_several_axes_of_the_batch() -> None:
    """Each draws the mask of the whole batch; of what the first axis makes of that the second one takes its part."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).double()
    mesh = {"dp": 2, "hosts": 2}
    plan = ts.plan(model, mesh=mesh, data=dict.fromkeys(mesh, "replicate"), example_inputs=(torch.ones(8, 8).double(),))
    assert plan.batch is not None and plan.batch.batch is not None
    for of_axis in (plan.batch, plan.batch.batch):
        assert {c.name for c in of_axis.costs.collectives} == {"copy"}


@pytest.mark.nightly
@pytest.mark.parametrize("data", [*WAYS, HYBRID], ids=str)
def test_a_missing_sum_over_any_axis_is_seen(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a `copy` all results are exact, and some gradients are those of a part alone."""
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
    made = _planned("replicate", PLAN | {"blocks.*.n?": "sequence"})  # norms' gradients are summed over both
    (graph, *_) = made.rank_graphs()
    backward = step_graphs(graph).backward
    groups = {str(n.args[-1]).rpartition("/")[2] for n in backward.graph.nodes if begun(n)}
    assert groups == {"model at data 0", "data at model 0"}
    assert any(collective(n) and "settled" in n.meta for n in graph.graph.nodes)


# --- real ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [*WAYS, HYBRID], ids=str)
def test_sums_that_the_backward_waits_for_are_hidden_behind_products(data: Any) -> None:
    """Those of values' gradients, over the weights' axis: weights' gradients are computed meanwhile, and sent after."""
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)]
    mesh = {"fsdp": 2, "dp": 2, "tp": 2} if data is HYBRID else MESHES[0]
    x = torch.randn(4, 8, requires_grad=True)
    plan = ts.plan(nn.Sequential(*blocks), {"*.1": "column", "*.3": "row"}, mesh=mesh, data=data, example_inputs=(x,))
    nodes = [*step_graphs(rank_graph(plan)).backward.graph.nodes]
    groups = {node: str(node.args[-1]) for node in nodes if begun(node)}
    awaited = [node for node, group in groups.items() if group.startswith("model")]
    for begin in awaited:
        (waiting,) = begin.users
        behind = nodes[nodes.index(begin) : nodes.index(waiting)]
        assert sum(node.target is torch.ops.aten.mm.default for node in behind) >= 2, behind
    assert len(awaited) == 3 and len(set(groups.values())) == len(mesh)


def _trained(rank: int, mesh: dict[str, int], data: Any, kinds: tuple[str, ...], folder: str) -> dict[str, float]:
    """The worst differences of parameters after steps of AdamW, on whole batches and on parts of them."""
    dp = math.prod(mesh[axis] for axis in data)
    tp = math.prod(mesh.values()) // dp
    worst, part = {}, rank // tp
    first, thorough = _own(_batch(dp), part), len(kinds) > 1
    for kind in kinds:
        model = _model_of(kind)
        torch.manual_seed(1)
        sharded = ts.shard(copy.deepcopy(model), "auto", first, mesh=mesh, data=data)
        assert (tsd.get_group_size(), tsd.get_data_parallel_size(), tsd.get_data_parallel_rank()) == (tp, dp, part)
        assert any(layout != ts.I for layout in sharded.layouts.values()) is (tp > 1)
        worst[kind], trained = _train_both(kind, model, sharded, dp, part, (12, 12, 24))
    if thorough:
        torch.manual_seed(1)
        again = copy.deepcopy(sharded)(*first)[0]
        torch.manual_seed(1)
        worst["copied"] = abs(again - sharded(*first)[0]).item()
    whole, slices = sharded.full_state_dict(), sharded.state_dict()
    ts.save(folder, sharded, trained)
    batch = _batch(dp, 12)

    def stepped(model: ts.ShardedModule, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The parameters after another step, of the same mask of dropout."""
        torch.manual_seed(4)
        model(*_own(batch, part))[0].backward()
        optimizer.step()
        return model.full_state_dict()

    after, ways = [], WAYS if thorough else ()
    for into in (*({**dict.fromkeys(data, way)} for way in ways), data):
        other = ts.shard(_model_of(kind), "auto", first, mesh=mesh, data=into)
        optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
        ts.load(folder, other, optimizer)
        worst[f"loaded, {into}"] = _worst(other.full_state_dict(), whole)
        after.append(stepped(other, optimizer))
        if into == data:
            other.load_state_dict(slices)
            worst["slices"] = _worst(other.full_state_dict(), whole)
    expected = stepped(sharded, trained)
    worst["steps after loading"] = largest(*(_worst(found, expected) for found in after))
    sharded.load_full_state_dict(whole)
    worst["whole"] = _worst(sharded.full_state_dict(), whole)
    return worst


def _clipped(rank: int, data: Any) -> list[float]:
    """Norms of the whole gradient by ts and by PyTorch, of slices over either axis and over both; and the expected.

    Beside the model of two axes is one without the axis of the batch, whose parameters come first or last.
    """
    model, batch, x = _model(p=0.0), _batch(2), torch.randn(3, 6, dtype=torch.float64)
    other, own = nn.Linear(6, 4).double(), _own(batch, rank // 2)
    sharded = ts.shard(copy.deepcopy(model), PLAN, own, mesh={"dp": 2, "tp": 2}, data=data)
    beside = ts.shard(copy.deepcopy(other), {"": "column"}, (x,))
    found = list[float]()
    for order, turn in itertools.product((1.0, 2.0, math.inf), (1, -1)):
        both: list[list[nn.Module]] = [[sharded, beside][::turn], [model, other][::turn]]
        for each, inputs in ((sharded, own), (model, batch), (beside, (x,)), (other, (x,))):
            each.zero_grad()
            result = each(*inputs)
            (result[0] if isinstance(result, tuple) else result.square().sum()).backward()
        ours, theirs = ([p for each in models for p in each.parameters()] for models in both)
        found += [torch.nn.utils.get_total_norm([p.grad for p in ours], order).item()]
        found += [ts.clip_grad_norm_(ours, 0.1, order).item()]
        found += [torch.nn.utils.clip_grad_norm_(theirs, 0.1, order).item()] * 2
        clipped = (torch.nn.utils.get_total_norm([p.grad for p in each], order).item() for each in (ours, theirs))
        found += [norm for norm in clipped for _ in range(2)]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("data", [pytest.param("replicate", marks=pytest.mark.nightly), "shard"])
def test_gradients_are_clipped_by_the_norm_of_the_whole(data: Any) -> None:
    for found in run_ranks(_clipped, 4, data):
        for norm, ours, *expected in zip(*[iter(found)] * 4, strict=True):
            assert [norm, ours] == pytest.approx(expected, rel=1e-12), found


def _beside(rank: int) -> dict[str, Any]:
    """Two models on two meshes of as many ranks; and one without a mesh, after the groups were made for another."""
    own, found = _own(_batch(4), rank), dict[str, Any]()
    expected = _model(p=0.0)
    for wrong, told in (({"dp": 3, "tp": 2}, "3 x 2 has 6 ranks"), ({"dp": 2, "tp": 2}, "group_size=2"), (None, "=-1")):
        mesh: dict[str, int] | None = wrong if rank == 2 else {"dp": 4, "tp": 1}  # before there are groups
        found[f"{wrong} on one rank"] = refused(lambda m=mesh: ts.shard(_model(p=0.0), {}, own, mesh=m), told)
        found[f"{wrong} leaves nothing"] = not tsd.is_initialized()
    models = [
        ts.shard(_model(p=0.0), {}, own, mesh={"dp": 2, "fsdp": 2}, data=HYBRID),
        ts.shard(_model(p=0.0), {}, own, mesh={"dp": 4, "tp": 1}, data="shard"),
    ]
    for model in models:
        model(*own)[0].backward()
    expected(*_batch(4))[0].backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in expected.parameters()]) * math.sqrt(2)
    for turn in (1, -1):
        parameters = [p for model in models[::turn] for p in model.parameters()]
        found[f"norm {turn}"] = abs(torch.nn.utils.get_total_norm([p.grad for p in parameters]) - norm).item()
        found[f"clipped {turn}"] = abs(ts.clip_grad_norm_(parameters, 1e9) - norm).item()
    told = 'mesh={"dp": 4, "tp": 1}; or destroy_process_group()'
    found["another"] = refused(lambda: ts.shard(_model(), {}, own, mesh={"x": 4}), told, ts.DistributedError)
    told = "the ranks divide the batch, and no mesh says which ranks"
    found["no mesh"] = refused(lambda: ts.shard(_model(), {}, own, data="replicate"), told)
    one: dict[str, Any] = {"mesh": {"dp": 4, "tp": 1}, "data": "shard"} if rank else {}
    differs = "the ranks have different meshes"
    found["no mesh on one rank"] = refused(lambda: ts.shard(_model(), {}, own, **one), differs, ts.DistributedError)
    return found


@pytest.mark.nightly
def test_models_on_other_meshes_of_the_same_ranks() -> None:
    for found in run_ranks(_beside, 4):
        assert all(value if isinstance(value, bool) else value < 1e-9 for value in found.values()), found


def _of_one(rank: int) -> dict[str, Any]:
    """A mesh whose second axis has one rank, beside a world of one axis."""
    model, own, found = _model(p=0.0), _own(_batch(2), rank), dict[str, Any]()
    expected = copy.deepcopy(model)
    expected(*_batch(2))[0].backward()
    ts.distributed.init_process_group(1)
    for way in WAYS:
        sharded = ts.shard(copy.deepcopy(model), PLAN, own, mesh={"dp": 2, "tp": 1}, data=way)
        for _ in range(2):
            sharded.zero_grad()
            sharded(*own)[0].backward()
        found[way] = gradient_error(sharded, expected)
        differs = lambda: sharded(own[0].to("meta"), own[1]) if rank else sharded(*own)  # noqa: B023, E731
        found[f"{way}, differs"] = refused_input(differs, "different arguments")
    slices = sharded.state_dict()
    ts.distributed.destroy_process_group()
    of_one_axis = ts.shard(copy.deepcopy(model), {}, own, data="shard")
    of_one_axis.load_state_dict(slices)
    found["of one axis"] = _worst(of_one_axis.full_state_dict(), model.state_dict())
    told = refused(lambda: ts.shard(_model(), {}, own, data=WAYS[rank]), "shard this model together")
    return found | {"told": told}


@pytest.mark.nightly
def test_an_axis_of_one_rank() -> None:
    for found in run_ranks(_of_one, 2):
        assert all(value if isinstance(value, bool) else value < 1e-10 for value in found.values()), found


def _read(rank: int, folder: str) -> dict[str, Any]:
    """A model of a folder on a mesh: its values, the bytes that were read, a step, and the folder that it writes."""
    part, ids = rank // 2, torch.arange(64).reshape(4, 16) % 50
    call = {"input_ids": ids.chunk(2)[part], "use_cache": False}
    expected: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    sharded: Any = ts.from_pretrained(
        folder, "auto", example_kwargs=call, dtype="float64", mesh={"dp": 2, "tp": 2}, data="shard"
    )
    found: dict[str, Any] = {"read": _worst(sharded.full_state_dict(), expected.state_dict())}
    for model, inputs in ((sharded, call["input_ids"]), (expected, ids)):
        model(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.AdamW(model.parameters(), 1e-2).step()
    found["trained"] = _worst(sharded.full_state_dict(), expected.state_dict())
    ts.save_pretrained(sharded, f"{folder} trained")
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder} trained", dtype="float64")
    found["written"] = _worst(again.state_dict(), expected.state_dict())
    torch.distributed.checkpoint.save({"model": sharded.state_dict()}, checkpoint_id=f"{folder} by DCP")
    loaded = {"model": {name: torch.zeros_like(t) for name, t in expected.state_dict().items()}}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=f"{folder} by DCP")
    found["by DCP"] = _worst(loaded["model"], expected.state_dict())
    held, all_ = (sum(p.numel() for p in model.parameters()) for model in (sharded, expected))
    return found | {"bytes": sharded.weights.read.bytes_read / held / 4, "share": held / all_}  # of files in float32


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "bound"),
    [("tied", 1e-9), pytest.param("phi3", 1e-6, marks=pytest.mark.nightly)],  # phi3's norms compute in float32
)
def test_a_folder_is_read_and_written_in_slices_of_slices(kind: str, bound: float, tmp_path: Path) -> None:
    _saved(kind, tmp_path / "model")
    for found in run_ranks(_read, 4, str(tmp_path / "model"), seconds=300):
        assert found["read"] == 0
        assert largest(*(found[name] for name in ("trained", "written", "by DCP"))) < bound, found
        assert found["bytes"] == 1 and found["share"] < 0.35, found


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return largest(*((found[name] - expected[name]).abs().max().item() for name in expected))


SIZES = ((2, 2), (2, 3), (3, 2))


@nightly("hsdp")
@pytest.mark.parametrize(
    ("mesh", "data", "kinds"),
    [
        pytest.param({"dp": 2, "tp": 2}, {"dp": "shard"}, ("outside",), id="quick"),
        pytest.param({"dp": 2, "fsdp": 2}, HYBRID, ("outside",), id="hsdp"),
        pytest.param({"dp": 2, "fsdp": 2, "tp": 2}, HYBRID, KINDS, marks=pytest.mark.nightly, id="hsdp and tp"),
        *(
            pytest.param({"dp": dp, "tp": tp}, {"dp": way}, KINDS, marks=pytest.mark.nightly, id=f"{dp}x{tp}-{way}")
            for dp, tp in SIZES
            for way in WAYS
        ),
    ],
)
def test_training_is_that_on_the_whole_batch(
    mesh: dict[str, int], data: Any, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    for worst in run_ranks(_trained, math.prod(mesh.values()), mesh, data, kinds, str(tmp_path / "saved"), seconds=900):
        assert largest(*worst.values()) < 1e-9, worst


def _wrong(rank: int, way: Any) -> dict[str, bool]:
    """What each rank is told where one does something else; the mesh is PyTorch's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, model, batch = mesh.get_local_rank("dp"), _model(p=0.0), _batch(2)
    own = _own(batch, data)
    sharded = ts.shard(copy.deepcopy(model), PLAN, own, mesh=mesh, data={"dp": way})
    assert (tsd.get_group_size(), tsd.get_data_parallel_rank()) == (2, data)
    by_rank = tuple(t[rank : rank + 2] for t in batch)
    found = {}
    for turn in range(2):  # before the graphs of the backward, and with them
        sharded(*own)[0].backward()
        told = {
            # the commonest mistake: each rank another part, as a sampler for all ranks gives it
            "parts within a group": refused_input(lambda: sharded(*by_rank), "called with "),
            "sizes of parts": refused_input(lambda: sharded(*(t[: PART - data] for t in own)), "different arguments"),
            "no part on one rank": refused_input(
                lambda: sharded(*own) if rank else sharded(own[0].to("meta"), own[1]), "different arguments"
            ),
        }
        found |= {f"{name}, turn {turn}": each for name, each in told.items()}
    loss = sharded(*own)[0] * (1 + data)  # another loss on each part
    loss.backward()
    found["losses that differ"] = refused(lambda: sharded(*own), "the ranks' losses differ", ts.DistributedError)
    over_data = tsd.get_data_parallel_group()
    slice_ = sharded.blocks[0].q.weight
    if way == "shard":
        told_of = "would treat the ranks of one sharded model as copies of it"
        sent = lambda: torch.distributed.broadcast(slice_, rank % 2, group=over_data)  # noqa: E731
        found["a broadcast of slices"] = refused(sent, told_of, ts.DistributedError)
        with torch.no_grad():
            torch.distributed.broadcast(slice_.detach().as_subclass(Tensor), rank % 2, group=over_data)
    elif rank == 3:
        with torch.no_grad():
            slice_.add_(1.0)
    name, told_of = f"a slice that differs, {way}", "drifted apart" if way == "replicate" else "hold the same slice"
    for _ in range(40):
        found[name] = refused(lambda: sharded(*own), told_of if rank % 2 else "", ts.DistributedError)
        if found[name]:
            break
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    shard = lambda: ts.shard(_model(), PLAN, own, mesh=turned)  # noqa: E731
    found["a mesh of other groups"] = refused(shard, "has other ranks along 'tp' than the groups", ts.DistributedError)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["replicate", pytest.param("shard", marks=pytest.mark.nightly)])
def test_ranks_that_differ_are_told_on_every_rank(way: Any) -> None:
    for found in run_ranks(_wrong, 4, way, seconds=300):
        assert all(found.values()), found


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "data", "told"),
    [
        ({"dp": 2, "tp": 4}, None, "a mesh of 2 x 4 has 8 ranks, and there are 4"),
        ({"dp": 2, "tp": 2}, {"dq": "shard"}, "the mesh has no axis 'dq'"),
        ({"pp": 2, "dp": 2, "tp": 1}, {"dp": "shard"}, "one axis for the weights; in this mesh pp, tp do not divide"),
        ({"d p": 2, "tp": 2}, None, "'d p' is no name of an axis"),
        ({"tp": 2, "dp": 2}, {"dp": "shard"}, "consecutive ranks divide the batch"),
        ({"tp": 2, "dp": 2}, None, "over 'dp', the last axis, the weights would be divided, and not the batch"),
        ({"dp_replicate": 2, "dp_shard": 2}, "shard", "over 'dp_shard', the last axis"),
        ({"data": 4}, None, "over 'data', the last axis"),
        ({"dp": 2.0, "tp": 2}, None, "the mesh has 2.0 ranks along 'dp'"),
        ({}, None, "a mesh without axes has no ranks"),
        (7, None, "a int is no mesh whose axes have names"),
        (None, {"dp": "shard"}, "there is no mesh whose axes it could name"),
        ({"dp": 2, "tp": 2}, "slices", "'slices' is no way to divide data"),
        ({"dp": 2, "tp": 2}, {"dp": "slices"}, "'slices' is no way to divide data"),
    ],
)
def test_meshes_that_are_none_are_refused(mesh: Any, data: Any, told: str) -> None:
    with pytest.raises(ts.InputError, match=told):
        ts.plan(nn.Linear(4, 4), world_size=4, mesh=mesh, data=data, example_inputs=(torch.ones(4, 4),))


@pytest.mark.nightly
def test_a_plan_is_that_of_the_axis_of_the_weights() -> None:
    model, batch, mesh = _model(p=0.0), _batch(2), {"dp": 2, "tp": 2}
    part = _own(batch, 0)
    plan = ts.plan(model, "auto", mesh=mesh, example_inputs=part)
    alone = ts.plan(model, "auto", world_size=2, example_inputs=part)
    assert plan.world_size == 2 and plan.parameters == alone.parameters and plan.choices == alone.choices
    told, of_one = (ts.explain(each).partition("\nmodule ")[2] for each in (plan, alone))
    told, _, over_dp = told.partition("\n\nover dp, 2 parts of the batch (replicate): ")
    assert " ".join(told.split()).replace("step, over tp;", "step;") == " ".join(of_one.split())
    assert "without it:" in told and over_dp  # for one part of the batch, too
    report = ts.check(model, ts.Plan.from_json(alone.to_json()), mesh=mesh, example_inputs=batch)
    assert report.ok and report.world_size == 4
    of_batch = ts.plan(model, {}, world_size=2, example_inputs=part, data="replicate")
    with pytest.raises(ts.PlanError, match="the plan divides something else than it is asked for"):
        ts.check(model, of_batch, mesh=mesh, example_inputs=batch)


@pytest.mark.nightly
@pytest.mark.parametrize("data", [pytest.param("replicate", marks=pytest.mark.nightly), "shard"])
def test_a_plan_has_what_dividing_the_batch_costs(data: Any) -> None:
    made, part = _planned(data, PLAN), _own(_batch(2), 0)
    model = made.model
    plan = ts.plan(model, PLAN, mesh=MESHES[0], data=data, example_inputs=part, memory="1GiB")
    batch = plan.batch
    assert batch is not None and batch.world_size == 2 and batch.data == data
    state = dataclasses.replace(made, program=dataclasses.replace(made.program, plan=plan)).state(0)
    local = {name: state[name] for name in plan.parameters}
    assert batch.costs.memory["parameters"] == sum(t.numel() * t.itemsize for t in local.values())
    gradients = sum(p.numel() * p.itemsize for p in map(local.__getitem__, dict(model.named_parameters())))
    assert batch.costs.memory["gradients"] == gradients
    assert plan.parameter_bytes()[1] == batch.costs.memory["parameters"] and str(plan).startswith(
        "plan for 2 × 2 ranks"
    )
    # all-reduces of gradients, or gathers of weights (again in backward) and sums of slices, are what is sent
    kinds = {sent.kernel for c in batch.costs.collectives for sent in c.sent}
    assert ("reduce_scatter" in kinds) is (data == "shard")
    assert ts.Plan.from_json(plan.to_json()).batch == batch


@pytest.mark.nightly
def test_a_graph_that_a_rank_has_localized_is_planned_as_before() -> None:
    """What was learnt meanwhile of its sizes, that they are a number of parts, changes nothing."""
    made = _planned("shard", PLAN)
    before = made.program.priced(with_memory=False)
    local = [made.program.local_graph_of(number) for number in range(4)]
    after = made.program.priced(with_memory=False)
    assert after == before and after.over_batch == before.over_batch
    assert any(choice.axes for choice in after.over_batch[0].choices.values())
    assert [listing(made.program.local_graph_of(number)) for number in range(4)] == list(map(listing, local))


@pytest.mark.nightly
def test_a_gathered_table_that_two_parts_of_a_step_share() -> None:
    """The backward of the one keeps it, for there it is an argument, which can't be gathered again."""
    config = transformers.GPT2Config(
        n_embd=240, n_layer=1, n_head=6, vocab_size=501, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model, ids = transformers.GPT2LMHeadModel(config).double(), torch.randint(0, 501, (8, 32))
    options: dict[str, Any] = {
        "mesh": MESHES[0],
        "data": "shard",
        "machine": "h100x8",
        "example_kwargs": {"labels": ids},
    }
    assert ts.plan(model, "auto", **options, example_inputs=(ids,)).batch
    ts.check(model, "auto", **options, example_inputs=(ids,)).raise_on_error()


def test_rings_of_ranks_that_lie_apart_share_the_network() -> None:
    host = ts.MACHINES["h100x8"]
    assert host.across(1) == host and host.across(2).link(4) == host.link(4) and host.across(4).domain == 2
    assert host.across(4).link(2) == host.link(8) and host.across(8).link(2)[0] == host.network_bandwidth / 8
    assert host.across(16).link(2) == host.across(8).link(2) == host.across(8).link(64)


@nightly("shard_grad_op")
@pytest.mark.parametrize("data", [pytest.param("shard", marks=pytest.mark.nightly), "shard_grad_op", "replicate"])
def test_a_limit_of_memory_counts_what_all_axes_divide(data: Any) -> None:
    """The axis of the weights is planned first, and its plan has to fit with slices that later axes make."""
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        vocab_size=256,
    )
    with torch.device("meta"):
        model, ids = transformers.LlamaForCausalLM(config), torch.zeros(4, 32, dtype=torch.long)
    call: dict[str, Any] = {"example_kwargs": {"input_ids": ids, "labels": ids, "use_cache": False}}
    mesh = {"dp": 4, "tp": 2}
    plan = ts.plan(model, {}, mesh=mesh, data=data, memory="1GiB", **call)
    assert plan.batch is not None
    first, made = plan.costs.memory, plan.batch.costs.memory
    for kind in ("parameters", "gradients", "optimizer"):
        assert abs(first[kind] / made[kind] - 1) < 1e-3, (kind, first, made)
    assert abs(first["peak"] / made["peak"] - 1) < 0.1, (first, made)
    if data == "shard":
        limit = 1.9 * sum(p.numel() * p.itemsize for p in model.parameters())  # of weights, gradients and moments
        with pytest.raises(ts.PlanError, match="no plan for 2 ranks fits"):
            ts.plan(model, {}, world_size=2, memory=limit, **call)
        assert ts.plan(model, {}, mesh=mesh, data=data, memory=limit, **call).costs.memory["peak"] <= limit
