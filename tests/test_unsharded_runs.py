"""Runs of other libraries, and of unsharded models, go on sharded from their own files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import torchshard as ts
from tests.helpers import nightly, refused_input
from tests.test_full_steps import _data, _model, _sharded
from torchshard.testing import run_ranks

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _adamw(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return optimizer, CosineAnnealingLR(optimizer, 50)


def _train(model: nn.Module, optimizer: Any, scheduler: Any = None, ema: Any = None) -> list[float]:
    """The losses of three steps, and of the averaged model."""
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*_data())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
        if ema is not None:
            ema.update_parameters(model)
    with torch.no_grad():
        return losses if ema is None else [*losses, ema(*_data()).item()]


def _load(model: nn.Module, path: Path) -> Any:
    saved = torch.load(path, mmap=True, weights_only=True)
    model.load_full_state_dict(saved["model"])  # type: ignore[operator]
    return saved


# --- files and their readers -----------------------------------------------------------------------------------------


class _Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _model()

    def training_step(self, batch: Any, _: int) -> Any:
        return self.net(*batch)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = _adamw(self.net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _write_lightning(path: Path) -> list[float]:
    made: Any = _Lit()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(made, DataLoader([_data()] * 3, batch_size=None))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return _train(made.net, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)


def _read_lightning(model: Any, path: Path) -> list[float]:
    saved = torch.load(path, mmap=True, weights_only=True)
    optimizer, scheduler = _adamw(model)
    consume_prefix_in_state_dict_if_present(saved["state_dict"], "net.")
    model.load_full_state_dict(saved["state_dict"])
    optimizer.load_state_dict(saved["optimizer_states"][0])
    scheduler.load_state_dict(saved["lr_schedulers"][0])
    return _train(model, optimizer, scheduler)


def _fsdp(rank: int, path: str) -> list[float]:
    model = _model()
    fully_shard(model)
    optimizer, _ = _adamw(model)
    _train(model, optimizer)
    saved = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    if rank == 0:
        torch.save(dict(zip(("model", "optimizer"), saved, strict=True)), path)
    dist.barrier()
    return _train(model, optimizer)


def _read_plainly(model: Any, path: Path) -> list[float]:
    saved, (optimizer, _) = _load(model, path), _adamw(model)
    optimizer.load_state_dict(saved["optimizer"])
    return _train(model, optimizer)


def _read_by_dcp(model: Any, path: Path) -> list[float]:
    saved, (optimizer, _) = torch.load(path, mmap=True, weights_only=True), _adamw(model)
    set_model_state_dict(model, saved["model"], options=FULL)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=FULL)
    return _train(model, optimizer)


def _write_named(path: Path) -> list[float]:
    model = _model()
    named = list(model.named_parameters())
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(1)).tolist()
    optimizer = torch.optim.AdamW([named[i] for i in order], 1e-2)
    _train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return _train(model, optimizer)


def _averaged(model: nn.Module) -> Any:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def _write_averaged(path: Path) -> list[float]:
    model = _model()
    (optimizer, _), ema = _adamw(model), _averaged(model)
    _train(model, optimizer, ema=ema)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": ema.state_dict()}, path)
    return _train(model, optimizer, ema=ema)


def _read_averaged(model: Any, path: Path) -> list[float]:
    saved, (optimizer, _), ema = _load(model, path), _adamw(model), _averaged(model)
    optimizer.load_state_dict(saved["optimizer"])
    ema.n_averaged.copy_(saved["ema"].pop("n_averaged"))
    consume_prefix_in_state_dict_if_present(saved["ema"], "module.")
    ema.module.load_full_state_dict(saved["ema"])
    return _train(model, optimizer, ema=ema)


FILES: dict[str, tuple[Callable[[Path], list[float]], dict[str, Callable[[Any, Path], list[float]]]]] = {
    "lightning": (_write_lightning, {"by hand": _read_lightning}),
    "fsdp": (
        lambda path: run_ranks(_fsdp, 2, str(path), backend="gloo")[0],
        {"plainly": _read_plainly, "dcp": _read_by_dcp},
    ),
    "named": (_write_named, {"plainly": _read_plainly}),
    "averaged": (_write_averaged, {"by hand": _read_averaged}),
}


def _go_on(rank: int, mesh: Any, folder: str) -> dict[tuple[str, str], list[float]]:
    found = {}
    for name, (_, readers) in FILES.items():
        for way, read in readers.items():
            found[name, way] = read(_sharded(_model(1), mesh), Path(folder) / name)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The folder with the files of the runs, and the losses of their next steps."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, {name: write(folder / name) for name, (write, _) in FILES.items()}


@nightly(but=["2-2"])
@pytest.mark.parametrize(
    ("world", "mesh"),
    [(2, 2), (3, 3), (3, "shard"), (4, {"dp": (2, "shard"), "tp": 2})],
    ids=["2-2", "3-3", "3-shard", "4-both"],
)
def test_runs_go_on_from_their_files(world: int, mesh: Any, written: tuple[Path, dict[str, list[float]]]) -> None:
    folder, expected = written
    for found in run_ranks(_go_on, world, mesh, str(folder)):
        for (name, way), losses in found.items():
            assert losses == pytest.approx(expected[name], abs=1e-10), (name, way)


def _renamed(rank: int) -> None:
    """States are matched by name in any order of groups and under wrappers; others are refused."""
    model = _model()
    named = dict(model.named_parameters())
    *names, other = list(named)[:5]
    for i, name in enumerate(names):
        named[name].grad = torch.full_like(named[name], i + 1.0)
    named[other].grad = torch.zeros_like(named[other])
    split = _sharded(model, 2)
    sharded = dict(split.named_parameters())

    def load(saved: list[list[str]], own: list[list[str]], prefix: str = "", own_prefix: str = "") -> None:
        def groups(names: list[list[str]], parameters: Any, prefix: str) -> Any:
            return [{"params": [(prefix + name, parameters[name]) for name in of]} for of in names]

        first = torch.optim.SGD(groups(saved, named, prefix), 0.0, momentum=0.9)
        first.step()
        then = torch.optim.SGD(groups(own, sharded, own_prefix), 0.0, momentum=0.9)
        then.load_state_dict(first.state_dict())
        for name in (name for of in own for name in of):
            assert (then.state[sharded[name]]["momentum_buffer"] == names.index(name) + 1.0).all(), name

    load([names], [names[::-1]])
    load([names[:1], names[1:]], [names[:0:-1], names[:1]])
    load([names], [names[::-1]], prefix="module.")
    load([names], [names[::-1]], prefix="_orig_mod.model.", own_prefix="actor.")
    for own in ([names[:2], names[2:]], [names[1:]], [[*names[1:], other]]):
        assert refused_input(lambda own=own: load([names], own), "have other names, or are in other groups")


def test_saved_states_are_matched_by_name() -> None:
    run_ranks(_renamed, 2)


# --- averaged models in checkpoints ----------------------------------------------------------------------------------


def _save_averaged(rank: int, folder: str) -> list[float]:
    model = _sharded(_model(), 2)
    (optimizer, _), ema = _adamw(model), _averaged(model)
    _train(model, optimizer, ema=ema)
    ts.save(folder, nn.ModuleDict({"model": model, "ema": ema}), optimizer)
    return _train(model, optimizer, ema=ema)


def _load_averaged(rank: int, folder: str, mesh: Any = None) -> list[float]:
    model = _model(1) if mesh is None else _sharded(_model(1), mesh)
    (optimizer, _), ema = _adamw(model), _averaged(model)
    ts.load(folder, nn.ModuleDict({"model": model, "ema": ema}), optimizer)
    return _train(model, optimizer, ema=ema)


def test_an_averaged_model_is_saved_with_its_model(tmp_path: Path) -> None:
    """By two ranks, for three, and for the unsharded models."""
    folder = str(tmp_path / "run")
    expected = run_ranks(_save_averaged, 2, folder)[0]
    for found in (*run_ranks(_load_averaged, 3, folder, 3), _load_averaged(0, folder)):
        assert found == pytest.approx(expected, abs=1e-10)


# --- Trainer ---------------------------------------------------------------------------------------------------------

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


class _Ids(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def _trainer(model: nn.Module, folder: str) -> Trainer:
    """Groups with and without weight decay, a schedule, clipping."""
    settings = TrainingArguments(
        folder, max_steps=6, save_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, weight_decay=0.1,
        lr_scheduler_type="cosine", warmup_steps=1, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(model, settings, train_dataset=_Ids())


def _resumed(rank: int, folder: str) -> list[float]:
    ts.distributed.hide_launcher()
    torch.manual_seed(7)
    ids = torch.zeros(4, 8, dtype=torch.long)
    model = ts.shard(LlamaForCausalLM(CONFIG), "auto", example_kwargs={"input_ids": ids, "labels": ids})
    trainer = _trainer(model, f"{folder}/{rank}")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_a_run_of_trainer_goes_on_sharded(world: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = _trainer(LlamaForCausalLM(CONFIG), str(tmp_path))
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    shutil.rmtree(tmp_path / "checkpoint-6")
    for found in run_ranks(_resumed, world, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)
