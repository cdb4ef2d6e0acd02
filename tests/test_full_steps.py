"""Optimizers that read full parameters or the whole model, compared with the unsharded run; and their checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

import torchshard as ts
from tests.helpers import nightly, refused, refused_input
from tests.optimizers import (
    STEPS,
    Clipping,
    Coded,
    Codes,
    Counting,
    Divided,
    Factors,
    Late,
    Noise,
    Own,
    Parts,
    Shapes,
    Signs,
    Trust,
)
from torchshard.testing import largest, on_ranks, run_ranks


class Net(nn.Module):
    """A block with a fused QKV weight and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(13, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        self.qkv = nn.Linear(8, 24, bias=False)  # the gradient of a key bias is rounding, which some updates normalise
        self.up, self.down, self.head = nn.Linear(8, 20), nn.Linear(20, 8), nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Muon": lambda m: torch.optim.Muon(_matrices(m), 1e-2),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 1e-2),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), 0.1, max_iter=3, history_size=4),
    "signs": lambda m: Signs(m.parameters()),
    "trust": lambda m: Trust(m.parameters()),
    "factors": lambda m: Factors(m.parameters()),
    "clipping": lambda m: Clipping(m.parameters()),
    "parts": lambda m: Parts(_matrices(m)),
    "coded": lambda m: Coded(m.parameters()),
    "noise": lambda m: Noise(m.parameters()),
    "shapes": lambda m: Shapes(_matrices(m)),
    "counting": lambda m: Counting(_matrices(m), lr=0.0),
    "divided": lambda m: Divided(m.parameters()),
    "groups": lambda m: Trust([{"params": _matrices(m)}, {"params": [m.norm.weight, m.up.bias], "lr": 1.0}]),
}


def _data() -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(13, (2, 48, 6), generator=torch.Generator().manual_seed(5))
    return ids, labels


def _model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def _sharded(model: nn.Module, mesh: Any) -> Any:
    return ts.shard(model, {} if isinstance(mesh, str) else "auto", _data(), mesh=mesh, inputs="global")


def _train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> list[float]:
    """The losses of some steps; every other step has a closure, and LBFGS's all have one."""
    losses = []
    for number in range(first, first + steps):
        torch.manual_seed(number)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(*_data())
            loss.backward()
            return loss

        if isinstance(optimizer, Counting):  # a warm-up
            optimizer.param_groups[0]["lr"] = 1e-2 * number
        if isinstance(optimizer, torch.optim.LBFGS) or number % 2:
            loss = optimizer.step(closure)  # type: ignore[arg-type]
        else:
            loss = closure()
            optimizer.step()
        losses.append(loss.item())
    return losses


def _difference(model: nn.Module, sharded: Any) -> float:
    full, own = sharded.full_state_dict(), model.state_dict()
    return largest(*((full[name] - own[name]).abs().max().item() for name in own))


def _kept(optimizer: Optimizer) -> int:
    leaves = pytree.tree_leaves([*optimizer.state.values()])
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)


def _trained(rank: int, mesh: Any) -> dict[str, float]:
    """Optimizer -> the largest difference of a loss or a parameter."""
    worst = {}
    for name, made in OPTIMIZERS.items():
        model = _model()
        sharded = _sharded(copy.deepcopy(model), mesh)
        both = [(m, made(m)) for m in (model, sharded)]
        losses = [_train(m, optimizer, STEPS) for m, optimizer in both]
        worst[name] = largest(_difference(model, sharded), *(abs(a - b) for a, b in zip(*losses, strict=True)))
        (_, whole), (_, split) = both
        if name == "Muon" and mesh == 2:
            worst["the rank's share"] = abs(_kept(split) / _kept(whole) - 0.5)
    return worst


@nightly(but=["2-2", "3-shard"])
@pytest.mark.parametrize(
    ("world", "mesh"),
    [(2, 2), (3, "shard"), (3, 3), (4, {"dp": (2, "shard"), "tp": 2}), (4, {"dp": 2, "tp": 2})],
    ids=["2-2", "3-shard", "3-3", "4-sharded", "4-copied"],
)
def test_steps_are_those_of_the_unsharded_run(world: int, mesh: Any) -> None:
    for worst in run_ranks(_trained, world, mesh, seconds=300):
        assert worst.pop("the rank's share", 0.0) < 0.05
        assert largest(*worst.values()) < 1e-10, worst


@on_ranks(2)
def test_a_declared_reach_is_taken_at_its_word(rank: int) -> None:
    """The comparison of the test above sees a step of slices."""

    class Declared(Trust):
        """Inherits `step`."""

    ts.register_optimizer(Declared, "element")
    model = _model()
    sharded = _sharded(copy.deepcopy(model), 2)
    for m in (model, sharded):
        _train(m, Declared(m.parameters()), 2)
    assert _difference(model, sharded) > 1e-6


@on_ranks(2)
def test_a_step_that_reads_more_later_is_refused(rank: int) -> None:
    sharded = _sharded(_model(), 2)
    optimizer = Late(sharded.parameters())
    _train(sharded, optimizer, STEPS // 2 + 4)
    told = "Late reads more than single elements, which its first steps did not"
    assert refused_input(lambda: _train(sharded, optimizer, 1), told)


@on_ranks(2)
def test_a_state_that_is_more_than_its_parts_is_refused(rank: int) -> None:
    class Listed(Codes):
        """Has an object, which is needed to make it again."""

        def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
            return ["codes", "scales"], {"blocks": object()}

    class OfListed(Coded):
        state_type = Listed

    sharded = _sharded(_model(), 2)
    told = "of type Listed can't be split over the ranks"
    assert refused_input(lambda: _train(sharded, OfListed(sharded.parameters()), 1), told)


@on_ranks(2)
def test_a_step_that_fails_leaves_all_as_it_was(rank: int) -> None:
    class Failing(Trust):
        """Fails on one rank."""

        fails = False

        def update(self, p: Tensor, state: dict[str, Any]) -> None:
            super().update(p, state)
            if Failing.fails and dist.get_rank() == 1:
                raise ValueError("a bad matrix")

    model = _model()
    sharded = _sharded(copy.deepcopy(model), 2)
    (first, second) = (Failing(_matrices(m)) for m in (model, sharded))
    for m, optimizer in ((model, first), (sharded, second)):
        _train(m, optimizer, 2)
    Failing.fails = True
    before, kept = sharded.full_state_dict(), copy.deepcopy(second.state_dict())
    assert refused(lambda: _train(sharded, second, 1), "a bad matrix", ts.DistributedError)
    assert all(torch.equal(before[name], value) for name, value in sharded.full_state_dict().items())
    assert str(kept["state"]) == str(second.state_dict()["state"])
    Failing.fails = False
    for m, optimizer in ((model, first), (sharded, second)):
        _train(m, optimizer, 2, first=2)
    assert _difference(model, sharded) < 1e-10


@on_ranks(2)
def test_schedulers_scalers_and_clipping(rank: int) -> None:
    model = _model()
    sharded = _sharded(copy.deepcopy(model), 2)
    for m in (model, sharded):
        optimizer = torch.optim.Muon(_matrices(m), 1e-2)
        scheduler, scaler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5), ts.GradScaler("cpu")
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(m(*_data())).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert _difference(model, sharded) < 1e-10


NAMES = ("Muon", "Adafactor", "LBFGS", "factors", "coded")
"""The optimizers that are saved."""


def _save(rank: int, mesh: Any, folder: str) -> None:
    for name in NAMES:
        sharded = _sharded(_model(), mesh)
        optimizer = OPTIMIZERS[name](sharded)
        _train(sharded, optimizer, 3)
        ts.save(f"{folder}/{name}", sharded, optimizer)


def _load(rank: int, mesh: Any, folder: str) -> dict[str, list[float]]:
    losses = {}
    for name in NAMES:
        sharded = _sharded(_model(1), mesh)
        optimizer = OPTIMIZERS[name](sharded)
        ts.load(f"{folder}/{name}", sharded, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)  # a rank's own
        losses[name] = _train(sharded, optimizer, 3, first=3)
    return losses


@nightly("3-shard", "4-both")
@pytest.mark.parametrize(
    ("world", "mesh"), [(2, 2), (3, "shard"), (4, {"dp": (2, "shard"), "tp": 2})], ids=["2-2", "3-shard", "4-both"]
)
def test_checkpoints_fit_other_ranks(world: int, mesh: Any, tmp_path: Path) -> None:
    """From two ranks to others and to the unsharded optimizer, and from that."""
    expected, single = {}, tmp_path / "single"
    for name in NAMES:
        model = _model()
        optimizer = OPTIMIZERS[name](model)
        _train(model, optimizer, 3)
        ts.save(single / name, model, optimizer)
        expected[name] = _train(model, optimizer, 3, first=3)
    run_ranks(_save, 2, 2, str(tmp_path / "two"))
    found = [losses for folder in ("two", "single") for losses in run_ranks(_load, world, mesh, str(tmp_path / folder))]
    unsharded = {}
    for name in NAMES:
        model = _model(1)
        optimizer = OPTIMIZERS[name](model)
        ts.load(tmp_path / "two" / name, model, optimizer)
        unsharded[name] = _train(model, optimizer, 3, first=3)
    for losses in (*found, unsharded):
        for name in NAMES:
            assert losses[name] == pytest.approx(expected[name], abs=1e-10), name


def _go_on(rank: int, mesh: Any, file: str) -> dict[str, list[float]]:
    losses = {}
    with torch.serialization.safe_globals([Codes]):
        runs = torch.load(file, mmap=True)
    for name, saved in runs.items():
        sharded = _sharded(_model(1), mesh)
        optimizer = OPTIMIZERS[name](sharded)
        sharded.load_full_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses[name] = _train(sharded, optimizer, 3, first=3)
    return losses


@nightly("3-shard")
@pytest.mark.parametrize(("world", "mesh"), [(2, 2), (3, "shard")], ids=["2-2", "3-shard"])
def test_a_run_goes_on_from_an_unsharded_runs_file(world: int, mesh: Any, tmp_path: Path) -> None:
    saved, expected = {}, {}
    for name in (*NAMES, "AdamW"):
        model = _model()
        optimizer = OPTIMIZERS[name](model)
        _train(model, optimizer, 3)
        saved[name] = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        expected[name] = _train(model, optimizer, 3, first=3)
    torch.save(saved, tmp_path / "run.pt")
    for losses in run_ranks(_go_on, world, mesh, str(tmp_path / "run.pt")):
        for name in expected:
            assert losses[name] == pytest.approx(expected[name], abs=1e-10), name


def test_what_is_not_an_optimizer_class_or_a_reach_is_refused() -> None:
    assert refused_input(lambda: ts.register_optimizer(nn.Linear, "element"), "is not an optimizer class")  # type: ignore[arg-type]
    assert refused_input(lambda: ts.register_optimizer(Trust, "matrix"), "'matrix' is not a reach")  # type: ignore[arg-type]


@on_ranks(2)
def test_a_step_that_treats_small_parameters_differently_is_found_by_full_sizes(rank: int) -> None:
    """The slices are small, the full matrix is not."""

    class Large(Own):
        """Normalises the gradients of parameters that have many elements."""

        def update(self, p: Tensor, state: dict[str, Any]) -> None:
            p.add_(p.grad / p.grad.norm() if p.numel() >= 6000 else p.grad, alpha=-1e-2)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 2000, bias=False), nn.Tanh(), nn.Linear(2000, 3)).double(), torch.ones(5, 4)
    sharded = ts.shard(copy.deepcopy(model), {"0": "column", "2": "row"}, (x.double(),))
    for m in (model, sharded):
        optimizer = Large([m.get_parameter("0.weight")])
        m(x.double()).square().sum().backward()
        optimizer.step()
    assert _difference(model, sharded) < 1e-10


@on_ranks(2)
def test_a_wrapped_state_that_comes_with_size_is_refused(rank: int) -> None:
    """The trial's matrices have fewer elements; ops in the state itself are not seen."""

    class Large(Coded):
        """Has codes for large parameters only."""

        def update(self, p: Tensor, state: dict[str, Any]) -> None:
            super().update(p, state) if p.numel() > 30000 else p.add_(p.grad, alpha=-1e-2)

    model, x = nn.Sequential(nn.Linear(310, 200, bias=False)), torch.ones(5, 310)
    sharded = ts.shard(model, {"0": "column"}, (x,))
    sharded(x).sum().backward()
    assert refused_input(Large(sharded.parameters()).step, "Large reads more than single elements")
