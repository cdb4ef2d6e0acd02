"""ts.save and ts.load when something does not fit or fails: each rank raises, and no model or checkpoint changes."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchshard as ts
from tests.helpers import refused
from tests.resumed import STEPS, Holds, adam, adamw, same, small, train, trained, whole_state
from torchshard.testing import run_ranks

UNFIT: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "other names": (lambda: nn.Sequential(*Holds().children()), adam, "only in the checkpoint: 'a.bias'"),
    "other sizes": (lambda: Holds(3), adam, "'a.weight' has a different shape from the model's"),
    "another dtype": (lambda: Holds(dtype=torch.float64), adam, "'a.weight' has a different dtype from the model's"),
    "tied": (lambda: Holds(tied=True), adam, "'b.weight' is tied to 'a.weight' in the model"),
    "class": (Holds, lambda m: torch.optim.SGD(m.parameters()), "has a different class"),
    "groups": (
        Holds,
        lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()]),
        "different number of parameter groups",
    ),
    "fewer": (Holds, lambda m: torch.optim.AdamW(m.a.parameters()), "only in one of the two: 'b.bias'"),
    "a stranger": (Holds, lambda m: torch.optim.AdamW(Holds().parameters()), "a parameter that is not the model's"),
    "two": (Holds, lambda m: [adam(m), adam(m)], "1 optimizers were saved, and 2 are given"),
}


def test_a_scheduler_of_another_class_changes_nothing(saved: Path) -> None:
    model = Holds()
    optimizer, before = adam(model), copy.deepcopy(model.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    text = "the scheduler has a different class"
    assert refused(lambda: ts.load(saved, model, optimizer, scheduler=scheduler), text, ts.InputError)
    assert same(before, model.state_dict()) and not optimizer.state


@pytest.mark.parametrize("kind", UNFIT)
def test_what_does_not_fit_changes_nothing(kind: str, saved: Path) -> None:
    build, optimize, text = UNFIT[kind]
    model = build()
    optimizer, before, rng = optimize(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert refused(lambda: ts.load(saved, model, optimizer), text, ts.InputError)
    assert same(before, model.state_dict()) and torch.equal(rng, torch.get_rng_state())
    assert not any(o.state for o in (optimizer if isinstance(optimizer, list) else [optimizer]))


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(lambda: ts.save(tmp_path / "file", Holds()), "the checkpoint can't be written", ts.InputError)


def _id(folder: str | Path) -> str:
    """The id of the save in a folder."""
    return str(json.loads(Path(folder, "checkpoint.json").read_text())["id"])


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
    found["nothing loaded"] = same(before, whole_state(model))
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
    optimizer = adam(model)
    trained(model, optimizer)
    ts.save(f"{folder}/same", model, optimizer)
    with torch.no_grad():
        optimizer.state[model.weight]["exp_avg"].add_(rank)
    found["an optimizer's state"] = refuses(model, optimizer)
    rates = [torch.optim.SGD(model.parameters(), 0.1 + r) for r in (0, rank)]
    found["a learning rate"] = refuses(model, rates[1])
    found["a scheduler"] = refuses(model, scheduler=torch.optim.lr_scheduler.StepLR(rates[0], 2 + rank))
    given = adam(model) if rank else None
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
