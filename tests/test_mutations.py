"""`verify` or the check detects collectives that are dropped or changed, and wrong slices."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchshard as ts
from tests.helpers import nightly
from tests.models import CASES
from torchshard import passes
from torchshard.capture import flatten_call
from torchshard.checking import trials
from torchshard.checking.check import BY_GRAPHS, check_program
from torchshard.checking.compare import TOLERANCES, Results, compare
from torchshard.checking.lockstep import rank_graphs
from torchshard.checking.trials import Trial
from torchshard.compiler.program import Program
from torchshard.core.errors import InternalError
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.core.rng_states import rng_states
from torchshard.distributed import kernels
from torchshard.ir.editing import duplicate
from torchshard.ir.fake_values import faking
from torchshard.ir.graph import fake_mode, results_of
from torchshard.ops import OPS
from torchshard.passes import Partition, step_graphs, verify
from torchshard.plans.machine import Machine
from torchshard.runtime import lazy_step, step
from torchshard.testing import capture

ROOT = Path(__file__).parents[1]
NAMES = ["attention", "gqa_1_kv_head", "fused_by_split", "gpt", "encoder_decoder", "dense_moe"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


SPLITTING = Machine("test", 40e9, 8e9, 0.8e9, 8e-5, 1.5e-4)
"""A machine on which plans of these tiny models have a collective of each kind that the tests change."""


def _made(name: str, world_size: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Any, Program, tuple[Any, ...]]:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().to(dtype)
    inputs = tuple(
        x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in case.inputs()
    )
    return model, capture(model, inputs).plan(case.plan, world_size, objective={"machine": SPLITTING}).program, inputs


def _collectives(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.target in OPS]


def _named(graph: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.name == name)


def _caught(model: Any, made: Program, graph: fx.GraphModule, inputs: tuple[Any, ...]) -> str:
    """Returns the detector of a tampered graph: 'verify', 'check', 'both', 'crash', or '' if it goes undetected."""
    try:
        verify(graph, "inserted", after="a mutation")
    except InternalError:
        verified = "verify"
    else:
        verified = ""
    try:
        report = check_program(model, made, graph, inputs, {})
    except Exception:
        return verified or "crash"
    return "both" if verified and not report.ok else "check" if not report.ok else ""


@nightly(but=["attention-torch.float64", "gqa_1_kv_head-torch.float64"])
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, dtype) for name in NAMES for dtype in (torch.float64, torch.bfloat16)),
        *(("gqa_1_kv_head", dtype) for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_every_dropped_collective_is_caught(name: str, dtype: torch.dtype) -> None:
    model, made, inputs = _made(name, dtype=dtype)
    assert check_program(model, made, made.graph, inputs, {}).ok
    found = _collectives(made.graph)
    assert found
    for node in found:
        graph = duplicate(made.graph)
        gone = _named(graph, node.name)
        gone.replace_all_uses_with(gone.args[0])  # type: ignore[arg-type]
        graph.graph.erase_node(gone)
        how = _caught(model, made, graph, inputs)
        kind = OPS[node.target].name
        assert how in (("both",) if kind in ("copy", "reduce") else ("both", "verify")), f"{node.name}: {how!r}"


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


def test_a_dropped_copy_leaves_outputs_exact_and_is_named() -> None:
    model, made, inputs = _made("gpt")
    graph = duplicate(made.graph)
    gone = _named(graph, "blocks_0_norm2_copy")
    gone.replace_all_uses_with(gone.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(gone)
    report = check_program(model, made, graph, inputs, {})
    wrong = {c.kind for c in report.comparisons if c.error > report.tolerance}
    assert wrong == {"parameter gradient"}
    assert "blocks_0_norm2" in report.diverges_at and "gradient" in report.diverges_at, report.diverges_at
    with pytest.raises(ts.ShardError, match="is off by"):
        report.raise_on_error()


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
    model, made, inputs = _made("attention", dtype=dtype)
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


def test_a_backward_that_a_rank_does_not_come_to_is_no_answer() -> None:
    """A backward that misses a collective on one rank raises; real ranks would wait for it."""
    model, made, inputs = _made("attention")
    trial = Trial(model, made.captured, flatten_call(model, inputs, {}), rng_states(()))
    graphs = rank_graphs(made.graph, MeshAxis(2))
    copied = next(n for n in graphs[1].graph.nodes if n.target in OPS and OPS[n.target].name == "copy")
    with graphs[1].graph.inserting_after(copied):
        stopped = graphs[1].graph.call_function(torch.ops.aten.detach.default, (copied,))
    copied.replace_all_uses_with(stopped, delete_user_cb=lambda user: user is not stopped)
    graphs[1].recompile()
    with pytest.raises(InternalError, match=r"wait for each other in the backward.*\[1\]|of ranks \[1\]"):
        trial.sharded(graphs, made)


@pytest.mark.nightly
def test_copy_and_reduce_swapped() -> None:
    model, made, inputs = _made("gpt")
    for node in _collectives(made.graph):
        kind = OPS[node.target].name
        if kind not in ("copy", "reduce"):
            continue
        graph = duplicate(made.graph)
        _named(graph, node.name).target = getattr(torch.ops.torchshard, OPS[node.target].dual).default
        assert _caught(model, made, graph, inputs) == "both", node.name


@pytest.mark.parametrize("name", ["fused_by_split", "fused_by_view", "fused_gqa"])
def test_a_fused_weight_cut_across_its_blocks(name: str) -> None:
    """The classic mistake: shapes are right, values are scrambled."""
    model, made, inputs = _made(name)
    weight = "qkv.weight"
    layout = made.plan.parameters[weight]
    assert isinstance(layout, ts.S) and layout.parts is not None
    plain = {**made.plan.parameters, weight: ts.S(0)}
    wrong = dataclasses.replace(made, plan=made.plan.with_last(parameters=plain))
    assert not check_program(model, wrong, made.graph, inputs, {}).ok


@nightly(but=["conv"])
@pytest.mark.parametrize("name", ["gpt_vocab_unsplit", "conv", "encoder_decoder"])
def test_a_wrong_dim(name: str) -> None:
    model, made, inputs = _made(name, world_size=4)
    mutated = 0
    for node in _collectives(made.graph):
        if OPS[node.target].name not in ("scatter", "gather", "all_gather", "narrow", "reduce_scatter"):
            continue
        shape = node.meta["val"].shape
        for dim in range(len(shape)):
            if dim == node.args[1] or not str(shape[dim]).isdigit():
                continue
            graph = duplicate(made.graph)
            changed = _named(graph, node.name)
            changed.args = (changed.args[0], dim, [int(shape[dim]), 1], changed.args[-1])
            assert _caught(model, made, graph, inputs) in ("verify", "both"), node.name
            mutated += 1
    assert mutated


def test_verify_names_the_node_and_says_that_it_is_our_defect() -> None:
    _, made, _ = _made("attention")
    graph = duplicate(made.graph)
    node = next(n for n in graph.graph.nodes if n.meta.get("choice") is not None)
    node.meta["layouts"] = (ts.P,)
    with pytest.raises(InternalError, match="after a mutation") as caught:
        verify(graph, "inserted", after="a mutation")
    assert node.name in str(caught.value) and "defect of torchshard" in str(caught.value)


def test_the_check_leaves_the_model_alone() -> None:
    model, made, inputs = _made("gpt")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    check_program(model, made, made.graph, inputs, {})
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
