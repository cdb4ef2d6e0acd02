"""PyTorch's distributed checkpointing (DCP) of sharded models: exact with any number of ranks, or refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import torchshard as ts
from tests.helpers import nightly
from tests.resumed import adamw, small, train, whole_state
from torchshard.testing import run_ranks

STEPS, NEXT = range(2), range(2, 5)
FULL = StateDictOptions(full_state_dict=True)


def _says(call: Callable[[], Any], text: str) -> bool:
    """Whether a call raises a ShardError with this text, or DCP's error around it."""
    try:
        call()
    except (ts.ShardError, dcp.api.CheckpointException) as error:
        return text in str(error)
    return False


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def _saves(rank: int, folder: str) -> dict[str, Any]:
    """Trains, and saves in each way of DCP; also tries unsupported ways, and gathers full states."""
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    model = small("auto", torch.float64)
    optimizer = adamw(model)
    train(model, optimizer, STEPS)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    before = copy.deepcopy(states)
    dcp.save(states, checkpoint_id=f"{folder}/plain")
    dcp.save({"model": model, "optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/objects")
    group = dist.new_group()  # its thread's collectives must not mix with the model's
    saving = dcp.async_save(states, checkpoint_id=f"{folder}/async", process_group=group)
    found: dict[str, Any] = {"rng": torch.get_rng_state(), "whole": whole_state(model)}
    offload = StateDictOptions(cpu_offload=True)
    found["offloaded"] = _equal(get_model_state_dict(model, options=offload), states["model"])
    found["gathered"] = _equal(get_model_state_dict(model, options=FULL), found["whole"])
    found["gathered optimizer"] = get_optimizer_state_dict(model, optimizer, options=FULL)
    whole = copy.deepcopy(found["whole"])
    found["whole into slices"] = _says(lambda: model.load_state_dict(whole), "load_full_state_dict")
    stager = BlockingAsyncStager()
    found["older stager"] = _says(
        lambda: dcp.async_save(states, checkpoint_id=f"{folder}/older", async_stager=stager), "older AsyncStager"
    )
    writer = dcp.HuggingFaceStorageWriter(f"{folder}/hf", enable_consolidation=True)
    found["one piece alone"] = _says(lambda: dcp.save(states["model"], storage_writer=writer), "ts.save_pretrained")
    found["unchanged"] = _equal(before, dict(zip(states, get_state_dict(model, optimizer), strict=True)))
    found["losses"] = train(model, optimizer, NEXT)
    saving.result()
    return found


def _loads(rank: int, folder: str, plan: str | None, rng: Tensor) -> list[Any]:
    warnings.simplefilter("ignore")
    if plan:
        ts.distributed.init_process_group()
    found = []
    for name in ("plain", "async"):
        model = small(plan, torch.float64)
        optimizer = adamw(model)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(0)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=f"{folder}/{name}")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        torch.set_rng_state(rng)
        plain = all(type(value) is Tensor for state in optimizer.state.values() for value in state.values())
        gathered = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
        found.append((whole_state(model), gathered, plain, train(model, optimizer, NEXT)))
    model = small(plan, torch.float64)
    dcp.load({"model": model}, checkpoint_id=f"{folder}/objects")
    return [whole_state(model), *found]


@pytest.mark.nightly
def test_dcp_saves_and_loads_slices(tmp_path: Path) -> None:
    saved = run_ranks(_saves, 2, str(tmp_path))
    first = saved[0]
    for found in saved:
        kept = ("offloaded", "gathered", "whole into slices", "older stager", "one piece alone", "unchanged")
        assert all(found[name] for name in kept), found
        assert _equal(found["gathered optimizer"], first["gathered optimizer"])
    for world, plan in ((1, None), (2, "some"), (3, "columns")):
        for objects, *ways in run_ranks(_loads, world, str(tmp_path), plan, first["rng"]):
            assert _equal(objects, first["whole"])
            for whole, optimizer, plain, losses in ways:
                assert _equal(whole, first["whole"]) and _equal(optimizer, first["gathered optimizer"]) and plain
                assert torch.allclose(torch.tensor(losses), torch.tensor(first["losses"]), rtol=1e-12, atol=0)


def _optimizer_from_file(rank: int) -> list[bool]:
    """An optimizer that has loaded its state, but not stepped, returns slices with their places."""
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    model = small("auto")
    optimizer = adamw(model)
    train(model, optimizer, STEPS)
    held = io.BytesIO()
    torch.save(optimizer.state_dict(), held)
    held.seek(0)
    fresh, loaded = adamw(model), torch.load(held)
    for state in loaded["state"].values():  # plain, as written without sharded models or read by weights_only=True
        state.update({name: value.as_subclass(Tensor) for name, value in state.items()})
    fresh.load_state_dict(loaded)
    states = fresh.state_dict()["state"]
    split = [i for i, p in enumerate(p for g in fresh.param_groups for p in g["params"]) if p.is_split]
    dist.barrier()
    return [all(type(states[i]["exp_avg"]).__name__ == "StateSlice" for i in split), bool(split)]


@pytest.mark.nightly
def test_an_optimizer_that_has_not_stepped_gives_slices() -> None:
    assert run_ranks(_optimizer_from_file, 2) == [[True, True]] * 2


def _sets(rank: int, folder: str, world: int, way: str) -> bool:
    """Whether a fresh model trains like the first one after PyTorch's setters load the first one's full states."""
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group(group_size=2)
    mesh = {"dp": world // 2, "tp": 2} if world > 2 else None
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)

    def made() -> tuple[Any, torch.optim.Optimizer]:
        layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)
        plan, divides = {"0": "column", "2": "row"}, {"mesh": mesh, "inputs": "global"} if mesh else {}
        model = ts.shard(torch.nn.Sequential(*layers).double(), plan, (x,), **divides)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # needs their strides

    def trained(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_state(model)

    first, again = made(), made()
    trained(*first)
    states = get_state_dict(*first, options=FULL)
    options = FULL
    if way == "broadcast":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        states = states if rank == 0 else ({}, {})
    if way == "partial":  # missing values stay
        options = StateDictOptions(full_state_dict=True, strict=False)
        again[0].load_state_dict(first[0].state_dict())
        states = ({name: value for name, value in states[0].items() if name != "0.weight"}, states[1])
    set_model_state_dict(again[0], states[0], options=options)
    set_optimizer_state_dict(*again, states[1], options=options)
    return _equal(trained(*again), trained(*first))


@nightly(but=["2-broadcast"])
@pytest.mark.parametrize(("world", "way"), [(2, "equal"), (2, "broadcast"), (2, "partial"), (4, "broadcast")])
def test_pytorchs_setters_take_whole_states(world: int, way: str, tmp_path: Path) -> None:
    assert all(run_ranks(_sets, world, str(tmp_path), world, way))
