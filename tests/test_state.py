"""Common uses of a sharded model's parameters and state dicts are right, or raise on the rank concerned."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torchshard as ts
from tests.helpers import refused, refused_input
from tests.models import MLP
from torchshard.testing import gradient_error, largest, run_ranks

X = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
PLAN = {"up": "column", "down": "row"}


def _pair(plan: Any = PLAN, build: Callable[[], nn.Module] = MLP) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = build()
    return model, ts.shard(model, plan)


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(X).square().mean()
    return loss


# --- casting in place ------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    """A model that computes in the dtypes of its parameters, which may differ by layer, and branches on one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 6), nn.Linear(6, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x.to(self.up.weight.dtype)).to(self.down.weight.dtype).tanh()
        return self.down(h) * self.scale * (2 if self.up.weight.dtype == torch.float64 else 1)


def _cast_data(model: Any) -> None:
    """Casts by `.data`, as diffusers' `cast_training_params` and peft do."""
    for p in model.up.parameters():
        p.data = p.data.to(torch.float64)


def _swap(model: Any) -> None:
    for p in list(model.up.parameters()):
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().double()))


CASTS: dict[str, Callable[[Any], Any]] = {
    "p.data = p.data.to()": _cast_data,
    "a part.to()": lambda m: m.up.to(torch.float64),
    "swap_tensors": _swap,
    "buffer.data": lambda m: setattr(m.scale, "data", m.scale.double()),
    "the model.to()": lambda m: m.to(torch.float64),
}


def _casts(rank: int) -> dict[str, float]:
    """Returns the largest error of a result or gradient for each cast, and 0 if a buffer of a wrong shape raises."""
    found = {}
    for name, cast in CASTS.items():
        _, sharded = _pair(build=Cast)
        torch.manual_seed(0)
        model, errors = Cast(), []  # a separate model: the sharded one refers to the parameters of its source
        for step in range(3):
            if step == 1:
                cast(model)
                cast(sharded)
            results = [m(X) for m in (model, sharded)]
            for m, result in zip((model, sharded), results, strict=True):
                m.zero_grad()
                result.square().mean().backward()
            assert results[0].dtype == results[1].dtype
            errors += [gradient_error(sharded, model), (results[0] - results[1]).abs().max().item()]
        found[name] = largest(*errors)
    sharded.scale.data = torch.ones(1)
    found["refused"] = float(not refused_input(lambda: sharded(X), "'scale' was replaced by an incompatible tensor"))
    return found


def test_parameters_may_be_cast_in_place() -> None:
    for found in run_ranks(_casts, 2):
        assert len(found) == len(CASTS) + 1 and largest(*found.values()) < 1e-6, found


# --- initialising ----------------------------------------------------------------------------------------------------

INITIALISED: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda m: nn.init.normal_(m.up.weight),
    "kaiming": lambda m: nn.init.kaiming_uniform_(m.up.weight),
    "xavier": lambda m: nn.init.xavier_normal_(m.down.weight),
    "trunc_normal_": lambda m: nn.init.trunc_normal_(m.up.weight),
    "orthogonal_": lambda m: nn.init.orthogonal_(m.up.weight),
    "eye_": lambda m: nn.init.eye_(m.up.weight),
    "sparse_": lambda m: nn.init.sparse_(m.up.weight, 0.5),
    ".data.normal_()": lambda m: m.up.weight.data.normal_(0, 0.02),
    ".data.uniform_()": lambda m: m.down.weight.data.uniform_(-1, 1),
    "apply": lambda m: m.apply(lambda p: nn.init.normal_(p.weight) if isinstance(p, nn.Linear) else None),
    "reset_parameters": lambda m: m.up.reset_parameters(),
}


def _initialises(rank: int) -> dict[str, str]:
    ts.distributed.init_process_group()
    found = {}
    for name, initialise in INITIALISED.items():
        try:
            initialise(_pair()[1])
        except (ts.InputError, AttributeError) as error:
            found[name] = str(error)
    model, sharded = _pair()
    for m in (model, sharded):
        nn.init.zeros_(m.up.weight)
        nn.init.constant_(m.up.bias, 0.5)
        m.down.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    return {**found, "elementwise": str(torch.allclose(model(X), sharded(X), rtol=1e-5, atol=1e-6))}


def test_initialising_slices_as_if_they_were_whole_is_refused() -> None:
    for found in run_ranks(_initialises, 2):
        assert found.pop("elementwise") == "True"
        assert set(found) == set(INITIALISED)
        assert all("initialised by" in text or "slices" in text for text in found.values()), found


# --- optimizers, clipping, wrappers ----------------------------------------------------------------------------------


def _steps(rank: int) -> dict[str, Any]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = MLP()
    early = torch.optim.SGD(model.parameters(), 0.1)
    sharded = ts.shard(model, PLAN)
    _loss(sharded).backward()
    found: dict[str, Any] = {"early": refused_input(early.step, "made before ts.shard")}
    _loss(model).backward()
    early.step()  # now it trains the unsharded model
    for norm in (2.0, 1.0, float("inf")):
        for clip in (nn.utils.clip_grad_norm_, ts.clip_grad_norm_):
            model, sharded = _pair()
            for m in (model, sharded):
                _loss(m).backward()
            expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm)
            got = clip(sharded.parameters(), 0.01, norm)
            close = torch.allclose(got, expected, rtol=1e-5, atol=0) and gradient_error(sharded, model) < 1e-7
            found[f"{clip.__module__} {norm}"] = close
    model, sharded = _pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
    scaler.scale(_loss(sharded)).backward()
    if rank == 0:
        sharded.up.weight.grad[0, 0] = float("inf")
    before = sharded.down.bias.clone()
    scaler.step(optimizer)
    scaler.update()
    found["an overflow on one rank"] = torch.equal(before, sharded.down.bias) and scaler.get_scale() == 2.0
    found["many at a time"] = type(sharded.up.weight) in sys.modules["torch.optim.optimizer"]._foreach_supported_types
    return found


def _clips(rank: int) -> dict[str, bool]:
    """Clips gradients with an empty slice on the last rank: five hidden units on four ranks are 2, 2, 1 and 0."""
    ts.distributed.init_process_group()
    found = {}
    for norm in (0.0, 1.0, 2.0, float("inf")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        sharded = ts.shard(copy.deepcopy(model), {"0": "column", "2": "row"})
        x = torch.randn(2, 4, dtype=torch.float64)
        for m in (model, sharded):
            m(x).square().sum().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm, foreach=False) for m in (model, sharded)]
        close = torch.allclose(*norms, rtol=1e-12, atol=0) and gradient_error(sharded, model) < 1e-12
        found[f"norm {norm}"] = close
        found[f"slice {rank}"] = len(sharded.get_parameter("0.bias")) == (2, 2, 1, 0)[rank]
    return found


def test_pytorchs_clipping_with_an_empty_slice() -> None:
    for found in run_ranks(_clips, 4):
        assert all(found.values()), found


def test_optimizers_and_clipping() -> None:
    assert all(all(found.values()) for found in run_ranks(_steps, 2)), run_ranks(_steps, 2)


def _looks_within_steps(rank: int) -> list[int]:
    """Returns how often a step runs the code of slices: for two PyTorch optimizers, and for a user's subclass."""
    ts.distributed.init_process_group()
    _, sharded = _pair()
    _loss(sharded).backward()
    looks = list[int]()
    for made in (torch.optim.SGD, torch.optim.AdamW, _Mine):
        step = made(sharded.parameters(), 0.1).step
        step()  # the first step also marks the new states
        caller = sys.modules["torchshard.weights.local_slice"].caller
        with mock.patch("torchshard.weights.local_slice.caller", wraps=caller) as asked:
            step()
        looks.append(asked.call_count)
    return looks


def test_pytorchs_optimizers_step_slices_unwatched() -> None:
    for sgd, adamw, mine in run_ranks(_looks_within_steps, 2):
        assert (sgd, adamw) == (0, 0) < (mine, mine)


class _Mine(torch.optim.SGD):
    """A user's subclass of a PyTorch optimizer."""


def _wraps(rank: int) -> list[bool]:
    ts.distributed.init_process_group()
    _, sharded = _pair()
    text = "as copies of it"
    found = [refused(lambda: DistributedDataParallel(sharded), text, ts.DistributedError)]
    nested = nn.Sequential(sharded, nn.Linear(12, 2))
    found.append(refused(lambda: DistributedDataParallel(nested), text, ts.DistributedError))
    _loss(sharded).backward()
    zero = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, lr=0.1)
    found.append(refused(zero.step, text, ts.DistributedError))
    return found


def test_wrappers_that_take_slices_for_copies_are_refused() -> None:
    assert run_ranks(_wraps, 2) == [[True] * 3] * 2


# --- state dicts -----------------------------------------------------------------------------------------------------


def _saved(state: Any) -> Any:
    held = io.BytesIO()
    torch.save(state, held)
    held.seek(0)
    return torch.load(held)


def _dicts(rank: int, folder: str) -> dict[str, bool]:
    ts.distributed.init_process_group()
    model, sharded = _pair()
    other = 1 - rank
    state, path = sharded.state_dict(), f"{folder}/{{}}.pt"
    torch.save(state, path.format(rank))
    torch.save({name: value.clone() for name, value in state.items()}, path.format(f"clones{rank}"))
    torch.save(sharded.full_state_dict(), path.format("full")) if rank == 0 else sharded.full_state_dict()
    dist.barrier()
    found = {"own": bool(sharded.load_state_dict(torch.load(path.format(rank))))}
    for name in (other, f"clones{other}"):
        loaded = torch.load(path.format(name))
        found[f"another rank's {name}"] = refused_input(lambda: sharded.load_state_dict(loaded), "another slice of")  # noqa: B023
        nested = {f"0.{k}": v for k, v in loaded.items()}
        wrapped = nn.Sequential(sharded)
        found[f"nested {name}"] = refused_input(lambda: wrapped.load_state_dict(nested), "another slice of")  # noqa: B023
    full = torch.load(path.format("full"))
    found["whole"] = refused_input(lambda: sharded.load_state_dict(full), "load_full_state_dict")
    sharded.load_full_state_dict(full)
    found["loaded"] = torch.allclose(sharded(X), model(X), rtol=1e-5, atol=1e-6)
    full["up.weight"] = full["up.weight"] + rank
    what = "load different state dicts"
    found["different"] = refused(lambda: sharded.load_full_state_dict(full), what, ts.DistributedError)
    full.pop("up.weight") if rank else None
    what = "does not fit at 'up.weight'"
    found["missing on one"] = refused(lambda: sharded.load_full_state_dict(full), what, ts.InputError)
    found["names"] = list(state) == list(model.state_dict()) and all(isinstance(v, Tensor) for v in state.values())
    again = ts.shard(model, {"up": "row", "down": "column"})
    found["another plan"] = refused_input(lambda: again.load_state_dict(_saved(state)), "another slice of")
    return found


def test_state_dicts_know_their_model_and_rank(tmp_path: Path) -> None:
    for found in run_ranks(_dicts, 2, str(tmp_path)):
        assert all(found.values()), found


def _optimizer_states(rank: int, folder: str) -> list[bool]:
    ts.distributed.init_process_group()
    _, sharded = _pair()
    optimizer = torch.optim.AdamW(sharded.parameters(), 0.1)
    _loss(sharded).backward()
    optimizer.step()
    state = optimizer.state_dict()
    torch.save(state, f"{folder}/{rank}.pt")
    dist.barrier()
    found = []
    for which in (rank, 1 - rank):
        fresh, loaded = torch.optim.AdamW(sharded.parameters(), 0.1), torch.load(f"{folder}/{which}.pt")
        refused_it = refused_input(lambda: fresh.load_state_dict(loaded), "is another slice's")  # noqa: B023
        found.append(refused_it is (which != rank) and bool(fresh.state) is not refused_it)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    moved = optimizer.state_dict()["state"][0]["exp_avg"]
    return [*found, not torch.equal(moved, before["state"][0]["exp_avg"])]


def test_optimizer_states_know_their_model_and_rank(tmp_path: Path) -> None:
    assert run_ranks(_optimizer_states, 2, str(tmp_path)) == [[True] * 3] * 2


def test_a_full_state_dict_is_a_copy() -> None:
    _, sharded = _pair()
    full = sharded.full_state_dict()
    before = {name: value.clone() for name, value in full.items()}
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.add_(1)
    assert all(torch.equal(full[name], value) for name, value in before.items())
    ts.distributed.destroy_process_group()
