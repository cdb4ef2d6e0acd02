"""The check by itself: it sees faults in each step between a rank's graph and its run, and measures rounding noise."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchshard as ts
from tests.captured import captured_case
from tests.helpers import DTYPES, nightly
from tests.models import CASES
from torchshard import passes
from torchshard.capture import flatten_call
from torchshard.checking import trials
from torchshard.checking.check import BY_GRAPHS
from torchshard.checking.compare import TOLERANCES, Results, compare
from torchshard.checking.lockstep import rank_graphs
from torchshard.checking.trials import Trial
from torchshard.core.errors import InternalError
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.core.rng_states import rng_states
from torchshard.distributed import kernels
from torchshard.ir.fake_values import faking
from torchshard.ir.graph import fake_mode, results_of
from torchshard.ops import OPS
from torchshard.passes import Partition, step_graphs
from torchshard.runtime import lazy_step, step
from torchshard.testing import capture


def test_a_wrong_graph_of_the_backward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is only in the graphs that training runs, so `ts.check` has to run them too."""

    def doubled(graph: fx.GraphModule, **options: Any) -> Partition:
        parts = step_graphs(graph, **options)
        output = parts.backward.graph.output_node()
        (grads,) = output.args
        assert isinstance(grads, (list, tuple))
        at = next(i for i, grad in enumerate(grads) if isinstance(grad, fx.Node))
        with parts.backward.graph.inserting_before(output):
            wrong = parts.backward.graph.call_function(torch.ops.aten.mul.Scalar, (grads[at], 2))
        output.args = ([*grads[:at], wrong, *grads[at + 1 :]],)
        parts.backward.recompile()
        return parts

    case = CASES["mlp"]
    model, inputs = case.build().double(), case.inputs()
    assert ts.check(model, case.plan, inputs, mesh=2).ok
    monkeypatch.setattr("torchshard.runtime.step.step_graphs", doubled)
    report = ts.check(model, case.plan, inputs, mesh=2)
    assert not report.ok and report.diverges_at == BY_GRAPHS


def _with_doubled_result(graph: fx.GraphModule) -> None:
    """Doubles the first tensor that a graph returns."""
    output = graph.graph.output_node()
    first = next(n for n in output.all_input_nodes if isinstance(n.meta.get("val"), Tensor))
    with graph.graph.inserting_before(output):
        wrong = graph.graph.call_function(torch.ops.aten.mul.Scalar, (first, 2))
    wrong.meta = dict(first.meta)
    output.replace_input_with(first, wrong)
    graph.recompile()


def _in_place(run: Any) -> Any:
    """Wraps an in-place pass: doubles the graph's first result."""

    def wrong(graph: fx.GraphModule, *args: Any) -> Any:
        made = run(graph, *args)
        _with_doubled_result(graph)
        return made

    return wrong


def _returning(run: Any) -> Any:
    """Wraps a pass that returns one graph or several: doubles a first result."""

    def wrong(*args: Any) -> Any:
        made = run(*args)
        changed = made.forward if isinstance(made, Partition) else made[-1].graph if isinstance(made, list) else made
        _with_doubled_result(changed)
        return made

    return wrong


def _wrong_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces each relu by a sigmoid in the last pass."""
    module = importlib.import_module("torchshard.passes.direct")
    found, relu = module.function_of, torch.ops.aten.relu.default
    monkeypatch.setattr(module, "chosen", {})
    monkeypatch.setattr(module, "function_of", lambda node: torch.sigmoid if node.target is relu else found(node))


def _sum_of_one(x: Tensor, source: Any, target: Any, group: Any) -> Tensor:
    return x.clone()


FAULTS: dict[str, Any] = {
    "bucket": lambda m: m.setattr(passes, "bucket", _in_place(passes.bucket)),
    "direct": _wrong_function,
    "kernels": lambda m: [m.setitem(kernels.KERNELS, name, _sum_of_one) for name in ("all_reduce", "all_reduce_")],
    "partition": lambda m: m.setattr(passes, "partition", _returning(passes.partition)),
    "schedule": lambda m: m.setattr(lazy_step, "schedule", _in_place(lazy_step.schedule)),
    "segments": lambda m: m.setattr(lazy_step, "segments", _returning(lazy_step.segments)),
    "under autograd": lambda m: m.setattr(
        trials, "with_direct_collectives", _returning(trials.with_direct_collectives)
    ),
    "widen": lambda m: m.setattr(passes, "widen", _in_place(passes.widen)),
}
"""Step between a rank's graph and its run -> function that puts a fault there."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_what_real_ranks_run_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6, bias=False)), torch.randn(3, 6)
    x.requires_grad_()
    FAULTS[name](monkeypatch)
    assert not ts.check(model, {"0": "column", "2": "row"}, (x,), mesh=2).ok


def _with_sums(graph: fx.GraphModule, given: Any = None, *, kept: Any = (), **_: Any) -> Partition:
    """Returns the graphs of a call within `no_sync()`, with the later sums appended to the backward."""
    groups = {str(node.args[-1]) for node in graph.graph.nodes if node.target in OPS}
    parts = step_graphs(graph, given, unsummed=groups, kept=kept)
    backward = parts.backward.graph
    output = backward.output_node()
    gradients = list(results_of(backward))
    values = gradients[-len(parts.parts) :]
    del gradients[-len(parts.parts) :]
    with backward.inserting_before(output), faking(fake_mode(backward)):
        for part, value in zip(parts.parts, values, strict=True):
            for call in part.sums:
                assert isinstance(value, fx.Node) and callable(call.target)
                summed = backward.call_function(call.target, (value, *call.args), dict(call.kwargs))
                summed.meta = value.meta | {"val": call.target(value.meta["val"], *call.args, **dict(call.kwargs))}
                value = summed
            before = gradients[part.argument]
            gradients[part.argument] = value if before is None else backward.call_function(ADD, (before, value))
    output.args = (gradients,)
    return dataclasses.replace(parts, parts=())


ADD = torch.ops.aten.add.Tensor
LATER: dict[str, Any] = {
    "": lambda found: found,
    "a sum is left out": lambda found: [(value, calls[:-1]) for value, calls in found],
    "a sum is made twice": lambda found: [(value, calls + calls[-1:]) for value, calls in found],
}
"""Fault -> function that changes the parts of a gradient."""


@pytest.mark.parametrize("fault", LATER)
def test_sums_that_come_later_are_the_gradients_or_the_check_sees_it(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6, bias=False)), torch.randn(4, 6)
    module = importlib.import_module("torchshard.passes.unsummed")
    found, summed = module.parts_of, list[object]()

    def parts(*given: Any) -> Any:
        made = found(*given)
        summed.extend(calls for _, calls in made if calls)
        return LATER[fault](made)

    monkeypatch.setattr(module, "parts_of", parts)
    monkeypatch.setattr(step, "step_graphs", _with_sums)
    report = ts.check(model, {}, (x,), mesh={"dp": (2, "replicate")})
    assert summed and report.ok is not bool(fault) and report.diverges_at == (BY_GRAPHS if fault else "")


def test_a_backward_that_a_rank_does_not_come_to_is_no_answer() -> None:
    """A backward that misses a collective on one rank raises; real ranks would wait for it."""
    call = captured_case("attention")
    model, inputs, made = call.model, call.args, call.plan(CASES["attention"].plan, 2).program
    trial = Trial(model, made.captured, flatten_call(model, inputs, {}), rng_states(()))
    graphs = rank_graphs(made.graph, MeshAxis(2))
    copied = next(n for n in graphs[1].graph.nodes if n.target in OPS and OPS[n.target].name == "copy")
    with graphs[1].graph.inserting_after(copied):
        stopped = graphs[1].graph.call_function(torch.ops.aten.detach.default, (copied,))
    copied.replace_all_uses_with(stopped, delete_user_cb=lambda user: user is not stopped)
    graphs[1].recompile()
    with pytest.raises(InternalError, match=r"wait for each other in the backward.*\[1\]|of ranks \[1\]"):
        trial.sharded(graphs, made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_is_zero_on_paper_may_be_the_rounding_of_its_large_terms(dtype: torch.dtype) -> None:
    """With a bias before a batch norm and few rows, the summed gradients are far larger than any sum."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)]
    model, x = nn.Sequential(*blocks, nn.BatchNorm1d(64)).to(dtype), torch.randn(4, 64).to(dtype)
    made = capture(model, (x,)).plan({}, 2).program
    trial = Trial(model, made.captured, flatten_call(model, (x,), {}), rng_states(()))
    expected, zero, eps = trial.unsharded(), "3.2.bias", torch.finfo(dtype).eps
    largest = max(float(grad.abs().max()) for grad in expected.parameter_grads.values())
    terms = max(float(grad.abs().max()) for grad in trial.gradients_of_values())
    noise = trial.noise(("",))["parameter gradient", zero]
    assert 0 < noise < 64 * eps * terms and float(expected.parameter_grads[zero].abs().max()) < 64 * eps * terms
    assert terms > 10 * largest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_small_gradient_that_is_zeroed_is_seen_beside_a_large_one(dtype: torch.dtype) -> None:
    def results(small: float) -> Results:
        grads = {"small": torch.full((3,), small, dtype=dtype), "large": torch.full((3,), 100.0, dtype=dtype)}
        return Results([], [], {}, grads, {})

    ranks = SimpleNamespace(outputs=[[]], output_shardings=[], mesh=Mesh(()), states=[{}], inputs=[{}])
    for name, grad in results(0.0).parameter_grads.items():
        ranks.states[0][name] = torch.zeros(3, dtype=dtype, requires_grad=True)
        ranks.states[0][name].grad = grad
    noise = {("parameter gradient", name): torch.finfo(dtype).eps * 2.0 for name in ("small", "large")}
    step = SimpleNamespace(noise=lambda names: noise, gradients_of_values=list)
    tolerance = TOLERANCES[dtype]
    found = {c.name: c.error <= tolerance for c in compare(results(2.0), ranks, {}, tolerance, lambda: step)}
    assert found == {"small": False, "large": True}


class _Chooses(nn.Module):
    """A model that selects its largest values by comparison, which rounding must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h * (h == h.amax(-1, keepdim=True)))


@nightly("torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_noise_is_measured_per_tensor(dtype: torch.dtype) -> None:
    """A key bias's gradient is only noise, and a value bias's is not; a selection by comparison adds no noise."""
    call = captured_case("attention", dtype)
    model, inputs, made = call.model, call.args, call.plan(CASES["attention"].plan, 2).program
    trial = Trial(model, made.captured, flatten_call(model, inputs, {}), rng_states(()))
    expected, noise = trial.unsharded(), trial.noise(("",))
    relative = {
        name: noise["parameter gradient", name] / float(grad.abs().max())
        for name, grad in expected.parameter_grads.items()
    }
    eps = torch.finfo(dtype).eps
    assert relative["k.bias"] > 0.1 and 0 < relative["v.bias"] < 64 * eps
    model, x = _Chooses().to(dtype), torch.randn(3, 6).to(dtype)
    made = capture(model, (x,)).plan({}, 2).program
    trial = Trial(model, made.captured, flatten_call(model, (x,), {}), rng_states(()))
    assert all(n < 64 * eps for n in trial.noise(("",)).values())
