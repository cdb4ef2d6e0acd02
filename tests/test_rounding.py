"""Faults hidden by rounding, and rounding that looks like a fault: wider dtypes distinguish them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchshard as ts
from tests.helpers import DTYPES, nightly
from torchshard.testing import PlannedCall, capture, collective


def _collectives(made: PlannedCall) -> list[tuple[fx.Node, Any]]:
    """Returns the collectives of a call's graph, each with its row."""
    return [(node, row) for node in made.graph.graph.nodes if (row := collective(node)) is not None]


class _OwnDtype(nn.Module):
    """A model that adds values of the input's dtype to a tensor of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(4, 8).index_add(0, torch.tensor([0, 1, 3, 3]), self.up(x))


def test_a_model_that_does_not_run_in_the_dtype_of_the_comparison() -> None:
    x = (torch.randn(4, 8),)
    with pytest.raises(ts.InputError, match=r"index_add_(?s:.*)dtype=x\.dtype"):
        ts.check(_OwnDtype(), "auto", example_inputs=x, mesh=2)
    assert ts.check(_OwnDtype(), "auto", example_inputs=x, mesh=2, dtype=None).ok


class _Narrow(nn.Module):
    """A model that computes mostly in bfloat16, for inputs of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).bfloat16()
        mask = torch.full((3, 8), torch.finfo(torch.bfloat16).min / 2, dtype=torch.bfloat16).triu(7)
        return self.out(x + 1e-3 * self.down((h + mask).relu().to(x.dtype)))


def test_a_fault_smaller_than_rounding_is_seen() -> None:
    torch.manual_seed(0)
    model, x = _Narrow().double(), torch.randn(3, 6).double().requires_grad_()
    made = capture(model, (x,)).plan({"up": "column", "down": "row"}, 2)
    report = made.check()
    assert report.ok and report.tolerance == 5e-2
    assert report.widened is not None and report.widened.tolerance == 1e-10
    assert "with wider dtypes, tolerance 1e-10" in str(report)
    for node, row in _collectives(made):
        graph = made.graph_copy()
        (gone,) = (each for each in graph.graph.nodes if each.name == node.name)
        gone.replace_all_uses_with(gone.args[0])  # type: ignore[arg-type]
        graph.graph.erase_node(gone)
        with pytest.raises(ts.ShardError, match="is off by" if row.name in ("copy", "reduce") else ""):
            made.check(graph).raise_on_error()


class _OnTheEdge(nn.Module):
    """A model with gates at zero, which rounding opens and closes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.register_buffer("level", torch.zeros(3, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x))
        return h + (h - self.level).relu()


def _on_the_edge(x: Tensor) -> _OnTheEdge:
    torch.manual_seed(0)
    model = _OnTheEdge().to(x.dtype)
    model.level = model(x).detach()
    return model


@nightly("torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gates_flipped_by_rounding_are_no_fault_if_wider_dtypes_are_exact(dtype: torch.dtype) -> None:
    x = torch.rand(3, 6).to(dtype)
    model, plan = _on_the_edge(x), {"up": "column", "down": "row"}
    report = ts.check(model, plan, example_inputs=(x,), mesh=4, dtype=None)
    assert report.ok and report.flips and "rounding alone moves" in str(report)
    x = x.requires_grad_()
    made = capture(model, (x,)).plan(plan, 4)
    for node, _ in _collectives(made):
        graph = made.graph_copy()
        (gone,) = (each for each in graph.graph.nodes if each.name == node.name)
        gone.replace_all_uses_with(gone.all_input_nodes[0])
        graph.recompile()
        assert not made.check(graph).ok, node


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_capture_fault_is_not_taken_for_a_flip(dtype: torch.dtype) -> None:
    """The fault is in the ranks' graphs and also in the graph that they are compared with in wider dtypes."""
    x = torch.rand(3, 6).to(dtype).requires_grad_()
    model = _on_the_edge(x)
    call = capture(model, (x,))
    captured = call.captured
    added = [n for n in captured.graph.graph.nodes if n.target is torch.ops.aten.add.Tensor][-1]
    with captured.graph.graph.inserting_before(added):
        stopped = captured.graph.graph.call_function(torch.ops.aten.detach.default, (added.args[0],))
    stopped.meta = dict(added.args[0].meta)
    added.args = (stopped, added.args[1])
    captured.graph.recompile()
    made = call.plan({"up": "column", "down": "row"}, 4)
    assert not made.check().ok


class _Scaled(nn.Module):
    """A model with a scale computed without gradients; each element only affects it a little."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.up(x).std()
        y: Tensor = self.up(x) * scale
        return y


@nightly("*float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_capture_fault_hidden_by_rounding_is_found(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = _Scaled().to(dtype), torch.randn(4096, 12).to(dtype).requires_grad_()
    assert ts.check(model, {"up": "column"}, example_inputs=(x,), mesh=2, dtype=None).ok
    monkeypatch.setattr("torchshard.capture.regions.modes_of", lambda node: SimpleNamespace(grad=True))
    report = ts.check(model, {"up": "column"}, example_inputs=(x,), mesh=2, dtype=None)
    assert not report.ok and "parameter gradient up.weight" in str(report)
    with pytest.raises(ts.ShardError, match="is off by"):
        report.raise_on_error()


def test_a_model_that_refuses_float64_is_told() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(6, 2, dtype=torch.bfloat16)

    report = ts.check(Narrow(), {}, example_inputs=(torch.randn(3, 6).bfloat16(),), mesh=2, dtype=None)
    assert report.ok and "not compared with the model in float64: " in str(report)


def test_a_frozen_parameter_that_ranks_train_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    local_state = sys.modules["torchshard.checking.trials"].local_state

    def trained(*args: Any) -> dict[str, Tensor]:
        return {name: nn.Parameter(tensor.detach()) for name, tensor in local_state(*args).items()}

    model, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6).requires_grad_(False)), torch.randn(3, 6)
    assert ts.check(model, {"0": "column"}, example_inputs=(x,), mesh=2).ok
    monkeypatch.setattr("torchshard.checking.trials.local_state", trained)
    report = ts.check(model, {"0": "column"}, example_inputs=(x,), mesh=2)
    assert {c.name for c in report.comparisons if c.error > 0.1} == {"1.weight", "1.bias"}


def test_a_fault_only_in_a_narrow_dtype_is_not_taken_for_a_flip() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), torch.randn(3, 6)
    made = capture(model, (x,)).plan({"0": "column", "1": "row"}, 2)
    graph = made.graph_copy()
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    with graph.graph.inserting_after(node):
        narrow = graph.graph.call_function(torch.ops.aten.to.dtype, (node, torch.bfloat16))
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
    with graph.graph.inserting_after(narrow):
        back = graph.graph.call_function(torch.ops.aten.to.dtype, (narrow, torch.float32))
    narrow.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    for made_here in (narrow, back):
        made_here.meta = dict(node.meta)
    graph.recompile()
    report = made.check(graph)
    assert not report.ok and report.widened is not None and report.widened.ok


def test_an_op_that_runs_in_no_wider_dtype_is_told() -> None:
    class Bits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (x.view(torch.int16) & 1)

    model, x = Bits(), torch.randn(3, 6).bfloat16()
    made = capture(model, (x,)).plan({}, 2)
    report = made.check()
    assert report.ok and "not compared with wider dtypes: RuntimeError" in str(report)


class _InfiniteMask(nn.Module):
    """Attention with an infinite mask that an op computes, as in TimesFM."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        infinite = x.new_zeros(x.shape[1], x.shape[1]).log()
        scores = q @ k.mT / 2 + infinite.triu(1)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_an_infinite_mask_hides_no_noise() -> None:
    """A key bias's gradient is noise, measured by moving numbers one ulp; an infinite one became NaN."""
    torch.manual_seed(0)
    plan = {"*.q": "column", "*.k": "column", "*.v": "column", "*.o": "row"}
    model = nn.Sequential(_InfiniteMask(), _InfiniteMask())
    ts.check(model, plan, example_inputs=(torch.randn(3, 5, 8),), mesh=2).raise_on_error()
