"""Parameters that forward writes to (moving averages, codebooks, clamped weights) are state, like buffers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from torchshard.testing import gradient_error, run_ranks

SPLIT = {"up": "column", "down": "row"}


def _tokens(count: int = 6) -> Tensor:
    return torch.randint(12, (count,))


def _values() -> Tensor:
    return torch.randn(6, 8, dtype=torch.float64)


class _Average(nn.Module):
    """BYOL's target: a moving average of the trained weights."""

    def __init__(self, write: Callable[[list[Tensor], list[Tensor]], object]) -> None:
        super().__init__()
        self.up, self.down, self.write = nn.Linear(8, 16), nn.Linear(16, 8), write
        self.target = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.target.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            trained = [*self.up.parameters(), *self.down.parameters()]
            self.write(list(self.target.parameters()), trained)
            wanted = self.target["down"](self.target["up"](x).relu())
        return self.down(self.up(x).relu()) - wanted


def _in_place(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.mul_(0.9).add_(source, alpha=0.1)


def _data(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.data = target.data * 0.9 + source.data * 0.1


def _foreach(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_mul_(targets, [0.9, 0.8, 0.7, 0.6])
    torch._foreach_add_(targets, sources, alpha=0.1)
    torch._foreach_addcmul_(targets, sources, torch._foreach_abs(sources), [0.1, 0.2, 0.3, 0.4])


class _Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.codes, self.down = nn.Linear(8, 8), nn.Embedding(12, 8), nn.Linear(8, 8)
        self.codes.requires_grad_(requires_grad=False)
        self.register_buffer("count", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        z = self.up(x)
        index = (z.unsqueeze(1) - self.codes.weight).square().sum(-1).argmin(1)
        found = self.codes(index)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(index, 12).to(z.dtype)
                self.count.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes.weight.data.add_(chosen.t() @ (z - found) / self.count.unsqueeze(1), alpha=0.1)
        return self.down(z + (found - z).detach())


class _Clamped(nn.Module):
    """Weights are normalized and clamped before use; the gradients belong to the new values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
            self.down.weight[1:].div_(self.down.weight[1:].norm(dim=1, keepdim=True))
        return self.down(self.up(x).relu())


class _ShortRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(12, 8, max_norm=1.0), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.up(self.table(ids)).relu())


WRITES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, str]]] = {
    "in place": (lambda: _Average(_in_place), _values, SPLIT | {"target.up": "column", "target.down": "row"}),
    ".data": (lambda: _Average(_data), _values, SPLIT),
    "foreach": (lambda: _Average(_foreach), _values, SPLIT | {"target.up": "column", "target.down": "row"}),
    "codebook": (_Codebook, _values, {"codes": "vocab"}),
    "clamped": (_Clamped, _values, SPLIT),
    "max_norm": (_ShortRows, _tokens, SPLIT | {"table": "column"}),
    "max_norm, rows": (_ShortRows, _tokens, SPLIT | {"table": "vocab"}),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_forward_writes_to_parameters_is_compared(name: str) -> None:
    torch.manual_seed(0)
    build, example, plan = WRITES[name]
    report = ts.check(build(), plan, example_inputs=(example(),), mesh=2)
    report.raise_on_error()
    assert any(c.kind == "buffer" and c.name.endswith("weight") for c in report.comparisons)


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()


def _trains(rank: int) -> dict[str, float]:
    """Returns each model's largest error after some steps, with split weights and with a split batch."""
    ts.distributed.init_process_group()
    warnings.simplefilter("ignore")
    found = {}
    for name, (build, example, plan) in WRITES.items():
        for mesh in (None, "shard"):
            torch.manual_seed(0)
            model = build().double()
            sharded: Any = ts.shard(copy.deepcopy(model), {} if mesh else plan, mesh=mesh)
            for _ in range(3):
                x = example()
                _step(model, x)
                _step(sharded, x.chunk(2)[rank] if mesh else x)
            expected, got = model.state_dict(), sharded.full_state_dict()
            errors = [float((expected[key] - got[key]).abs().max()) for key in expected]
            found[f"{name}, mesh={mesh}"] = max(*errors, gradient_error(sharded, model))
    return found


@pytest.mark.nightly
def test_slices_of_written_parameters_hold_what_the_unsharded_model_has() -> None:
    for found in run_ranks(_trains, 2):
        assert all(error < 1e-10 for error in found.values()), found


class _Refused(nn.Module):
    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.up, self.down, self.write = nn.Linear(8, 16), nn.Linear(16, 8), write
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu()) * self.frozen
        self.write(self)
        return y


def _replaces(model: Any) -> None:
    model.frozen = nn.Parameter(model.frozen * 0.9, requires_grad=False)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "used before": (
        lambda m: m.down.weight.data.mul_(0.5),
        "the gradient of down is computed of parameter down.weight",
    ),
    "has a gradient": (lambda m: m.frozen.add_(m.down.bias), "would hold a value that has a gradient"),
    "replaced": (_replaces, "forward replaces the parameter frozen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_that_a_graph_cannot_hold_are_refused(name: str) -> None:
    write, text = REFUSED[name]
    with pytest.raises(ts.CaptureError, match=text):
        ts.check(_Refused(write), SPLIT, example_inputs=(_values(),), mesh=2)


def test_a_bias_may_be_written_to_after_its_use() -> None:
    model = _Refused(lambda m: m.down.bias.data.mul_(0.5))
    ts.check(model, SPLIT, example_inputs=(_values(),), mesh=2).raise_on_error()
