"""Compares a sharded program with the unsharded model: outputs, written buffers and every gradient.

    >>> print(ts.check(model, plan, (x,), mesh=4))
    exact: 4 ranks, 1 outputs, 0 buffers, 0 input gradients, 12 parameter gradients, tolerance 1e-10
      largest error of outputs               2.2e-16
      ...

All ranks run in this process, in lockstep, with the graphs that real ranks would run. So a user can check a plan for
any number of ranks on one machine, before anything is started on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, fx, nn

from torchshard.capture import check_inputs, check_weights, copy_model, copy_with_values, flatten, flatten_call
from torchshard.capture.facts import ModelFacts, device_type
from torchshard.checking import lockstep
from torchshard.checking.compare import TOLERANCES, Results, compare, error_of_pieces, noise_ceiling
from torchshard.checking.report import Report
from torchshard.checking.steps import Run
from torchshard.checking.trials import Trial, trial_of
from torchshard.compiler.batches import divided_batch
from torchshard.compiler.constraints import PlanLike, read_constraints
from torchshard.compiler.meshes import MeshLike, read_mesh
from torchshard.compiler.prepare import check_examples, prepared
from torchshard.compiler.program import Program, program
from torchshard.core.errors import CaptureError, InputError, in_short
from torchshard.core.rng_states import keeping_rng_states
from torchshard.core.sharding import Sharding
from torchshard.ir.axes import shardings_of
from torchshard.ir.graph import is_tensor, where
from torchshard.passes import with_whole_results
from torchshard.plans.objective import ObjectiveLike, read_aim

T = TypeVar("T")
BY_CALLS = "the graph of calls without gradients: under autograd nothing differs"
BY_GRAPHS = "the graphs of forward and backward: under autograd nothing differs"
WIDER = (torch.float64, torch.float32)
"""A graph of a narrower dtype is compared in one of these too: the first in which all its ops run."""


@torch.inference_mode(False)
@torch.enable_grad()
def check(
    model: nn.Module,
    plan: PlanLike = "auto",
    example_inputs: Sequence[object] | None = None,
    example_kwargs: Mapping[str, object] | None = None,
    *,
    mesh: MeshLike = None,
    objective: ObjectiveLike | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> Report:
    """Compares outputs, written buffers and the gradients of all parameters and inputs with the unsharded model's.

    Args:
        model: the unsharded model, on any device; it and its gradients stay as they are.
        plan: as in `shard`.
        objective: as in `shard`, for the mode "train", because gradients are compared.
        example_inputs, example_kwargs: the arguments of a call of `model`, with the batch of all ranks, as for
            `inputs="global"`.
        mesh: as in `shard`, with any number of ranks: `mesh=8`, `{"dp": 2, "tp": 4}`.
        dtype: the floating dtype to compare in (model and inputs are cast), or None to keep them. If the model then
            computes in less than float64 anywhere, its graph is compared in float64 too, and the capture of a narrower
            model with the model cast to float64: a missing collective may change less than bfloat16 rounds away.

    Raises:
        InputError: the model does not run in `dtype`, or the objective is for calls without gradients.
        ShardError: the errors of `torchshard.shard` for this model and plan. A difference is
            reported, not raised: see `Report.raise_on_error`.
    """
    ranks = read_mesh(mesh)
    check_examples(example_inputs, example_kwargs)
    check_weights(model)
    args, kwargs = list(example_inputs or ()), dict(example_kwargs or {})
    check_inputs(model, flatten_call(model, args, kwargs))
    reference = copy_with_values(model)
    if dtype is not None:
        reference, args, kwargs = in_dtype(reference, args, kwargs, dtype)
    aim = read_aim(objective, device_type(reference))
    if not aim.trains:
        raise InputError(
            "a check compares gradients",
            where="objective=",
            why="a graph for calls without gradients need not sum them over the ranks",
            attempt='the objective without mode; the plan may be what plan(..., objective={"mode": "infer"}) returns',
        )
    constraints = read_constraints(ModelFacts.of(reference), plan, ranks, aim)
    inputs = divided_batch(reference, args, kwargs, constraints.mesh)
    try:
        compiled = program(reference, constraints, args, kwargs, batches=inputs)
    except CaptureError:
        if dtype is not None:
            with _telling_of_dtype(reference), keeping_rng_states(()):
                reference(*args, **kwargs)
        raise
    report = check_program(reference, compiled, compiled.graph, args, kwargs, by_graphs=True)
    return _with_captured(report, reference, args, kwargs)


def check_program(
    model: nn.Module,
    compiled: Program,
    graph: fx.GraphModule,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    by_graphs: bool = False,
) -> Report:
    """Compares a program's graph with the model; tests pass changed graphs, which must be noticed.

    Args:
        by_graphs: whether to compare the graphs that replace this one, too: the graph of calls
            without gradients and, in training, the graphs of forward and backward.
    """
    trial, graph = trial_of(model, compiled.captured, args, kwargs), with_whole_results(graph)
    with keeping_rng_states(trial.tensors):
        graphs = lockstep.rank_graphs(graph, compiled.axis, compiled.batches)
        with _telling_of_dtype(model):
            sides = _Sides(trial.unsharded(), graph, graphs, compiled, by_graphs)
        report = _with_wider(_report(trial, sides, tolerance_of(compiled.captured.graph)), trial, sides)
        return _with_flips(report, trial, sides)


@contextmanager
def _telling_of_dtype(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise InputError(
            "the model does not run in the dtype that it is compared in",
            where=f"{type(model).__name__}.forward",
            why=in_short(error),
            attempt="tensors that forward makes in the dtype of its input (dtype=x.dtype); or dtype=None, for no cast",
        ) from error


@dataclass(frozen=True)
class _Sides:
    """The two sides of a comparison: the unsharded step, and the graphs of the sharded one."""

    expected: Results
    graph: fx.GraphModule
    """The graph with its collectives, for any rank."""
    graphs: list[fx.GraphModule]
    """The localized graph of each rank."""
    made: Program
    by_graphs: bool


def _report(trial: Trial, sides: _Sides, tolerance: float) -> Report:
    """Compares both sides in the trial's precision."""
    made = sides.made
    comparisons = compare(sides.expected, trial.sharded(sides.graphs, made), made.held, tolerance, lambda: trial)
    report = Report(made.mesh.size, tolerance, comparisons)
    if report.ok:
        return _with_graphs(report, trial, sides) if sides.by_graphs else report
    # runs again only after a failure: keeping every node's value takes the memory of all ranks' activations
    watched = trial.whole(watched=True), trial.sharded(sides.graphs, made, watched=True)
    return replace(report, diverges_at=_diagnose(_shardings_of_values(sides), sides.graph, *watched, tolerance))


def _with_graphs(report: Report, trial: Trial, sides: _Sides) -> Report:
    """Adds the graphs that ranks run instead of autograd, with their last passes and real kernels."""
    values = replace(sides.expected, input_grads={}, parameter_grads={})
    runs = (BY_CALLS, values, trial.without_gradients), (BY_GRAPHS, sides.expected, trial.by_graphs)
    for name, expected, run in runs:
        found = run(sides.graphs, sides.made)
        if found is None:
            continue
        others = compare(expected, found, sides.made.held, report.tolerance, lambda: trial)
        errors = {(c.kind, c.name): c for c in others}
        worse = (max(c, errors.get((c.kind, c.name), c), key=lambda c: c.error) for c in report.comparisons)
        report = replace(report, comparisons=tuple(worse))
        if not report.ok:
            return replace(report, diverges_at=name)
    return report


def _with_flips(report: Report, trial: Trial, sides: _Sides) -> Report:
    """Excuses errors as large as rounding noise, if the ranks' graphs are exact in a wider dtype.

    Noise may be of any size if it flips a comparison (a ReLU at zero). It excuses the ranks alone: the captured graph
    runs the same ops as the model in the same order, so it must agree with the model in either precision.
    """
    if report.ok or report.widened is None:
        return report
    made, tolerance = sides.made, report.tolerance
    captured = compare(sides.expected, trial.whole(), {}, tolerance, lambda: trial)
    if any(c.error > tolerance for c in captured):
        return report
    run = trial.sharded(sides.graphs, made)
    comparisons = compare(sides.expected, run, made.held, tolerance, lambda: trial, flips=True)
    excused = replace(report, comparisons=comparisons, diverges_at="", flips=True)
    return excused if excused.ok else report


def _with_captured(report: Report, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Report:
    """Compares the model with its capture in float64 too: else rounding could hide what capture loses."""
    tensors = (*model.parameters(), *model.buffers(), *flatten_call(model, args, kwargs).tensors)
    if all(_as(t, torch.float64) is t for t in tensors):
        return report
    try:
        wide, args, kwargs = in_dtype(copy_model(model), args, kwargs, torch.float64)
        captured = prepared(wide, args, kwargs)
        trial, tolerance = trial_of(wide, captured, args, kwargs), tolerance_of(captured.graph)
        with keeping_rng_states(trial.tensors):
            comparisons = compare(trial.unsharded(), trial.whole(), {}, tolerance, lambda: trial)
    except Exception as error:  # a model that refuses this dtype
        return replace(report, uncaptured=in_short(error))
    return replace(report, captured=Report(1, tolerance, comparisons))


def _with_wider(report: Report, trial: Trial, sides: _Sides) -> Report:
    """Adds a comparison in a wider dtype, the widest in which all ops of the graph run."""
    reason = ""
    for dtype in WIDER:
        if TOLERANCES[dtype] >= report.tolerance:
            break
        try:
            wide = trial.widened(dtype)
            expected = wide.results(sides.expected)
            return replace(report, widened=_report(wide, replace(sides, expected=expected), TOLERANCES[dtype]))
        except Exception as error:  # an op that refuses this dtype
            reason = reason or in_short(error)
    return replace(report, unwidened=reason)


def in_dtype(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], dtype: torch.dtype
) -> tuple[nn.Module, list[object], dict[str, object]]:
    """Casts a model in place, and copies of a call's arguments, to a floating dtype."""
    # `_apply`, which `to` calls: `to(dtype)` itself would make complex tensors real (PyTorch 2.13.0).
    return model._apply(lambda t: _as(t, dtype)), _cast(list(args), dtype), _cast(dict(kwargs), dtype)


def _cast(value: T, dtype: torch.dtype) -> T:
    flat = flatten(value)
    tensors = [_as(t, dtype).detach().requires_grad_(t.requires_grad) for t in flat.tensors]
    result: T = flat.rebuild(tensors)
    return result


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating or complex tensor in the precision of a floating dtype."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def tolerance_of(graph: fx.GraphModule) -> float:
    """The tolerance of the narrowest floating dtype among a graph's values."""
    vals = [n.meta["val"] for n in graph.graph.nodes if is_tensor(n)]
    return max(TOLERANCES.get(dtype, 0.0) for dtype in {torch.float64} | {v.dtype for v in vals})


def _shardings_of_values(sides: _Sides) -> dict[str, Sharding]:
    """The shardings of the values of the graph's nodes, for the values that each rank has."""
    tensors = filter(is_tensor, sides.graphs[0].graph.nodes)
    return {node.name: sharding for node in tensors for sharding in shardings_of(node)}


def _diagnose(
    shardings: Mapping[str, Sharding], graph: fx.GraphModule, whole: Run, sharded: Run, tolerance: float
) -> str:
    """Finds the first node with a wrong value; else the first in backward order with a wrong gradient.

    Values come first: if one differs, the gradients before it differ as a consequence.
    """
    both = whole.values[0].keys() & shardings.keys()
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and n.name in both]
    for node in nodes:
        values = [rank_values.get(node.name) for rank_values in sharded.values]
        if all(isinstance(value, Tensor) for value in values):
            error = error_of_pieces(whole.values[0][node.name], values, shardings[node.name], sharded.mesh)
            if error > tolerance:
                return f"{where(node)} (its value)"
    floor = noise_ceiling(whole.grads[0].values(), tolerance)
    for node in reversed(nodes):
        grads = [rank_grads[node.name] for rank_grads in sharded.grads if node.name in rank_grads]
        if node.name in whole.grads[0] and len(grads) == len(sharded.grads):
            error = error_of_pieces(whole.grads[0][node.name], grads, shardings[node.name].dual, sharded.mesh, floor)
            if error > tolerance:
                return f"{where(node)} (its gradient)"
    return "the parameters alone"
