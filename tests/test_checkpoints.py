"""ts.save and ts.load: a training run resumes exactly, on any ranks and plan."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from tests.resumed import STEPS, Holds, batch, run_of, same, small, train, whole_state
from torchshard.testing import run_ranks

NEXT = range(2, 5)
EXTRA = {"step": 2, "seen": torch.arange(3), "names": ("a", None, {1: 2.5})}


def _saves(rank: int, folder: str, plan: str | None, wait: bool, kind: str) -> dict[str, Any]:
    model, optimizer, scheduler = run_of(plan, kind)
    train(model, optimizer, STEPS, scheduler)
    found = {"whole": whole_state(model), "drawn": (random.random(), float(np.random.rand()))}
    random.seed(3)
    np.random.seed(3)
    saving = ts.save(folder, model, optimizer, scheduler=scheduler, extra=EXTRA, wait=wait)
    found |= {"drawn": (random.random(), float(np.random.rand()))}
    found["losses"] = train(model, optimizer, NEXT, scheduler)
    saving.wait()
    return found | {"done": saving.done(), "end": whole_state(model)}


def _loads(rank: int, folder: str, plan: str | None, kind: str) -> dict[str, Any]:
    model, optimizer, scheduler = run_of(plan, kind)
    extra = ts.load(folder, model, optimizer, scheduler=scheduler)
    found = {"whole": whole_state(model), "drawn": (random.random(), float(np.random.rand())), "extra": extra}
    found["rates"] = [group["lr"] for group in optimizer.param_groups]
    return found | {"losses": train(model, optimizer, NEXT, scheduler), "end": whole_state(model)}


def _near(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.allclose(a[name].double(), b[name].double(), rtol=1e-10, atol=1e-12) for name in a)


@nightly(but=["2-some-False-fused-targets2"])
@pytest.mark.parametrize(
    ("world", "plan", "wait", "kind", "targets"),
    [
        (2, "auto", True, "adamw", [(1, None), (3, "columns"), (4, "some")]),
        (3, "columns", False, "foreach", [(2, "auto")]),
        (2, "some", False, "fused", [(1, None)]),
        (1, None, True, "momentum", [(3, "auto")]),
    ],
)
def test_a_run_goes_on_elsewhere(
    world: int, plan: str | None, wait: bool, kind: str, targets: list[tuple[int, str | None]], tmp_path: Path
) -> None:
    first = run_ranks(_saves, world, str(tmp_path), plan, wait, kind)[0]
    assert first["done"]
    for ranks, other in targets:
        for found in run_ranks(_loads, ranks, str(tmp_path), other, kind):
            assert same(found["whole"], first["whole"]) and found["drawn"] == first["drawn"]
            assert found["extra"]["step"] == 2 and found["extra"]["names"] == EXTRA["names"]
            assert torch.equal(found["extra"]["seen"], EXTRA["seen"])
            assert found["losses"] == pytest.approx(first["losses"], rel=1e-10) and _near(found["end"], first["end"])


def _weights_of_checkpoint(rank: int, folder: str) -> list[Any]:
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    torch.manual_seed(rank)  # the checkpoint replaces the constructor's draws
    with ts.lazy():
        model = small(None)
    sharded = ts.shard(model, "auto", (batch(0),), weights=folder)
    weights = sharded.weights
    assert weights is not None
    kept = sum(t.numel() * t.itemsize for t in (*sharded.parameters(), *sharded.buffers()))
    return [{n: t.double() for n, t in whole_state(sharded).items()}, weights.read.bytes_read, kept, str(weights)]


@pytest.mark.nightly
def test_a_checkpoint_gives_its_weights_to_a_lazy_model(tmp_path: Path) -> None:
    first = run_ranks(_saves, 2, str(tmp_path), "some", True, "adamw")[0]
    for whole, read, kept, line in run_ranks(_weights_of_checkpoint, 3, str(tmp_path)):
        assert all(torch.equal(whole[name], tensor.float().double()) for name, tensor in first["whole"].items())
        assert kept < read <= 2 * kept and "0 missing, 0 unused, 1 tied" in line  # the files are in float64


class _Tiny(nn.Module):
    """Two tokens, with tied weights: on three ranks one slice is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(2, 4), nn.Linear(4, 2, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.tok(ids))
        return result


def _empty_slices(rank: int, folder: str) -> bool:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = ts.shard(_Tiny(), {"tok": "vocab", "head": "column"}, (torch.tensor([0, 1]),))
    before = model.full_state_dict()
    ts.save(folder, model)
    with torch.no_grad():
        model.get_parameter("tok.weight").zero_()
    ts.load(folder, model)
    return same(before, model.full_state_dict()) and model.get_parameter("tok.weight").shape[0] == (1, 1, 0)[rank]


def test_tied_parameters_with_empty_slices(tmp_path: Path) -> None:
    assert run_ranks(_empty_slices, 3, str(tmp_path)) == [True] * 3


def test_debris_is_removed_and_the_rest_left(saved: Path) -> None:
    debris, others = saved / "data-0123456789abcdef", (saved / "data-mine", saved / "notes.txt")
    debris.mkdir()
    (debris / "0-of-2.safetensors").write_text("half")
    others[0].mkdir()
    others[1].write_text("kept")
    ts.save(saved, Holds())
    assert not debris.exists() and all(other.exists() for other in others)
    assert len([*saved.glob("data-*")]) == 2


def _ends_early(rank: int, folder: str) -> bool:
    """Destroys the groups while a save writes in the background."""
    ts.distributed.init_process_group()
    model = small("some")
    saving = ts.save(folder, model, wait=False)
    ts.distributed.destroy_process_group()
    saving.wait()
    return Path(folder, "checkpoint.json").exists()


@pytest.mark.nightly
def test_a_save_outlives_its_groups(tmp_path: Path) -> None:
    assert run_ranks(_ends_early, 2, str(tmp_path)) == [True, True]


def _saves_by(rank: int, folder: str, port: int) -> bool:
    """Saves with a server as the ranks' store or, for port 0, a file with a torn record of a killed writer."""
    ranks = dist.get_world_size()
    if port:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.TCPStore("localhost", port), rank=rank, world_size=ranks)
    ts.distributed.init_process_group()
    model = small("some")
    if not port:
        store: Any = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        dist.barrier()
        if rank == 0:
            with Path(store.path).open("ab") as file:
                file.write(b"\x01")
        dist.barrier()
    ts.save(folder, model)
    dist.barrier()  # rank 0 has removed the ranks' messages
    if not port and rank == 0:  # PyTorch reads the file again when it destroys the store, and would wait for the rest
        os.truncate(store.path, Path(store.path).stat().st_size - 1)
    dist.barrier()
    names = {path.name for path in Path(folder).glob("data-*/*")}
    return names == {"objects.bin", *(f"{r}-of-{ranks}.safetensors" for r in range(ranks))}


@nightly("broken file")
@pytest.mark.parametrize("kind", ["server", "broken file"])
def test_the_store_of_the_ranks(kind: str, tmp_path: Path) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = server.port if kind == "server" else 0
    assert run_ranks(_saves_by, 2, str(tmp_path), port) == [True, True]
