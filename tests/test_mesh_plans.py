"""Tests of rejected meshes, and of the costs of mesh plans."""

from __future__ import annotations

import ast
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import transformers
from torch import nn

import torchshard as ts
from tests.helpers import holding, nightly
from tests.test_batches import _batch, _model, _own
from tests.test_meshes import MESHES, PLAN, _planned
from torchshard.testing import (
    listing,
)

# --- rejected meshes --------------------------------------------------------------------------------------------------

GROUPS = SimpleNamespace(mesh_dim_names=("dp", "tp"), shape=(2, 2))
"""The attributes of a `DeviceMesh` that are read for a plan."""
HYBRID_GROUPS = SimpleNamespace(mesh_dim_names=("dp_replicate", "dp_shard"), shape=(2, 2))


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ((GROUPS, {"dq": "shard"}), "the mesh has no axis 'dq'"),
        ({"pp": 2, "dp": (2, "shard"), "tp": 1}, "one axis for the weights; in this mesh pp, tp do not divide"),
        ({"d p": 2, "tp": 2}, "'d p' is no name of an axis"),
        ({"tp": 2, "dp": (2, "shard")}, "consecutive ranks divide the batch"),
        ({"tp": 2, "dp": 2}, "over 'dp', the last axis, the weights would be divided, and not the batch"),
        ({"dp_replicate": (2, "shard"), "dp_shard": 2}, "over 'dp_shard', the last axis"),
        ((HYBRID_GROUPS, "shard"), "over 'dp_shard', the last axis"),
        ({"data": 4}, "over 'data', the last axis"),
        ({"dp": 2.0, "tp": 2}, "the mesh has 2.0 ranks along 'dp'"),
        ({}, "a mesh without axes has no ranks"),
        (7.0, "a float is no mesh whose axes have names"),
        ((None, {"dp": "shard"}), "a NoneType is no mesh whose axes have names"),
        (None, "the number of ranks is missing"),
        ("shard", "the number of ranks is missing"),
        (0, "0 is no number of ranks"),
        ("slices", "'slices' is no use of a mesh's axis"),
        ({"dp": (2, "slices"), "tp": 2}, "'slices' is no use of a mesh's axis"),
        ((GROUPS, "slices"), "'slices' is no use of a mesh's axis"),
        ((GROUPS, {"dp": "slices"}), "'slices' is no use of a mesh's axis"),
    ],
)
def test_meshes_that_are_none_are_refused(mesh: Any, told: str) -> None:
    with pytest.raises(ts.InputError, match=told):
        ts.plan(nn.Linear(4, 4), mesh=mesh, example_inputs=(torch.ones(4, 4),))


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 4}, {"dp": (2, "shard"), "tp": 4}])
def test_a_mesh_of_another_number_of_ranks_is_refused(mesh: Any) -> None:
    with pytest.raises(ts.InputError, match="a mesh of 2 x 4 has 8 ranks, and there are 1"):
        ts.shard(nn.Linear(4, 4), {}, mesh=mesh)


@pytest.mark.parametrize(
    "mesh", [{"tp": 2, "dp": 2}, {"pp": 2, "dp": (2, "shard"), "tp": 2}, {"tp": 2, "fsdp": (2, "shard")}], ids=str
)
def test_a_refused_mesh_is_accepted_as_the_error_writes_it(mesh: Any) -> None:
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    with pytest.raises(ts.InputError) as caught:
        ts.plan(model, mesh=mesh, example_inputs=(x,))
    advised = ast.literal_eval(str(caught.value).rpartition("mesh=")[2])
    assert ts.plan(model, mesh=advised, example_inputs=(x,)).across


@pytest.mark.nightly
def test_a_plan_is_that_of_the_axis_of_the_weights() -> None:
    model, batch, mesh = _model(p=0.0), _batch(2), {"dp": 2, "tp": 2}
    part = _own(batch, 0)
    plan = ts.plan(model, "auto", mesh=mesh, example_inputs=part)
    alone = ts.plan(model, "auto", example_inputs=part, mesh=2)
    assert plan.world_size == 2 and plan.parameters == alone.parameters and plan.choices == alone.choices
    told, of_one = (ts.explain(each).partition("\nmodule ")[2] for each in (plan, alone))
    told, _, over_dp = told.partition("\n\nover dp, 2 parts of the batch (replicate): ")
    assert " ".join(told.split()).replace("step, over tp;", "step;") == " ".join(of_one.split())
    assert "without it:" in told and over_dp  # a mesh plan gives costs of alternatives, too
    report = ts.check(model, ts.Plan.from_json(alone.to_json()), mesh=mesh, example_inputs=batch)
    assert report.ok and report.world_size == 4
    of_batch = ts.plan(model, {}, example_inputs=part, mesh={"dp": (2, "replicate")})
    with pytest.raises(ts.PlanError, match="the plan divides something else than it is asked for"):
        ts.check(model, of_batch, mesh=mesh, example_inputs=batch)


@pytest.mark.nightly
@pytest.mark.parametrize("data", [pytest.param("replicate", marks=pytest.mark.nightly), "shard"])
def test_a_plan_has_what_dividing_the_batch_costs(data: Any) -> None:
    made, part = _planned(data, PLAN), _own(_batch(2), 0)
    model = made.model
    plan = ts.plan(model, PLAN, example_inputs=part, mesh=holding(MESHES[0], data), objective={"memory": "1GiB"})
    batch = plan.axes[0]
    assert batch is not None and batch.world_size == 2 and batch.data == data
    state = dataclasses.replace(made, program=dataclasses.replace(made.program, plan=plan)).state(0)
    local = {name: state[name] for name in plan.parameters}
    assert batch.costs.memory["parameters"] == sum(t.numel() * t.itemsize for t in local.values())
    gradients = sum(p.numel() * p.itemsize for p in map(local.__getitem__, dict(model.named_parameters())))
    assert batch.costs.memory["gradients"] == gradients
    assert plan.parameter_bytes()[1] == batch.costs.memory["parameters"] and str(plan).startswith(
        "plan for 2 × 2 ranks"
    )
    # The ranks send all-reduces of gradients, or gathers of weights (again in backward) and reduce-scatters.
    kinds = {sent.kernel for c in batch.costs.collectives for sent in c.sent}
    assert ("reduce_scatter" in kinds) is (data == "shard")
    assert ts.Plan.from_json(plan.to_json()).axes[0] == batch


@pytest.mark.nightly
def test_a_graph_that_a_rank_has_localized_is_planned_as_before() -> None:
    """Localizing adds facts about sizes (multiples of the number of shards), which don't change the plan."""
    made = _planned("shard", PLAN)
    before = made.program.priced(with_memory=False)
    local = [made.program.local_graph_of(number) for number in range(4)]
    after = made.program.priced(with_memory=False)
    assert after == before
    assert any(choice.factors for choice in after.axes[0].choices.values())
    assert [listing(made.program.local_graph_of(number)) for number in range(4)] == list(map(listing, local))


@pytest.mark.nightly
def test_a_gathered_table_that_two_parts_of_a_step_share() -> None:
    """One segment's backward keeps the table: it is an argument there, and can't be gathered again."""
    config = transformers.GPT2Config(
        n_embd=240, n_layer=1, n_head=6, vocab_size=501, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model, ids = transformers.GPT2LMHeadModel(config).double(), torch.randint(0, 501, (8, 32))
    options: dict[str, Any] = {
        "mesh": holding(MESHES[0], "shard"),
        "objective": {"machine": "h100x8"},
        "example_kwargs": {"labels": ids},
    }
    assert ts.plan(model, "auto", **options, example_inputs=(ids,)).across
    ts.check(model, "auto", **options, example_inputs=(ids,)).raise_on_error()


def test_rings_of_ranks_that_lie_apart_share_the_network() -> None:
    host = dataclasses.replace(ts.MACHINES["h100x8"], transfers=())

    def seconds(machine: ts.Machine, ranks: int) -> tuple[float, float]:
        return machine.begins("all_gather", ranks), machine.sends("all_gather", 1e9, 1e9, ranks)

    assert host.across(1) == host and host.across(4).domain == 2
    assert seconds(host.across(2), 4) == seconds(host, 4)
    assert seconds(host.across(8), 2)[1] == 1e9 / (host.network_bandwidth / 8) == seconds(host.across(16), 2)[1]
    assert seconds(host.across(8), 64)[1] == seconds(host.across(8), 2)[1]


@nightly("shard_grad_op")
@pytest.mark.parametrize("data", [pytest.param("shard", marks=pytest.mark.nightly), "shard_grad_op", "replicate"])
def test_a_limit_of_memory_counts_what_all_axes_divide(data: Any) -> None:
    """The weights' axis is planned first; its memory limit counts the sharding over later axes."""
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
    plan = ts.plan(model, {}, mesh=holding(mesh, data), objective={"memory": "1GiB"}, **call)
    first, made = plan.costs.memory, plan.axes[0].costs.memory
    for kind in ("parameters", "gradients", "optimizer"):
        assert abs(first[kind] / made[kind] - 1) < 1e-3, (kind, first, made)
    assert abs(first["peak"] / made["peak"] - 1) < 0.1, (first, made)
    if data == "shard":
        limit = 1.9 * sum(p.numel() * p.itemsize for p in model.parameters())  # two ranks need 2.0 times
        with pytest.raises(ts.PlanError, match="no plan for 2 ranks fits"):
            ts.plan(model, {}, mesh=2, objective={"memory": limit}, **call)
        assert (
            ts.plan(model, {}, mesh=holding(mesh, data), objective={"memory": limit}, **call).costs.memory["peak"]
            <= limit
        )
