"""Common uses of a step's results and gradients match the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from tests.models import CASES, GPT
from torchshard.testing import kept_graphs, largest, run_ranks

# --- uses of results and gradients ------------------------------------------------------------------------------------


class _Results(nn.Module):
    """A model with results of all kinds: intermediate values, repeated ones, views, parameters and inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.e = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(5, 4)
        self.b.weight = self.a.weight
        self.bn = nn.BatchNorm1d(4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = F.dropout(self.a(x), 0.4).relu()
        y = self.bn(self.b(h)) + self.calls
        self.calls.add_(1)
        weight = self.a.weight
        return {
            "h": h,
            "y": y,
            "again": h,
            "view": y.mT,
            "x": x,
            "weight": weight,
            "t": weight.mT,
            "loss": y.pow(3).sum(),
        }


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def _loss_alone(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model(x)["loss"].backward()
    return _gradients(model)


def _each(name: str) -> Callable[[nn.Module, Tensor], list[Tensor | None]]:
    def use(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        model(x.requires_grad_())[name].pow(2).sum().backward()
        return [*_gradients(model), x.grad]

    return use


def _all(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    sum(result.pow(2).sum() for result in model(x.requires_grad_()).values()).backward()
    return [*_gradients(model), x.grad]


def _changed_in_place(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    found = model(x)
    found["y"].mul_(2)
    found["view"][0] = 0
    found["y"].pow(2).sum().backward()
    return _gradients(model)


def _hooked(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    found, seen = model(x), []
    for name in ("h", "y", "again", "t"):
        found[name].register_hook(lambda gradient: seen.append(gradient.clone()))
    found["h"].retain_grad()
    found["loss"].backward()
    return [*_gradients(model), found["h"].grad, *seen]


def _between_results(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    found = model(x)
    return [*torch.autograd.grad(found["loss"], [found["h"], model.a.bias]), None]


def _twice(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    loss = model(x)["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    return _gradients(model)


def _of_gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """A gradient penalty: the forward runs again with the same masks, and buffers are written to once."""
    (gradient,) = torch.autograd.grad(model(x.requires_grad_())["loss"], x, create_graph=True)
    gradient.square().sum().backward()
    return [*_gradients(model), x.grad, torch.rand(2)]


def _two_calls(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    first, second = model(x)["loss"], model(2 * x)["loss"]
    second.backward()
    first.backward()
    return _gradients(model)


def _of_each_result(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.eval()
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x)["y"].sum(0), x)
    model.train()
    return [cast(Tensor, jacobian)]


USES = {
    "the loss alone": _loss_alone, **{f"of {name}": _each(name) for name in ("h", "again", "view", "x", "weight", "t")},
    "all": _all, "changed in place": _changed_in_place, "hooked": _hooked, "between results": _between_results,
    "twice": _twice, "of gradients": _of_gradients, "two calls": _two_calls, "of each result": _of_each_result,
}  # fmt: skip


@nightly(but=["of each result", "twice", "two calls"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_results_and_gradients_are_the_models(use: Callable[[nn.Module, Tensor], list[Tensor | None]]) -> None:
    torch.manual_seed(0)
    model = _Results().double()
    sharded = ts.shard(copy.deepcopy(model), {})
    for call in range(3):  # the first under autograd, the others by step graphs
        found = []
        for each in (model, sharded):
            torch.manual_seed(call)
            each.zero_grad()
            found.append([*use(each, torch.randn(3, 4).double()), *(b.clone() for b in each.buffers())])
        assert [t is None for t in found[0]] == [t is None for t in found[1]]
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    if use is not _of_each_result:
        assert kept_graphs(sharded)[0].has_step_graphs


def test_changes_in_place_that_autograd_refuses_are_refused() -> None:
    class Saved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    for model in (Saved(), ts.shard(Saved(), {})):
        for _ in range(2):
            result = model(torch.ones(3, requires_grad=True))
            result.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()


def _steps(rank: int) -> tuple[float, bool]:
    """Makes steps of SGD; returns the largest error of the parameters, and whether step graphs ran."""
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = GPT(p=0.1).double()
    sharded = ts.shard(copy.deepcopy(model), CASES["gpt"].plan)
    for each in (model, sharded):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        torch.manual_seed(1)
        for step in range(4):
            ids = torch.randint(0, 97, (2, 5 + step))
            optimizer.zero_grad()
            each(ids, labels=ids)["loss"].backward()
            optimizer.step()
    wanted, found = model.state_dict(), sharded.full_state_dict()
    worst = largest(*(float((found[name] - wanted[name]).abs().max()) for name in wanted))
    return worst, kept_graphs(sharded)[0].has_step_graphs


@nightly("2")
@pytest.mark.parametrize("world", [2, 3])
def test_training_on_ranks(world: int) -> None:
    for worst, has_graphs in run_ranks(_steps, world):
        assert worst < 1e-10 and has_graphs
