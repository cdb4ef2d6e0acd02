"""Buffers that forward assigns (`self.mean = ...`), and reads of a buffer's memory before forward writes to it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import gradient_error, largest, run_ranks

SPLIT = {"up": "column", "down": "row"}


class _Statistics(nn.Module):
    """A submodule with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + 0.1 * (x.detach().mean(0) - self.mean)
        self.count = self.count + 1
        return x - self.mean


class _Model(nn.Module):
    """Two layers, and a function between them that may assign to the buffers."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.within = nn.Linear(6, 8), nn.Linear(8, 6), _Statistics()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), _Statistics()) for _ in range(4)))
        self.register_buffer("a", torch.rand(8))
        self.register_buffer("b", torch.rand(8))
        self.register_buffer("queue", torch.rand(8, 8))
        self.register_buffer("none", None)
        self.weight = nn.Parameter(torch.rand(8))
        self._between = between

    def forward(self, x: Tensor) -> Any:
        h = self._between(self, self.up(x))
        return (self.down(h[0]), h[1]) if isinstance(h, tuple) else self.down(h)


def _swapped(m: Any, h: Tensor) -> Tensor:
    m.a, m.b = m.b, m.a + h.detach().mean(0)
    return h * m.a


def _under_two_names(m: Any, h: Tensor) -> Tensor:
    m.b = m.a
    m.a = m.a + h.detach().mean(0)
    return h * m.b


def _view_of_another(m: Any, h: Tensor) -> Tensor:
    m.b = m.b.roll(1)
    m.a = m.b[:]
    return h + m.a


def _old_is_returned(m: Any, h: Tensor) -> Any:
    old = m.a
    m.a = m.a + h.detach().mean(0)
    return h * m.a, old


def _assigned_then_written(m: Any, h: Tensor) -> Tensor:
    m.a = m.a + h.detach().mean(0)
    m.a.mul_(0.5)
    return h + m.a


def _in_the_dict(m: Any, h: Tensor) -> Tensor:
    m._buffers["a"] = h.detach().mean(0)
    return h + m.a


def _queue(m: Any, h: Tensor) -> Tensor:
    y = (h @ m.queue.T).tanh()
    m.queue = torch.cat([h.detach(), m.queue])[:8]
    return y


def _read_through_a_view(m: Any, h: Tensor) -> Tensor:
    y = (h * (m.a[None] + 0)).tanh()
    m.a.copy_(h.detach().mean(0))
    return y


def _parameter_through_a_view(m: Any, h: Tensor) -> Tensor:
    y = (h + m.weight[None]).tanh()
    with torch.no_grad():
        m.weight.mul_(0.5)
    return y


def _in_a_module(m: Any, h: Tensor) -> Tensor:
    return m.within(torch.tanh(h))  # type: ignore[no-any-return]


def _in_equal_layers(m: Any, h: Tensor) -> Tensor:
    return m.layers(torch.tanh(h))  # type: ignore[no-any-return]


EXACT = [
    _in_a_module, _in_equal_layers, _swapped, _under_two_names, _view_of_another, _old_is_returned,
    _assigned_then_written, _in_the_dict, _queue, _read_through_a_view, _parameter_through_a_view,
]  # fmt: skip


def _trained(model: nn.Module, sharded: Any, count: int = 3) -> float:
    """Trains both models; returns the largest difference of a gradient, parameter or buffer."""
    worst = []
    for step in range(count):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).double()
        for each in (model, sharded):
            each.zero_grad()
            result = each(x)
            (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        worst.append(gradient_error(sharded, model))
        for each in (model, sharded):
            torch.optim.SGD(each.parameters(), 0.05).step()
        whole = sharded.full_state_dict()
        worst += [(whole[name] - value).abs().max().item() for name, value in model.state_dict().items()]
    return largest(*worst)


@nightly(but=["*-None", "_in_a_module-", "_in_equal_layers-"])
@pytest.mark.parametrize("recompute", [None, ""])
@pytest.mark.parametrize("between", EXACT)
def test_buffers_are_the_unsharded_models(between: Any, recompute: str | None) -> None:
    torch.manual_seed(0)
    model = _Model(between).double()
    objective = ts.Objective() if recompute is None else ts.Objective(recompute=recompute)
    assert _trained(copy.deepcopy(model), ts.shard(copy.deepcopy(model), {}, objective=objective)) < 1e-10
    x = torch.randn(4, 6).double()
    assert ts.check(model, SPLIT, example_inputs=(x,), mesh=2, objective=objective).ok


def _on_ranks(rank: int) -> list[float]:
    ts.distributed.init_process_group()
    found = []
    for between in (_in_a_module, _queue):
        torch.manual_seed(0)
        model = _Model(between).double()
        found.append(_trained(model, ts.shard(copy.deepcopy(model), SPLIT)))
    return found


def test_on_real_ranks() -> None:
    for found in run_ranks(_on_ranks, 2):
        assert largest(*found) < 1e-10, found


def _assign(name: str, value: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def between(m: Any, h: Tensor) -> Tensor:
        setattr(m, name, value(m, h))
        return h

    return between


REFUSED = {
    "one that grows": (_assign("a", lambda m, h: torch.cat([m.a, h[0].detach()])), "(16,) on cpu after it"),
    "another dtype": (_assign("a", lambda m, h: m.a.float()), "and float32 of shape (8,)"),
    "None": (_assign("a", lambda m, h: None), "and gone after it"),
    "one that was None": (_assign("none", lambda m, h: h[0].detach()), "forward makes the buffer none"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_graph_cannot_write_is_refused(kind: str) -> None:
    between, text = REFUSED[kind]
    model = _Model(between).double()
    before = dict(model._buffers)
    with pytest.raises(ts.CaptureError) as caught:
        ts.check(model, SPLIT, example_inputs=(torch.randn(4, 6).double(),), mesh=2)
    assert text in str(caught.value)
    assert [*model._buffers] == [*before] and all(model._buffers[name] is value for name, value in before.items())


def _norm_in_a_checkpoint(m: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda t: torch.tanh(m.norm(t)), h, use_reentrant=False)  # type: ignore[no-any-return]


def _assigned_in_a_checkpoint(m: Any, h: Tensor) -> Tensor:
    return checkpoint(_in_a_module, m, h, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("between", [_norm_in_a_checkpoint, _assigned_in_a_checkpoint])
def test_what_a_checkpoint_writes_twice_is_told(between: Any) -> None:
    """PyTorch writes in forward, and again when backward recomputes it; a sharded model writes once, and warns."""
    model = _Model(between)
    model.norm = nn.BatchNorm1d(8)
    for is_training in (True, False):
        sharded = ts.shard(copy.deepcopy(model).train(is_training), {})
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            sharded(torch.randn(4, 6))
        wanted = is_training or between is _assigned_in_a_checkpoint
        assert any("once per step" in str(warning.message) for warning in found) == wanted


def _change(change: Callable[[Any], object], *, first: bool = True) -> Callable[[Any, Tensor], Tensor]:
    def between(m: Any, h: Tensor) -> Tensor:
        if first:
            change(m)
        h = m.norm(m.within(h))
        if not first:
            change(m)
        return h

    return between


def _swap(m: Any) -> None:
    m.up, m.within = m.within, m.up


LEFT = {
    "modules in other places": (_change(_swap, first=False), "forward replaces the module up"),
    "another in a list": (_change(lambda m: m.layers.__setitem__(0, m.layers[1])), "forward replaces the module 0"),
    "one that is frozen": (_change(lambda m: m.up.weight.requires_grad_(False)), "changes requires_grad of up.weight"),
    "a mode that changes": (_change(lambda m: m.norm.train(not m.norm.training)), "norm.training"),
    "a mode after its use": (_change(lambda m: m.norm.eval(), first=False), "norm.training"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_the_next_call_would_see_is_refused(kind: str) -> None:
    between, text = LEFT[kind]
    model = _Model(between)
    model.norm = nn.BatchNorm1d(8)
    before = [*model.named_modules()]
    with pytest.raises(ts.CaptureError) as caught:
        ts.shard(model, {})(torch.randn(4, 6))
    assert text in str(caught.value)
    assert all(now is then for (_, now), (_, then) in zip(model.named_modules(), before, strict=True))


def test_a_part_may_be_in_eval_mode_at_each_call() -> None:
    model = _Model(_change(lambda m: m.norm.eval())).double()
    model.norm = nn.BatchNorm1d(8).double()
    assert _trained(copy.deepcopy(model), ts.shard(copy.deepcopy(model), {})) < 1e-10
