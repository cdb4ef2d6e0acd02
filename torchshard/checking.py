"""Proof for users: the sharded program beside the unsharded model, outputs and every gradient.

    >>> print(ts.check(model, plan, world_size=4, example_inputs=(x,)))
    exact: 4 ranks, 1 outputs, 0 input gradients, 12 parameter gradients
      largest error of outputs               2.2e-16
      ...

All ranks run in this process, in lockstep, over the graphs that would run on real ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchshard import lockstep
from torchshard.capture import Leaves, check_weights, copied, flatten, flatten_call, shared_names
from torchshard.errors import ShardError
from torchshard.graph import is_tensor, where
from torchshard.layouts import I, Layout, dual, is_whole, join
from torchshard.materialize import local_state
from torchshard.planner.machine import Machine, objective
from torchshard.planning import PlanLike
from torchshard.program import Program, check_examples, check_world_size, device_type, program

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error relative to the largest value of a tensor, by the narrowest floating dtype in the graph."""
COTANGENTS = 7919
"""The seed of the first output's gradient."""


class CheckError(ShardError):
    """The sharded program does not compute what the model computes."""


@dataclass(frozen=True)
class Comparison:
    """One tensor, sharded beside unsharded."""

    kind: str
    """'output', 'buffer' (after the call), 'input gradient' or 'parameter gradient'."""
    name: str
    error: float
    """Largest difference over the largest absolute value of the unsharded one."""


@dataclass(frozen=True)
class Report:
    """What a check found."""

    world_size: int
    tolerance: float
    """What counts as equal."""
    comparisons: tuple[Comparison, ...]
    diverges_at: str = ""
    """Where values, or gradients on their way back, first differ."""

    @property
    def ok(self) -> bool:
        """Whether all errors are within the tolerance."""
        return all(c.error <= self.tolerance for c in self.comparisons)

    def raise_on_error(self) -> Report:
        """This report; raises CheckError where something differs."""
        if not self.ok:
            worst = max(self.comparisons, key=lambda c: c.error)
            raise CheckError(
                f"the {worst.kind} {worst.name} is off by {worst.error:.1e}",
                where=self.diverges_at,
                why=f"{self.world_size} ranks, tolerance {self.tolerance:.0e}",
                attempt="report the model: no plan may change what a model computes",
            )
        return self

    def __str__(self) -> str:
        kinds = ("output", "buffer", "input gradient", "parameter gradient")
        by_kind = {kind: [c for c in self.comparisons if c.kind == kind] for kind in kinds}
        counts = ", ".join(f"{len(found)} {kind}s" for kind, found in by_kind.items())
        lines = [
            f"{'exact' if self.ok else 'WRONG'}: {self.world_size} ranks, {counts}, tolerance {self.tolerance:.0e}"
        ]
        for kind, found in by_kind.items():
            if found:
                worst = max(found, key=lambda c: c.error)
                lines.append(f"  largest error of {kind + 's':20} {worst.error:.1e}  {worst.name}")
        lines += [f"  wrong: {c.kind} {c.name}: {c.error:.1e}" for c in self.comparisons if c.error > self.tolerance]
        return "\n".join([*lines, *([f"  first differs at {self.diverges_at}"] if self.diverges_at else [])])


def check(
    model: nn.Module,
    plan: PlanLike,
    *,
    world_size: int,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = torch.float64,
    memory: str | float | None = None,
    machine: Machine | str | None = None,
    axes: str = "weights",
) -> Report:
    """Compares outputs, written buffers, input gradients and every parameter gradient with the unsharded model's.

    Args:
        model: the unsharded model, on the CPU; it and its gradients are left alone.
        world_size: any number of ranks.
        example_inputs, example_kwargs: what `model` is called with.
        dtype: the floating dtype to compare in (model and inputs are cast); None: as they are.
        memory, machine, axes: what the best plan is; see `plan`.

    Raises:
        what `torchshard.shard` raises for this model and plan. A difference is reported, not raised:
        see `Report.raise_on_error`.
    """
    check_world_size(world_size)
    check_examples(example_inputs, example_kwargs)
    check_weights(model)
    held, args, kwargs = copied(model), list(example_inputs), dict(example_kwargs or {})
    if dtype is not None:
        held, args, kwargs = in_dtype(held, args, kwargs, dtype)
    aim = objective(machine, memory, axes, device_type(held))
    made = program(held, plan, world_size, args, kwargs, aim=aim)
    return check_program(held, made, made.graph, args, kwargs)


def check_program(
    model: nn.Module, made: Program, graph: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Report:
    """Compares one program's graph (`made.graph`, or one that was tampered with) with the model."""
    world = made.plan.world_size
    call = replace(flatten_call(model, args, kwargs), names=made.captured.inputs)
    seed = torch.get_rng_state()
    expected = unsharded(model, call)
    torch.set_rng_state(seed)
    states = [_rank_state(model, made.plan.parameters, rank, world) for rank in range(world)]
    sharded = _Run(made, lockstep.rank_graphs(graph, world), states, call)
    tolerance = tolerance_of(made.captured.graph)
    report = Report(world, tolerance, tuple(compare(expected, sharded, made.plan.parameters, tolerance)))
    if not report.ok:
        torch.set_rng_state(seed)
        whole = _Run(made, [made.captured.graph], [_rank_state(model, {}, 0, 1)], call)
        report = replace(report, diverges_at=_diagnose(whole, sharded, graph, report.tolerance))
    torch.set_rng_state(seed)
    return report


def in_dtype(model: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[nn.Module, Any, Any]:
    """A model (itself) and a call of it in a floating dtype."""
    return model._apply(lambda t: _as(t, dtype)), _cast(list(args), dtype), _cast(dict(kwargs), dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    flat = flatten(value)
    return flat.rebuild([_as(t, dtype).detach().requires_grad_(t.requires_grad) for t in flat.tensors])


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating or complex tensor in the precision of a floating dtype."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def tolerance_of(graph: fx.GraphModule) -> float:
    """What counts as equal, by the narrowest floating dtype of a graph's values."""
    vals = [n.meta["val"] for n in graph.graph.nodes if is_tensor(n)]
    return max(TOLERANCES.get(dtype, 0.0) for dtype in {torch.float64} | {v.dtype for v in vals})


# --- both sides ------------------------------------------------------------------------------------------------------


@dataclass
class _Results:
    outputs: list[Any]
    output_names: tuple[str, ...]
    input_grads: dict[str, Tensor]
    parameter_grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _cotangent(output: Tensor, index: int) -> Tensor:
    """A fixed random gradient of an output; of a seed of its own, since an input of the same numbers hides errors: the
    gradient of a norm along its input is zero."""
    generator = torch.Generator().manual_seed(COTANGENTS + index)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)


def leaf(tensor: Any) -> Any:
    """A tensor of its own with the same values, which gets a gradient if that does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad) if isinstance(tensor, Tensor) else tensor


def backward(outputs: Sequence[Any], copies: int) -> None:
    """Backward from all outputs; each of the `copies` ranks' outputs gets the same gradient."""
    per_rank = len(outputs) // copies
    live = [
        (o, _cotangent(o, i % per_rank)) for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad
    ]
    if live:
        torch.autograd.backward([o for o, _ in live], [g for _, g in live])


def _grads(leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: leaf.grad.to_dense() if leaf.grad is not None else torch.zeros_like(leaf)
        for name, leaf in leaves.items()
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }


def unsharded(model: nn.Module, call: Leaves) -> _Results:
    """The model itself, as a copy of its own: gradients and buffers of the user's stay as they are."""
    held = copied(model)
    held.zero_grad()
    inputs = {name: leaf(t) for name, t in zip(call.names, call.tensors, strict=True)}
    call_args, call_kwargs = call.rebuild(list(inputs.values()))
    with torch.enable_grad():
        flat = flatten(held(*call_args, **call_kwargs))
        backward(flat.tensors, 1)
    buffers = dict(held.named_buffers())
    return _Results(list(flat.tensors), flat.names, _grads(inputs), _grads(dict(held.named_parameters())), buffers)


class _Run:
    """A run of some ranks' graphs in lockstep, forward and backward, with every rank's values and gradients."""

    def __init__(self, made: Program, graphs: Sequence[fx.GraphModule], states: Sequence[Any], call: Leaves) -> None:
        ranks = range(len(graphs))
        self.states = states
        self.inputs = [{n: leaf(t) for n, t in zip(call.names, call.tensors, strict=True)} for _ in ranks]
        self.values: list[dict[str, Any]] = [{} for _ in ranks]
        self.grads: list[dict[str, Tensor]] = [{} for _ in ranks]
        fed = []
        for graph, state, inputs in zip(graphs, states, self.inputs, strict=True):
            known = {**made.captured.constants, **state, **inputs}
            fed.append([known[n.meta["path"]] for n in graph.graph.nodes if n.op == "placeholder"])
        with torch.enable_grad():
            self.outputs = lockstep.run(graphs, fed, [self._recorder(rank) for rank in ranks])
            backward([o for outputs in self.outputs for o in outputs], len(graphs))

    def _recorder(self, rank: int) -> lockstep.Record:
        def record(node: fx.Node, value: Any) -> None:
            self.values[rank][node.name] = value
            if isinstance(value, Tensor) and value.requires_grad and node.op != "placeholder":
                value.register_hook(lambda g: self.grads[rank].__setitem__(node.name, g))

        return record


def _rank_state(model: nn.Module, layouts: Mapping[str, Layout], rank: int, world: int) -> dict[str, Tensor]:
    """A rank's parameters and buffers, by all their names."""
    held = local_state(model, layouts, rank, world)
    return {name: held[names[0]] for name, names in shared_names(model).items()}


# --- comparing -------------------------------------------------------------------------------------------------------


def _error(expected: Any, got: Any, floor: float = 0.0) -> float:
    """Largest difference over the largest absolute value (at least `floor`); infinite where shapes or kinds differ."""
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        return 0.0 if expected == got else float("inf")
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    a, b = _dense(expected), _dense(got)
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    if difference.isnan().any() or difference.isinf().any():
        return float("inf")
    finite = a[a.isfinite()].abs()
    scale = max(float(finite.max()) if finite.numel() else 0.0, floor)
    return float(difference.max()) / (scale if scale > 0 else 1.0)


def _dense(tensor: Tensor) -> Tensor:
    """Its values, dense and in the widest precision."""
    held = tensor.detach()
    held = held if held.layout == torch.strided else held.to_dense()
    return held.to(torch.complex128 if held.is_complex() else torch.float64)


def _error_of_pieces(expected: Any, pieces: Sequence[Any], layout: Layout, floor: float = 0.0) -> float:
    """The error of what the ranks hold together; values that every rank holds are compared on every rank."""
    if not isinstance(expected, Tensor):
        return max(_error(expected, p) for p in pieces)
    if is_whole(layout):
        return max(_error(expected, p, floor) for p in pieces)
    return _error(expected, join([p.detach() for p in pieces], layout), floor)


def _noise(tensors: Iterable[Any], tolerance: float) -> float:
    """The scale below which a tensor is rounding noise of the others: sums that cancel exactly on paper, such as the
    gradient of a key bias, are 256 machine epsilons of the largest value here; never more than that value."""
    floats = [t for t in tensors if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.numel()]
    largest = ((float(_dense(t).abs().max()), torch.finfo(t.dtype).eps) for t in floats)
    return max((value * min(256 * eps / tolerance, 1.0) for value, eps in largest), default=0.0)


def compare(expected: _Results, got: Any, layouts: Mapping[str, Layout], tolerance: float) -> list[Comparison]:
    """Every tensor beside the unsharded one; `got` has the ranks' outputs, states and inputs."""
    found = []
    floor = _noise(expected.outputs, tolerance)
    for i, (name, value) in enumerate(zip(expected.output_names, expected.outputs, strict=True)):
        error = _error_of_pieces(value, [o[i] for o in got.outputs], I, floor)
        found.append(Comparison("output", name or "result", error))
    floor = _noise(expected.buffers.values(), tolerance)
    for name, buffer in expected.buffers.items():
        error = _error_of_pieces(buffer, [state[name] for state in got.states], layouts.get(name, I), floor)
        found.append(Comparison("buffer", name, error))
    floor = _noise([*expected.input_grads.values(), *expected.parameter_grads.values()], tolerance)
    for name, grad in expected.input_grads.items():
        pieces = [_grads({name: inputs[name]})[name] for inputs in got.inputs]
        found.append(Comparison("input gradient", name, _error_of_pieces(grad, pieces, I, floor)))
    for name, grad in expected.parameter_grads.items():
        pieces = [_grads({name: state[name]})[name] for state in got.states]
        error = _error_of_pieces(grad, pieces, layouts.get(name, I), floor)
        found.append(Comparison("parameter gradient", name, error))
    return found


def _diagnose(whole: _Run, sharded: _Run, graph: fx.GraphModule, tolerance: float) -> str:
    """The first node whose value differs; if none does, the first on the way back whose gradient does."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and n.name in whole.values[0] and is_tensor(n)]
    for node in nodes:
        pieces = [v.get(node.name) for v in sharded.values]
        if all(isinstance(p, Tensor) for p in pieces):
            error = _error_of_pieces(whole.values[0][node.name], pieces, node.meta["layouts"][0])
            if error > tolerance:
                return f"{where(node)} (its value)"
    floor = _noise(whole.grads[0].values(), tolerance)
    for node in reversed(nodes):
        grads = [g[node.name] for g in sharded.grads if node.name in g]
        if node.name in whole.grads[0] and len(grads) == len(sharded.grads):
            error = _error_of_pieces(whole.grads[0][node.name], grads, dual(node.meta["layouts"][0]), floor)
            if error > tolerance:
                return f"{where(node)} (its gradient)"
    return "the parameters alone"
