"""Meshes on real ranks: training matches the full batch, and ranks that diverge raise."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import holding, nightly, refused, refused_input
from tests.test_batches import KINDS, PART, WAYS, _batch, _model, _model_of, _own, _train_both
from tests.test_folder_models import _saved
from tests.test_meshes import HYBRID, MESHES, PLAN
from torchshard.testing import (
    begun,
    gradient_error,
    largest,
    rank_graph,
    run_ranks,
    step_graphs,
)

# --- real ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [*WAYS, HYBRID], ids=str)
def test_sums_that_the_backward_waits_for_are_hidden_behind_products(data: Any) -> None:
    """All-reduces of activation gradients overlap with matmuls of weight gradients, whose sums are sent later."""
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)]
    mesh = {"fsdp": 2, "dp": 2, "tp": 2} if data is HYBRID else MESHES[0]
    x = torch.randn(4, 8, requires_grad=True)
    plan = ts.plan(
        nn.Sequential(*blocks), {"*.1": "column", "*.3": "row"}, mesh=holding(mesh, data), example_inputs=(x,)
    )
    nodes = [*step_graphs(rank_graph(plan)).backward.graph.nodes]
    groups = {node: str(node.args[-1]) for node in nodes if begun(node)}
    awaited = [node for node, group in groups.items() if group.rpartition("/")[2] == "model"]
    for begin in awaited:
        (waiting,) = begin.users
        behind = nodes[nodes.index(begin) : nodes.index(waiting)]
        assert sum(node.target is torch.ops.aten.mm.default for node in behind) >= 2, behind
    assert len(awaited) == 3 and len(set(groups.values())) == len(mesh)


def _trained(rank: int, mesh: dict[str, int], data: Any, kinds: tuple[str, ...], folder: str) -> dict[str, float]:
    """Returns the largest differences from unsharded training, and after copying, saving and loading."""
    dp = math.prod(mesh[axis] for axis in data)
    tp = math.prod(mesh.values()) // dp
    worst, part = {}, rank // tp
    first, thorough = _own(_batch(dp), part), len(kinds) > 1
    for kind in kinds:
        model = _model_of(kind)
        torch.manual_seed(1)
        sharded = ts.shard(copy.deepcopy(model), "auto", first, mesh=holding(mesh, data))
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
        """Returns the parameters after another step with a fixed dropout mask."""
        torch.manual_seed(4)
        model(*_own(batch, part))[0].backward()
        optimizer.step()
        return model.full_state_dict()

    after, ways = [], WAYS if thorough else ()
    for into in (*({**dict.fromkeys(data, way)} for way in ways), data):
        other = ts.shard(_model_of(kind), "auto", first, mesh=holding(mesh, into))
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
    """Returns gradient norms by PyTorch and by ts, of slices over either axis and over both, and the expected norms.

    A second model has no batch axis; its parameters come first or last.
    """
    model, batch, x = _model(p=0.0), _batch(2), torch.randn(3, 6, dtype=torch.float64)
    other, own = nn.Linear(6, 4).double(), _own(batch, rank // 2)
    sharded = ts.shard(copy.deepcopy(model), PLAN, own, mesh={"dp": (2, data), "tp": 2})
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
    """Uses two models on different meshes of the same ranks, and meshes that must be refused."""
    own, found = _own(_batch(4), rank), dict[str, Any]()
    expected = _model(p=0.0)
    for wrong, told in (({"dp": 3, "tp": 2}, "3 x 2 has 6 ranks"), ({"dp": 2, "tp": 2}, "group_size=2"), (None, "=-1")):
        mesh: dict[str, int] | None = wrong if rank == 2 else {"dp": 4, "tp": 1}  # before groups exist
        found[f"{wrong} on one rank"] = refused(lambda m=mesh: ts.shard(_model(p=0.0), {}, own, mesh=m), told)
        found[f"{wrong} leaves nothing"] = not tsd.is_initialized()
    models = [
        ts.shard(_model(p=0.0), {}, own, mesh=holding({"dp": 2, "fsdp": 2}, HYBRID)),
        ts.shard(_model(p=0.0), {}, own, mesh={"dp": (4, "shard"), "tp": 1}),
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
    found["no mesh"] = refused(lambda: ts.shard(_model(), {}, own, mesh="replicate"), told)
    one: Any = {"dp": (4, "shard"), "tp": 1} if rank else None
    differs = "the ranks have different meshes"
    found["no mesh on one rank"] = refused(lambda: ts.shard(_model(), {}, own, mesh=one), differs, ts.DistributedError)
    return found


@pytest.mark.nightly
def test_models_on_other_meshes_of_the_same_ranks() -> None:
    for found in run_ranks(_beside, 4):
        assert all(value if isinstance(value, bool) else value < 1e-9 for value in found.values()), found


def _of_one(rank: int) -> dict[str, Any]:
    """Compares a mesh with a second axis of one rank with a mesh of one axis."""
    model, own, found = _model(p=0.0), _own(_batch(2), rank), dict[str, Any]()
    expected = copy.deepcopy(model)
    expected(*_batch(2))[0].backward()
    ts.distributed.init_process_group(1)
    for way in WAYS:
        sharded = ts.shard(copy.deepcopy(model), PLAN, own, mesh={"dp": (2, way), "tp": 1})
        for _ in range(2):
            sharded.zero_grad()
            sharded(*own)[0].backward()
        found[way] = gradient_error(sharded, expected)
        differs = lambda: sharded(own[0].to("meta"), own[1]) if rank else sharded(*own)  # noqa: B023, E731
        found[f"{way}, differs"] = refused_input(differs, "different arguments")
    slices = sharded.state_dict()
    ts.distributed.destroy_process_group()
    of_one_axis = ts.shard(copy.deepcopy(model), {}, own, mesh="shard")
    of_one_axis.load_state_dict(slices)
    found["of one axis"] = _worst(of_one_axis.full_state_dict(), model.state_dict())
    told = refused(lambda: ts.shard(_model(), {}, own, mesh=WAYS[rank]), "shard this model together")
    return found | {"told": told}


@pytest.mark.nightly
def test_an_axis_of_one_rank() -> None:
    for found in run_ranks(_of_one, 2):
        assert all(value if isinstance(value, bool) else value < 1e-10 for value in found.values()), found


def _read(rank: int, folder: str) -> dict[str, Any]:
    """Loads a folder onto a mesh, trains a step and saves; returns the errors and the bytes read."""
    part, ids = rank // 2, torch.arange(64).reshape(4, 16) % 50
    call = {"input_ids": ids.chunk(2)[part], "use_cache": False}
    expected: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    sharded: Any = ts.from_pretrained(
        folder, "auto", example_kwargs=call, mesh={"dp": (2, "shard"), "tp": 2}, dtype="float64"
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
    return found | {"bytes": sharded.weights.read.bytes_read / held / 4, "share": held / all_}  # the files are float32


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
    """Returns whether every rank raises if one diverges, on PyTorch's `DeviceMesh`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, model, batch = mesh.get_local_rank("dp"), _model(p=0.0), _batch(2)
    own = _own(batch, data)
    sharded = ts.shard(copy.deepcopy(model), PLAN, own, mesh=(mesh, {"dp": way}))
    assert (tsd.get_group_size(), tsd.get_data_parallel_rank()) == (2, data)
    by_rank = tuple(t[rank : rank + 2] for t in batch)
    found = {}
    for turn in range(2):  # without step graphs, and with them
        sharded(*own)[0].backward()
        told = {
            # the most common mistake: each rank has a different shard, from a sampler over all ranks
            "parts within a group": refused_input(lambda: sharded(*by_rank), "called with "),
            "sizes of parts": refused_input(lambda: sharded(*(t[: PART - data] for t in own)), "different arguments"),
            "no part on one rank": refused_input(
                lambda: sharded(*own) if rank else sharded(own[0].to("meta"), own[1]), "different arguments"
            ),
        }
        found |= {f"{name}, turn {turn}": each for name, each in told.items()}
    loss = sharded(*own)[0] * (1 + data)  # a different loss for each shard
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
