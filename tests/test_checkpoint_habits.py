"""Checkpoints in users' training code: extra states, any optimizer, names, late failures."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import refused
from tests.resumed import Holds, adam, same, trained

# --- habits ----------------------------------------------------------------------------------------------------------


class _Scale(nn.Module):
    """Keeps a plain tensor as extra state, and returns copies in its state dict."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner, self.value = nn.Linear(2, 2), torch.tensor(value)
        self.inner._register_state_dict_hook(
            lambda m, state, *_: state.update({k: v.clone() for k, v in state.items()})
        )

    def get_extra_state(self) -> Tensor:
        return self.value

    def set_extra_state(self, state: Tensor) -> None:
        self.value = state


def test_extra_state_and_copies_in_state_dicts(tmp_path: Path) -> None:
    saved, other = _Scale(5.0), _Scale(0.0)
    ts.save(tmp_path, saved)
    ts.load(tmp_path, other)
    assert other.value == 5 and torch.equal(saved.inner.weight, other.inner.weight)
    assert refused(lambda: ts.load(tmp_path, nn.ModuleList([other])), "modules with extra state differ", ts.InputError)


class _Counts(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * self.factor
        return result

    def get_extra_state(self) -> dict[str, int]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.factor = state["factor"]


def test_extra_state_of_a_sharded_model(tmp_path: Path) -> None:
    x, plain = torch.ones(2, 4), _Counts(9)
    saved, equal, other = (ts.shard(_Counts(n), {"inner": "column"}, (x,)) for n in (3, 3, 5))
    ts.save(tmp_path, saved)
    expected = saved(x)
    for model in (equal, plain):
        ts.load(tmp_path, model)
        assert torch.equal(model(x), expected)
    assert refused(lambda: ts.load(tmp_path, other), "can't change after sharding", ts.InputError)
    ts.distributed.destroy_process_group()


class _Own(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "mine"] = torch.ones(3)


def test_what_no_parameter_holds_is_refused(tmp_path: Path) -> None:
    assert refused(lambda: ts.save(tmp_path, _Own(2, 2)), "'mine' can't be saved", ts.InputError)


def test_what_changes_after_save_is_not_saved(tmp_path: Path) -> None:
    model, extra = nn.Linear(700, 700), {"log": [1], "x": torch.ones(2)}
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.1))
    before = copy.deepcopy(model.state_dict())
    saving = ts.save(tmp_path, model, optimizer, extra=extra, wait=False, copies="64KiB")
    extra["log"].append(2)
    extra["x"].add_(1)
    optimizer.param_groups[0]["lr"].fill_(5)
    with torch.no_grad():
        model.weight.zero_()
    saving.wait()
    other = nn.Linear(700, 700)
    into = torch.optim.SGD(other.parameters(), torch.tensor(1.0))
    loaded = ts.load(tmp_path, other, into)
    assert loaded["log"] == [1] and torch.equal(loaded["x"], torch.ones(2)) and into.param_groups[0]["lr"] == 0.1
    assert same(before, other.state_dict())


def test_what_changes_before_it_is_written_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer starts only after the change."""
    queue, changed = sys.modules["torchshard.checkpoints.copies"].Copies, threading.Event()
    iterate = queue.__iter__

    def late(copies: Any) -> Any:
        assert changed.wait(60)
        yield from iterate(copies)

    monkeypatch.setattr(queue, "__iter__", late)
    model = nn.Linear(8, 8)
    before = copy.deepcopy(model.state_dict())
    saving = ts.save(tmp_path, model, wait=False)
    with torch.no_grad():
        model.weight.zero_()
    changed.set()
    saving.wait()
    other = nn.Linear(8, 8)
    ts.load(tmp_path, other)
    assert same(before, other.state_dict())


STATES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.01, max_iter=2),
}


@pytest.mark.parametrize("kind", STATES)
def test_whole_parameters_may_have_any_optimizer(kind: str, tmp_path: Path) -> None:
    """In bfloat16, because PyTorch would cast states that are float32 numbers to the parameter's dtype."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = sum(p.float().square().sum() for p in model.parameters())
            assert isinstance(loss, Tensor)
            loss.backward()
            return loss.item()

        optimizer.step(closure)

    pair = [Holds(dtype=torch.float32 if kind == "lbfgs" else torch.bfloat16) for _ in range(2)]
    optimizers = [STATES[kind](model.parameters()) for model in pair]
    for _ in range(3):
        step(pair[0], optimizers[0])
    ts.save(tmp_path, pair[0], optimizers[0])
    ts.load(tmp_path, pair[1], optimizers[1])
    for saved, loaded in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        tensors = [key for key, value in saved.items() if isinstance(value, Tensor)]
        assert all(saved[key].dtype == loaded[key].dtype and torch.equal(saved[key], loaded[key]) for key in tensors)
    for _ in range(3):
        for model, optimizer in zip(pair, optimizers, strict=True):
            step(model, optimizer)
        assert same(pair[0].state_dict(), pair[1].state_dict())


def test_names_with_slashes_and_wrapped_models(tmp_path: Path) -> None:
    pair = [nn.ModuleDict({"w": nn.Linear(2, 2), "x/w": nn.Linear(2, 2)}) for _ in range(2)]
    optimizers = [adam(model) for model in pair]
    trained(pair[0], optimizers[0])
    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [2, 4])
    ts.save(tmp_path, torch.compile(pair[0]), optimizers[0], scheduler=milestones)
    restored = torch.optim.lr_scheduler.MultiStepLR(optimizers[1], [1, 9])
    ts.load(tmp_path, pair[1], optimizers[1], scheduler=restored)
    keys = {frozenset(state) for state in optimizers[1].state.values()}
    assert keys == {frozenset(("step", "exp_avg", "exp_avg_sq"))} and restored.milestones == milestones.milestones
    assert same(pair[0].state_dict(), pair[1].state_dict())


class _Raises(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: Any) -> None:
        if "step_size" in state_dict and state_dict["step_size"] == 3:
            raise ValueError("boom")
        super().load_state_dict(state_dict)


def test_what_fails_last_is_undone(tmp_path: Path) -> None:
    pair = [Holds() for _ in range(2)]
    optimizers = [adam(model) for model in pair]
    trained(pair[0], optimizers[0])
    ts.save(tmp_path, pair[0], optimizers[0], scheduler=_Raises(optimizers[0], 3))
    model, optimizer, scheduler = pair[1], optimizers[1], _Raises(optimizers[1], 7)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match="boom"):
        ts.load(tmp_path, model, optimizer, scheduler=scheduler)
    assert same(before, model.state_dict()) and not optimizer.state and scheduler.step_size == 7
    assert torch.equal(rng, torch.get_rng_state())
    model.a.weight = nn.Parameter(torch.zeros(1).expand(4, 4))  # can't be written
    with pytest.raises(RuntimeError, match="more than one element"):
        ts.load(tmp_path, model)
    assert torch.equal(before["b.weight"], model.b.weight)


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        *((folder, "invalid folder") for folder in (None, "", "a\0b", 3)),
        ("/tmp/" + "x" * 300, "the checkpoint can't be"),
    ],
)
def test_what_is_no_folder_is_refused(folder: Any, why: str) -> None:
    for call in (lambda: ts.save(folder, Holds()), lambda: ts.load(folder, Holds())):
        assert refused(call, why, ts.InputError)
