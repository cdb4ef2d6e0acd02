"""What an optimizer keeps and moves is counted in a step's memory and time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import allocated
from torchshard.testing import predicted_memory, run_ranks

NAMES = ["sgd", "sgd-momentum", "adamw-8bit", "adamw-plain", "adamw"]
NUMBERS = 8 * 16 + 16 + 16 * 8 + 8
"""The elements of the model's parameters."""


def _plan(dtype: torch.dtype = torch.bfloat16, **objective: Any) -> ts.Plan:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(dtype)
    return ts.plan(model, {}, (torch.randn(4, 8, dtype=dtype),), mesh=1, objective=objective)


def _held(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of an optimizer's state without the counts of steps."""
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return sum(value.nbytes for value in states if isinstance(value, Tensor))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adamw-plain", torch.optim.AdamW),
        ("sgd-momentum", lambda parameters: torch.optim.SGD(parameters, momentum=0.9)),
        ("muon", torch.optim.Muon),
        ("sgd", torch.optim.SGD),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_plain_optimizers_keep_what_is_counted(name: str, optimizer: Any, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(8, NUMBERS // 8, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    steps = optimizer([parameter])
    steps.step()
    assert predicted_memory(_plan(dtype, optimizer=name))["optimizer"] == _held(steps)


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [(torch.bfloat16, 12), (torch.float16, 12), (torch.float32, 8), (torch.float64, 8)]
)
def test_by_default_moments_and_a_copy_of_narrow_weights_are_float32(dtype: torch.dtype, nbytes: int) -> None:
    plan = _plan(dtype)
    assert predicted_memory(plan)["optimizer"] == nbytes * NUMBERS
    assert predicted_memory(ts.Plan.from_json(plan.to_json())) == predicted_memory(plan)


def test_a_step_takes_as_long_as_its_optimizer_moves_bytes() -> None:
    slow = ts.Machine("slow memory", memory_bandwidth=1e3)
    seconds = {name: _plan(optimizer=name, machine=slow).costs.beside["the optimizer"] for name in NAMES}
    matrices = 2 * 8 * 16
    # the gradient, the weight, and twice what is kept; without a copy the weight is also read
    assert seconds["adamw"] == pytest.approx(matrices * (2 + 2 + 2 * 12) / 1e3)
    assert seconds["adamw-plain"] == pytest.approx(matrices * (2 + 2 + 2 * 4 + 2) / 1e3)
    assert seconds["sgd"] == pytest.approx(matrices * 6 / 1e3)
    assert sorted(seconds, key=lambda name: seconds[name]) == NAMES


def test_muon_multiplies_full_matrices_on_one_rank_each() -> None:
    machine = ts.Machine("slow", flops=1e3, memory_bandwidth=1e30, link_bandwidth=1e3, latency=0.0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), torch.randn(4, 8)
    seconds = {}
    for ranks in (1, 2, 4):
        plan = ts.plan(model, "auto", (x,), mesh=ranks, objective={"optimizer": "muon", "machine": machine})
        seconds[ranks] = plan.costs.beside["the optimizer"]
    flops = 5 * (4 * 8**2 * 16 + 2 * 8**3)  # of one of the two matrices
    moved = 2 * 128 * 4 * (3 + 2)  # bytes of both: parameter and gradient, parameter back, momentum there and back
    assert seconds[1] == pytest.approx(2 * flops / 1e3)
    assert seconds[2] == pytest.approx((flops + moved / 4) / 1e3)
    assert seconds[4] == pytest.approx((flops + moved * 3 / 16) / 1e3)


def test_the_optimizer_is_told_and_limits_plans() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)).bfloat16(), torch.randn(4, 64).bfloat16()
    mesh: Any = {"dp": (2, "replicate")}
    mixed, plain = (
        ts.plan(model, {}, (x,), mesh=mesh, objective={"optimizer": name}) for name in ("adamw", "adamw-plain")
    )
    peaks = [plan.step_memory["peak"] for plan in (mixed, plain)]
    assert "with AdamW in float32" in str(mixed) and "with AdamW in the weights' dtype" in str(plain)
    limit = sum(peaks) / 2
    ts.plan(model, {}, (x,), mesh=1, objective={"memory": limit, "optimizer": "adamw-plain"})
    with pytest.raises(ts.PlanError, match="optimizer"):
        ts.plan(model, {}, (x,), mesh=1, objective={"memory": limit})
    infer = ts.plan(model, {}, (x,), mesh=1, objective={"mode": "infer", "memory": limit})
    assert infer.costs.beside["the optimizer"] == infer.step_memory["optimizer"] == 0 and "AdamW" not in str(infer)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ts.InputError, match="'adam' is no optimizer") as caught:
        _plan(optimizer="adam")
    assert "'adamw' or 'adamw-plain'" in str(caught.value)


def _in_turns(rank: int, count: int) -> tuple[float, float]:
    """The memory of a step of Adafactor, in bytes, and the largest difference from the unsharded model's."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=number == 0) for number in range(count)])
    x = torch.randn(2, 2048)
    sharded = ts.shard(copy.deepcopy(model), {str(i): ("column", "row")[i % 2] for i in range(count)}, (x,))
    steps = {}
    for each in (model, sharded):
        optimizer = torch.optim.Adafactor(each.parameters(), 1e-2)
        for _ in range(2):
            each(x).square().mean().backward()
            steps[each] = allocated(optimizer.step)
            optimizer.zero_grad()
    full = dict(sharded.named_full_parameters())
    return steps[sharded], max((full[name] - p).abs().max().item() for name, p in model.named_parameters())


@pytest.mark.nightly
def test_owners_have_few_full_parameters_at_a_time() -> None:
    """Of 16 MiB each; 4 of them, with gradients, make a turn of 64 MiB."""
    few, many = (run_ranks(_in_turns, 2, count) for count in (8, 20))
    assert max(memory for memory, _ in many) < 1.1 * max(memory for memory, _ in few)
    assert max(difference for _, difference in (*few, *many)) < 1e-5
