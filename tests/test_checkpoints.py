"""ts.save and ts.load: a training run resumes exactly, on any ranks and plan, or is refused without any change."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly, refused
from tests.resumed import adamw, batch, small, train, whole_state
from torchshard.testing import run_ranks

STEPS, NEXT = range(2), range(2, 5)
EXTRA = {"step": 2, "seen": torch.arange(3), "names": ("a", None, {1: 2.5})}


def _id(folder: str | Path) -> str:
    """The id of the save in a folder."""
    return str(json.loads(Path(folder, "checkpoint.json").read_text())["id"])


def _scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


def _run(plan: str | None, kind: str = "adamw", **init: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model with an optimizer and a scheduler; `init` is for init_process_group."""
    warnings.simplefilter("ignore")
    if plan:
        ts.distributed.init_process_group(**init)
    model = small(plan, torch.float64)
    optimizer = adamw(model) if kind == "adamw" else OPTIMIZERS[kind](model.parameters())
    return model, optimizer, _scheduler(optimizer)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, 0.05, eps=1e-3, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.05, eps=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    """A copy of an optimizer's states, without the marks of slices."""
    return copy.deepcopy([[optimizer.state[p] for p in group["params"]] for group in optimizer.param_groups])


def _saves(rank: int, folder: str, plan: str | None, wait: bool, kind: str) -> dict[str, Any]:
    model, optimizer, scheduler = _run(plan, kind)
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
    model, optimizer, scheduler = _run(plan, kind)
    extra = ts.load(folder, model, optimizer, scheduler=scheduler)
    found = {"whole": whole_state(model), "drawn": (random.random(), float(np.random.rand())), "extra": extra}
    found["rates"] = [group["lr"] for group in optimizer.param_groups]
    return found | {"losses": train(model, optimizer, NEXT, scheduler), "end": whole_state(model)}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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
            assert _same(found["whole"], first["whole"]) and found["drawn"] == first["drawn"]
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
    return _same(before, model.full_state_dict()) and model.get_parameter("tok.weight").shape[0] == (1, 1, 0)[rank]


def test_tied_parameters_with_empty_slices(tmp_path: Path) -> None:
    assert run_ranks(_empty_slices, 3, str(tmp_path)) == [True] * 3


# --- what is refused -------------------------------------------------------------------------------------------------


class _Holds(nn.Module):
    """Two linear layers, optionally tied, or of another size or dtype."""

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(width, width, dtype=dtype) for _ in "ab")
        if tied:
            self.b.weight = self.a.weight


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two layers, AdamW and a scheduler."""
    torch.manual_seed(0)
    model = _Holds()
    optimizer = torch.optim.AdamW(model.parameters())
    _trained(model, optimizer)
    ts.save(tmp_path, model, optimizer, scheduler=_scheduler(optimizer))
    return tmp_path


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


UNFIT: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "other names": (lambda: nn.Sequential(*_Holds().children()), _adam, "only in the checkpoint: 'a.bias'"),
    "other sizes": (lambda: _Holds(3), _adam, "'a.weight' has a different shape from the model's"),
    "another dtype": (lambda: _Holds(dtype=torch.float64), _adam, "'a.weight' has a different dtype from the model's"),
    "tied": (lambda: _Holds(tied=True), _adam, "'b.weight' is tied to 'a.weight' in the model"),
    "class": (_Holds, lambda m: torch.optim.SGD(m.parameters()), "has a different class"),
    "groups": (
        _Holds,
        lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()]),
        "different number of parameter groups",
    ),
    "fewer": (_Holds, lambda m: torch.optim.AdamW(m.a.parameters()), "only in one of the two: 'b.bias'"),
    "a stranger": (_Holds, lambda m: torch.optim.AdamW(_Holds().parameters()), "a parameter that is not the model's"),
    "two": (_Holds, lambda m: [_adam(m), _adam(m)], "1 optimizers were saved, and 2 are given"),
}


def test_a_scheduler_of_another_class_changes_nothing(saved: Path) -> None:
    model = _Holds()
    optimizer, before = _adam(model), copy.deepcopy(model.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    text = "the scheduler has a different class"
    assert refused(lambda: ts.load(saved, model, optimizer, scheduler=scheduler), text, ts.InputError)
    assert _same(before, model.state_dict()) and not optimizer.state


@pytest.mark.parametrize("kind", UNFIT)
def test_what_does_not_fit_changes_nothing(kind: str, saved: Path) -> None:
    build, optimize, text = UNFIT[kind]
    model = build()
    optimizer, before, rng = optimize(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert refused(lambda: ts.load(saved, model, optimizer), text, ts.InputError)
    assert _same(before, model.state_dict()) and torch.equal(rng, torch.get_rng_state())
    assert not any(o.state for o in (optimizer if isinstance(optimizer, list) else [optimizer]))


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(lambda: ts.save(tmp_path / "file", _Holds()), "the checkpoint can't be written", ts.InputError)


def test_debris_is_removed_and_the_rest_left(saved: Path) -> None:
    debris, others = saved / "data-0123456789abcdef", (saved / "data-mine", saved / "notes.txt")
    debris.mkdir()
    (debris / "0-of-2.safetensors").write_text("half")
    others[0].mkdir()
    others[1].write_text("kept")
    ts.save(saved, _Holds())
    assert not debris.exists() and all(other.exists() for other in others)
    assert len([*saved.glob("data-*")]) == 2


def _ranks_differ(rank: int, folder: str) -> dict[str, bool]:
    ts.distributed.init_process_group(timeout_seconds=20)
    model, found = small("some"), {}
    optimizer = adamw(model)
    train(model, optimizer, STEPS)
    ts.save(f"{folder}/same", model, optimizer)
    different = "the ranks save different checkpoints"
    found["folders"] = refused(lambda: ts.save(f"{folder}/{rank}", model), different, ts.DistributedError)
    one = optimizer if rank else None
    found["optimizers"] = refused(lambda: ts.save(f"{folder}/same", model, one), different, ts.DistributedError)
    found["no place"] = refused(lambda: ts.save("/proc/none", model), "can't be written", ts.ShardError)
    mine = f"{folder}/own{rank}"
    shutil.copytree(f"{folder}/same", mine)
    id_ = _id(mine)
    found["equal copies"] = ts.load(mine, model, optimizer) is None
    if rank:
        os.truncate(next(Path(mine).glob("data-*/1-of-2.safetensors")), 9)
    before = whole_state(model)
    found["torn on one"] = refused(lambda: ts.load(mine, model), "checkpoint", ts.ShardError)
    found["nothing loaded"] = _same(before, whole_state(model))
    shutil.rmtree(mine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    ts.save(f"{folder}/later", model, optimizer)
    source = f"{folder}/{'later' if rank else 'same'}"
    found["two checkpoints"] = refused(lambda: ts.load(source, model), "load different", ts.DistributedError)
    if rank:
        with torch.no_grad():
            model.get_parameter("norm.weight").add_(1)
    found["drifted"] = refused(lambda: ts.save(f"{folder}/same", model), "have drifted apart", ts.DistributedError)
    found["kept"] = _id(f"{folder}/same") == id_
    return found


@pytest.mark.nightly
def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    for found in run_ranks(_ranks_differ, 2, str(tmp_path)):
        assert all(found.values()), found


def _one_fails(rank: int, folder: str) -> list[Any]:
    """Saves with a full disk on one rank: no rank completes, and the earlier checkpoint stays."""
    ts.distributed.init_process_group(timeout_seconds=20)
    model = small("some")
    ts.save(folder, model)
    before, told = _id(folder), list[bool]()

    def full(plan: object) -> None:
        raise OSError(28, "No space left on device")

    for wait in (True, False):
        begin = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr("torchshard.weights.safetensors_writer.FilePlan.create", full)
            told.append(refused(lambda: ts.save(folder, model, wait=wait).wait(), "No space left", ts.ShardError))  # noqa: B023
        told.append(time.monotonic() - begin < 15)
    told.append(_id(folder) == before)
    ts.distributed.barrier()
    ts.save(folder, model)
    return [*told, _id(folder) != before]


@pytest.mark.nightly
def test_a_rank_that_cannot_write_fails_all(tmp_path: Path) -> None:
    assert run_ranks(_one_fails, 2, str(tmp_path)) == [[True] * 6] * 2


def _report_is_lost(rank: int, folder: str) -> list[bool]:
    """Saves while the disk is too full for the leader's report that the checkpoint is committed."""
    ts.distributed.init_process_group(timeout_seconds=3)
    model, set_note = small("some"), Path.replace

    def full(note: Path, target: Path) -> Path:
        if target.name == "end.note":
            raise OSError(28, "No space left on device")
        return set_note(note, target)

    ts.save(folder, model)
    before = _id(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", full)
        if rank:
            told = refused(lambda: ts.save(folder, model), "rank 0 did not commit", ts.DistributedError)
        else:
            ts.save(folder, model)
            told = True
    return [told, _id(folder) != before]


@pytest.mark.nightly
def test_a_committed_checkpoint_with_a_lost_report(tmp_path: Path) -> None:
    assert run_ranks(_report_is_lost, 2, str(tmp_path)) == [[True] * 2] * 2


def _each_its_own(rank: int, folder: str) -> dict[str, bool]:
    """Ranks with different values where one rank saves for all, or with different arguments."""
    ts.distributed.init_process_group(timeout_seconds=20)
    found, different = {}, "the ranks save different checkpoints"

    def refuses(*args: Any, **options: Any) -> bool:
        return refused(lambda: ts.save(f"{folder}/x", *args, **options), different, ts.DistributedError)

    with torch.random.fork_rng():
        torch.manual_seed(rank)
        head = nn.Linear(3, 3)
    found["an unsharded model"] = refuses(head)
    found["a head beside"] = refuses(nn.ModuleList([small("some"), head]))
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = _adam(model)
    _trained(model, optimizer)
    ts.save(f"{folder}/same", model, optimizer)
    with torch.no_grad():
        optimizer.state[model.weight]["exp_avg"].add_(rank)
    found["an optimizer's state"] = refuses(model, optimizer)
    rates = [torch.optim.SGD(model.parameters(), 0.1 + r) for r in (0, rank)]
    found["a learning rate"] = refuses(model, rates[1])
    found["a scheduler"] = refuses(model, scheduler=torch.optim.lr_scheduler.StepLR(rates[0], 2 + rank))
    given = _adam(model) if rank else None
    found["loading"] = refused(lambda: ts.load(f"{folder}/same", model, given), "load different", ts.DistributedError)
    begin = time.monotonic()
    wide = nn.Module()
    wide.register_buffer("x", torch.zeros(2, dtype=torch.complex128))
    found["a dtype"] = (
        refused(lambda: ts.save(f"{folder}/x", wide), "safetensors files have no", ts.InputError) or rank > 0
    )
    found["at once"] = time.monotonic() - begin < 10
    ts.distributed.barrier()
    return found


@pytest.mark.nightly
def test_ranks_that_hold_different_values_are_told(tmp_path: Path) -> None:
    for found in run_ranks(_each_its_own, 2, str(tmp_path)):
        assert all(found.values()), found


def _ends_early(rank: int, folder: str) -> bool:
    """Destroys the groups while a save writes in the background."""
    ts.distributed.init_process_group()
    model = small("some")
    saving = ts.save(folder, model, wait=False)
    ts.distributed.destroy_process_group()
    saving.wait()
    return bool(_id(folder))


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
        with Path(store.path).open("ab") as file:
            file.write(b"\x01")
        dist.barrier()
    ts.save(folder, model)
    dist.barrier()  # rank 0 has removed the ranks' messages
    names = {path.name for path in Path(folder).glob("data-*/*")}
    return names == {"objects.bin", *(f"{r}-of-{ranks}.safetensors" for r in range(ranks))}


@nightly("broken file")
@pytest.mark.parametrize("kind", ["server", "broken file"])
def test_the_store_of_the_ranks(kind: str, tmp_path: Path) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = server.port if kind == "server" else 0
    assert run_ranks(_saves_by, 2, str(tmp_path), port) == [True, True]
