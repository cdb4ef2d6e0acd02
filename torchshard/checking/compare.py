"""Compares each rank's tensors after a step with the unsharded model's: one error per tensor.

The largest difference of a tensor is measured relative to the tensor's largest value, because sums
of floats differ by rounding. Some tensors are pure rounding noise (the gradient of a key bias
cancels exactly on paper), so their scale is the noise measured for them; see `rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from torchshard.core.mesh import Mesh
from torchshard.core.sharding import UNSHARDED, Sharding
from torchshard.ir.graph import is_float

Kind = Literal["output", "buffer", "input gradient", "parameter gradient"]
"""The kinds of tensors that are compared."""
KINDS: tuple[Kind, ...] = get_args(Kind)
ComparedValue = tuple[Kind, str]
"""(kind, name) of a tensor that is compared."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The narrowest floating dtype in a graph -> the largest error, relative to a tensor's largest value,
that counts as equal."""
_EPSILONS = {tolerance: torch.finfo(dtype).eps for dtype, tolerance in TOLERANCES.items()}
NOISE_MARGIN = 16.0
"""Factor between the noise measured on the unsharded run and the difference allowed for two correct
runs."""
NOISE_EPSILONS = 256
"""Upper bound of noise, in machine epsilons of the largest output, buffer or gradient of any value."""


@dataclass(frozen=True)
class Comparison:
    """The error of one tensor of the sharded step."""

    kind: Kind
    """Buffers, and parameters that forward writes to, are compared as they are after the call."""
    name: str
    error: float
    """Largest difference divided by the largest absolute value of the unsharded tensor. If that value is rounding
    noise, the divisor is larger: the error then equals the tolerance at NOISE_MARGIN times the noise."""


@dataclass(frozen=True)
class Results:
    """The tensors that an unsharded step produced."""

    outputs: Sequence[object]
    output_names: Sequence[str]
    input_grads: Mapping[str, Tensor]
    parameter_grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    """Includes the parameters that forward has written to."""


class RankResults(Protocol):
    """The tensors that a sharded step produced, rank by rank, with their gradients in `.grad`."""

    @property
    def outputs(self) -> Sequence[Sequence[object]]:
        """The results."""

    @property
    def mesh(self) -> Mesh:
        """The axes of the ranks."""

    @property
    def output_shardings(self) -> Sequence[Sharding]:
        """The shardings of the results; empty if all are full."""

    @property
    def states(self) -> Sequence[Mapping[str, Tensor]]:
        """Parameters and buffers by name."""

    @property
    def inputs(self) -> Sequence[Mapping[str, object]]:
        """The call's tensors by name."""


class UnshardedStep(Protocol):
    """A step of the unsharded graph, which can run repeatedly to distinguish rounding from errors."""

    def noise(self, output_names: Sequence[str]) -> Mapping[ComparedValue, float]:
        """The largest absolute change of each tensor by rounding."""

    def gradients_of_values(self) -> Iterable[Tensor]:
        """The gradients of all values; gradients of parameters and inputs are sums of such terms."""


def gradients(leaves: Mapping[str, object]) -> dict[str, Tensor]:
    """The dense gradients of the tensors that require one, by name; zeros if backward did not reach a tensor."""
    grads = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf:
            grads[name] = leaf.grad.to_dense() if leaf.grad is not None else torch.zeros_like(leaf)
    return grads


def compare(
    expected: Results,
    got: RankResults,
    shardings: Mapping[str, Sharding],
    tolerance: float,
    unsharded_step: Callable[[], UnshardedStep] | None,
    *,
    flips: bool = False,
) -> tuple[Comparison, ...]:
    """Compares every tensor with the unsharded one.

    Args:
        shardings: the shardings of parameters, buffers and the call's tensors, by name.
        tolerance: the largest error that counts as equal.
        unsharded_step: creates the step on which rounding noise is measured. The step runs several
            times, so it is created only if a difference may be noise. Without it, all differences
            count.
        flips: noise may be of any size, because rounding may flip a comparison; for programs exact
            in a wider dtype.
    """
    strict = _compare(expected, got, shardings, {})
    if unsharded_step is None or all(c.error <= tolerance for c in strict):
        return strict
    step = unsharded_step()
    ceilings = dict.fromkeys(KINDS, math.inf) if flips else _ceilings(expected, step, tolerance)
    highest = {(c.kind, c.name): ceilings[c.kind] for c in strict}
    if any(c.error > tolerance for c in _compare(expected, got, shardings, highest)):
        return strict
    measured = {place: NOISE_MARGIN * size / tolerance for place, size in step.noise(expected.output_names).items()}
    floors = {place: min(measured.get(place, 0.0), ceiling) for place, ceiling in highest.items()}
    return _compare(expected, got, shardings, floors)


def _ceilings(expected: Results, step: UnshardedStep, tolerance: float) -> dict[Kind, float]:
    """The highest scale by kind that may be taken for noise.

    There is a limit because a comparison that rounding flips makes everything that depends on it look noisy. The terms
    of a gradient count too: for a bias before a batch norm they are large, and their sum is 0.
    """
    grads = [*expected.input_grads.values(), *expected.parameter_grads.values(), *step.gradients_of_values()]
    tensors = (expected.outputs, expected.buffers.values(), grads, grads)
    return {kind: noise_ceiling(group, tolerance) for kind, group in zip(KINDS, tensors, strict=True)}


def noise_ceiling(tensors: Iterable[object], tolerance: float) -> float:
    """The scale below which a tensor may be rounding noise of the others; at most their largest value."""
    # the narrowest dtype counts: a float32 gradient is as noisy as the bfloat16 in which autocast computed it
    narrowest = _EPSILONS.get(tolerance, 0.0)
    floats = [t for t in tensors if is_float(t) and t.numel()]
    largest = ((float(_dense(t).abs().max()), max(torch.finfo(t.dtype).eps, narrowest)) for t in floats)
    return max((value * min(NOISE_EPSILONS * eps / tolerance, 1.0) for value, eps in largest), default=0.0)


def _compare(
    expected: Results, got: RankResults, shardings: Mapping[str, Sharding], floors: Mapping[ComparedValue, float]
) -> tuple[Comparison, ...]:
    comparisons: list[Comparison] = []

    def add(kind: Kind, name: str, value: object, pieces: Sequence[object], sharding: Sharding) -> None:
        error = error_of_pieces(value, pieces, sharding, got.mesh, floors.get((kind, name), 0.0))
        comparisons.append(Comparison(kind, name, error))

    for i, (name, value) in enumerate(zip(expected.output_names, expected.outputs, strict=True)):
        sharding = got.output_shardings[i] if got.output_shardings else UNSHARDED
        add("output", name or "result", value, [outputs[i] for outputs in got.outputs], sharding)
    for name, buffer in expected.buffers.items():
        add("buffer", name, buffer, [state[name] for state in got.states], shardings.get(name, UNSHARDED))
    for name, grad in expected.input_grads.items():
        pieces = [gradients(inputs)[name] for inputs in got.inputs]
        add("input gradient", name, grad, pieces, shardings.get(name, UNSHARDED))
    grads = [gradients(state) for state in got.states]
    for name, grad in expected.parameter_grads.items():
        pieces = [rank_grads[name] for rank_grads in grads]
        add("parameter gradient", name, grad, pieces, shardings.get(name, UNSHARDED))
    frozen = {name for state in got.states for name in _with_other_grads(state, expected.parameter_grads)}
    comparisons += [Comparison("parameter gradient", name, math.inf) for name in sorted(frozen)]
    return tuple(comparisons)


def _with_other_grads(state: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> list[str]:
    """Names of a rank's tensors that have a gradient only here, not in the unsharded model."""
    # by identity: a tied parameter has several names, and the model lists its gradient under one
    trained = {id(state[name]) for name in grads}
    return [name for name, tensor in state.items() if tensor.grad is not None and id(tensor) not in trained]


def error_of(expected: object, got: object, floor: float = 0.0) -> float:
    """Largest difference over the largest absolute value (at least `floor`); infinite if shapes or dtypes differ."""
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        return 0.0 if expected == got else float("inf")
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    values = _dense(expected)
    difference = largest_difference(expected, got)
    finite = values[values.isfinite()].abs()
    scale = max(float(finite.max()) if finite.numel() else 0.0, floor)
    return difference / (scale if scale > 0 else 1.0)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference of two tensors; infinite if NaN is in one only."""
    left, right = _dense(a), _dense(b)
    same = (left == right) | (left.isnan() & right.isnan())
    difference = torch.where(same, 0.0, (left - right).abs())
    if difference.isnan().any():
        return float("inf")
    return float(difference.max()) if difference.numel() else 0.0


def _dense(tensor: Tensor) -> Tensor:
    """A tensor's values, dense and in the widest precision."""
    values = tensor.detach()
    values = values if values.layout == torch.strided else values.to_dense()
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def error_of_pieces(
    expected: object, pieces: Sequence[object], sharding: Sharding, mesh: Mesh, floor: float = 0.0
) -> float:
    """The largest error among the full copies of a value, joined from the slices of a mesh's ranks."""
    if not isinstance(expected, Tensor) or not sharding:
        return max(error_of(expected, piece, floor) for piece in pieces)
    slices = [piece.detach() for piece in pieces if isinstance(piece, Tensor)]
    if len(slices) < len(pieces):
        return math.inf
    return max(error_of(expected, whole, floor) for whole in sharding.join(slices, mesh))
